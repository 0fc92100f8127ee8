"""A dial on a trained model: fewer Bayesian weights, without another training.

The weights whose noise matters least become points at their means. To first order a weight adds σ²·S to the variance of
the outputs, with S its sensitivity. Data give S. Without data the posterior itself tells it: where the ELBO is least,
1/σ² = 1/s² + h for a prior of scale s and the curvature h of the loss, so that σ²·h = 1 - σ²/s²: a weight matters by
how far its σ has shrunk from the prior (MacKay 1992: how well it is determined).
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.methods import PBN, SSVI, MeanField
from leanbayes.posteriors import MeanFieldPosterior, PartialPosterior, SubspacePosterior
from leanbayes.posteriors.partial import KLSum
from leanbayes.ranking import highest
from leanbayes.selection import count_of
from leanbayes.sensitivities import sensitivity


@torch.no_grad()
def restrict(bnn: BayesianModel, rate: float, data: Iterable[Any] | None = None) -> BayesianModel:
    """Return a copy in which at most ⌊rate·n⌋ of n weights keep their spread; those of a smaller rate are among them.

    data: batches (x, y) to rank by σ²·S; without, by 1 - σ²/s².
    """
    method, posterior = bnn.method, bnn.posterior
    kinds = (MeanFieldPosterior, PartialPosterior, SubspacePosterior)
    if not isinstance(method, (PBN, MeanField, SSVI)) or not isinstance(posterior, kinds):
        raise LeanBayesError(
            f"{type(method).__name__} has no spread of its own for each weight to restrict: use PBN, MeanField or SSVI."
        )
    number, variance = count_of(rate, bnn.layout.numel), posterior.variance()
    random = variance.nonzero()[:, 0]
    if number >= len(random):
        return copy.deepcopy(bnn)
    if data is None:
        scores = _determined(posterior, random, variance)
    else:
        scores = variance[random] * sensitivity(bnn, data).scores[random]
    kept = highest(scores, number).sort().values if number else random[:0]
    prior = copy.deepcopy(posterior.prior)
    if isinstance(posterior, PartialPosterior):
        prior.keep(kept)  # it knows of the Bayesian weights only
    kl: KLSum = method.kl if isinstance(method, PBN) else "sum"
    made = PartialPosterior(bnn.layout, posterior.mean().clone(), variance.sqrt(), prior, random[kept], kl)
    made.mu.requires_grad_(posterior.mu.requires_grad)
    restricted = copy.deepcopy(bnn, {id(posterior): made.train(posterior.training)})
    restricted.method = _method(method, rate if number else 0.0)
    restricted.moment_scale = (1.0, 1.0)  # it was fitted to more noise
    return restricted


def _determined(posterior: Any, random: Tensor, variance: Tensor) -> Tensor:
    """1 - σ²/s², up to a constant."""
    index = random.to(torch.int64)
    terms = posterior.prior.normal_terms(index)
    scale = 1.0 if terms is None else terms.scale
    return -variance[index] / scale**2


def _method(method: PBN | MeanField | SSVI, rate: float) -> PBN:
    if isinstance(method, PBN):
        return replace(method, rate=rate, per="weight")
    settings = {name: getattr(method, name) for name in ("prior", "init_std", "rule", "samples")}
    return PBN(rate, relative=isinstance(method, MeanField) and method.relative, **settings)
