"""Weigh the two variances of a margin, of one pass and of a backward pass, without labels against samples.

The margin is the difference of the two largest logits. Its variance by a backward pass (`adjoint`) is right to first
order, also where one pass loses correlations; that of one pass includes strong noise, which the first order does not
see. The combined prediction uses

    v = b²·v_pass^(1 - w)·v_adjoint^w,

where w and log b minimize the squared error of log v over some inputs, given the variances of samples. The logarithm
of a variance of n samples is too small by log(ν/2) - ψ(ν/2), ν = n - 1, on average, and this is corrected. Without
such a fit, w = b = 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.network import call_with, output_tensor
from leanbayes.deploy.layer_corrections import small_parts
from leanbayes.errors import UnsupportedOperation
from leanbayes.likelihoods import Categorical
from leanbayes.likelihoods.accumulators import Running
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Adjoint, Rule
from leanbayes.rules.margins import margin_variance

_LEAST_ROWS = 16


def fit_margin(
    bnn: BayesianModel, batches: Iterable[Any], samples: int, inputs: int, generator: torch.Generator | None
) -> tuple[float, float]:
    """Return w and b; both are 1 if the outputs are not one set of logits per example, or have no backward pass."""
    rule = Adjoint(mean="moments")
    terms: list[Tensor] = []
    if not isinstance(bnn.likelihood, Categorical) or not bnn.posterior.factorized:
        return 1.0, 1.0
    for x, _ in small_parts(list(batches), inputs, bnn.batch_first):
        try:
            found = _logs(bnn, bnn.likelihood, x, rule, samples, generator)
        except UnsupportedOperation:
            return 1.0, 1.0
        if found is None:
            return 1.0, 1.0
        terms.append(found)
    own, first, true = torch.cat(terms, 1)
    usable = own.isfinite() & first.isfinite() & true.isfinite()
    if usable.sum() < _LEAST_ROWS:
        return 1.0, 1.0
    degrees = torch.tensor((samples - 1) / 2, dtype=torch.float64)
    y = (true - first)[usable] + (degrees.log() - torch.special.digamma(degrees)).to(true.device)
    x = (own - first)[usable]
    squares = (x - x.mean()).square().sum()
    weight = ((x - x.mean()) * y).sum() / squares if squares > 0 else torch.ones(())
    weight = weight.clamp(0, 1)
    return float(weight), float((0.5 * (y.mean() - weight * x.mean())).exp())


def _logs(
    bnn: BayesianModel,
    likelihood: Categorical,
    x: Any,
    rule: Adjoint,
    samples: int,
    generator: torch.Generator | None,
) -> Tensor | None:
    """Return logarithms of the margin's variance, (3, examples): by a backward pass, by one pass, and by samples."""
    assert rule.mean_rule is not None
    own, first = _output(bnn, x, rule), _output(bnn, x, rule.mean_rule)
    if own.loc.dim() != 2 or own.loc.shape[likelihood.class_dim] < 2:
        return None
    loc, own_variance, _ = likelihood.logit_moments(own)
    two = loc.topk(2, -1).indices
    margins = Running()
    with bnn.using("sample"):
        for number in range(samples):
            output = output_tensor(call_with(bnn, x, _draw=bnn.next_draw(generator, number)))
            margins.update(output.double().movedim(likelihood.class_dim, -1).gather(-1, two).diff(dim=-1)[:, 0])
    _, variance, common = likelihood.logit_moments(first)
    found = (2 * own_variance[:, 0], margin_variance(variance, common, two), margins.squares / (samples - 1))
    return torch.stack([part.double().log() for part in found])


def _output(bnn: BayesianModel, x: Any, rule: Rule) -> Any:
    with bnn.using(rule), bnn.frozen(0):
        return output_tensor(call_with(bnn, x))
