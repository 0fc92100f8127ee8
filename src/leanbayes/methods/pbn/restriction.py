"""Reduce the number of Bayesian weights of a trained model, without training.

The weights whose noise matters least become deterministic at their means. To first order a weight adds σ²·S to the
variance of the outputs, with S its sensitivity. Data give S. Without data the posterior itself indicates it: at the
optimum of the ELBO, 1/σ² = 1/s² + h for a prior of scale s and the curvature h of the loss, so that σ²·h = 1 - σ²/s². A
weight thus matters by how far its σ has shrunk from the prior (how well it is determined; MacKay 1992).
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.core.ranking import highest
from leanbayes.errors import LeanBayesError
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.pbn.pbn import PBN
from leanbayes.methods.pbn.selection import count_of
from leanbayes.methods.pbn.sensitivity import sensitivity
from leanbayes.methods.ssvi.ssvi import SSVI
from leanbayes.model.bayesian import BayesianModel
from leanbayes.posteriors import MeanFieldPosterior, PartialPosterior, SubspacePosterior
from leanbayes.posteriors.partial import KLSum


@checked()
@torch.no_grad()
def restrict(bnn: BayesianModel, rate: float, data: Iterable[Any] | None = None) -> BayesianModel:
    """Return a copy of a trained model in which fewer weights are Bayesian. Nothing is trained.

    At most ⌊rate·n⌋ of n weights keep their std, those that matter most. The weights of a smaller rate are among those
    of a larger one.

    Args:
        bnn: A model of `lb.MeanField`, `lb.PBN` or `lb.SSVI`.
        rate: The fraction of all weights that stay Bayesian.
        data: Batches (x, y) to rank the weights by σ²·S, where S is their sensitivity. Without data they are ranked by
            how far their std has shrunk from the prior's, 1 - σ²/s² (MacKay 1992).

    Returns:
        A model of `lb.PBN`, or a plain copy if no more weights are Bayesian than the rate allows.

    Raises:
        LeanBayesError: The method has no std per weight, or the rate is not a fraction.

    Example:
        >>> small = lb.restrict(bnn, 0.05, validation_loader)
    """
    method, posterior = bnn.method, bnn.posterior
    kinds = (MeanFieldPosterior, PartialPosterior, SubspacePosterior)
    if not isinstance(method, (PBN, MeanField, SSVI)) or not isinstance(posterior, kinds):
        raise LeanBayesError(f"{type(method).__name__} has no std per weight to restrict: use PBN, MeanField or SSVI.")
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
        prior.keep(kept)  # this prior covers only the Bayesian weights
    kl: KLSum = method.kl if isinstance(method, PBN) else "sum"
    partial = PartialPosterior(bnn.layout, posterior.mean().clone(), variance.sqrt(), prior, random[kept], kl)
    partial.mu.requires_grad_(posterior.mu.requires_grad)
    restricted = copy.deepcopy(bnn, {id(posterior): partial.train(posterior.training)})
    restricted.method = _partial_method(method, rate if number else 0.0)
    # A calibration and a policy were fitted to more noise.
    restricted.moment_scale, restricted.moment_layers, restricted.policy = (1.0, 1.0), {}, None
    restricted.moment_margins = ()
    return restricted


def _determined(posterior: Any, random: Tensor, variance: Tensor) -> Tensor:
    """Return 1 - σ²/s², up to a constant."""
    index = random.to(torch.int64)
    terms = posterior.prior.normal_terms(index)
    scale = 1.0 if terms is None else terms.scale
    return -variance[index] / scale**2


def _partial_method(method: PBN | MeanField | SSVI, rate: float) -> PBN:
    if isinstance(method, PBN):
        return replace(method, rate=rate, per="weight")
    settings = {name: getattr(method, name) for name in ("prior", "init_std", "rule", "samples")}
    return PBN(rate, relative=isinstance(method, MeanField) and method.relative, **settings)
