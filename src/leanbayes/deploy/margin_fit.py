"""Weigh the two variances of margins, of one pass and of backward passes, without labels against samples.

A margin is the difference of the largest logit and another one. Its variance v by a backward pass (`adjoint`) is right
to first order, also where one pass loses correlations; that of one pass, g, includes strong noise, which the first
order does not see. The combined prediction uses

    b²·g^(1 - w)·v^w for a margin, and the noise of one pass times c·(v/g)^(u/2) for all logits,

where w and log b minimize the squared error of the log variance of the margins over some inputs, given the variances
of samples, and u and log c that of the mean log variance of the logits, with the geometric mean of v/g over the
margins. With the logarithm of the mean variance the stds of most logits would be too large.
The logarithm of a variance of n samples is too small by log(ν/2) - ψ(ν/2), ν = n - 1, on average, and this is
corrected. There is one fit for each number of margins. Without a fit, w = b = c = 1 and u = 0.
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
from leanbayes.rules.margins import MarginFit, margin_variances

_LEAST_ROWS = 16
_MOST_MARGINS = 3


def fit_margins(
    bnn: BayesianModel, batches: Iterable[Any], samples: int, inputs: int, generator: torch.Generator | None
) -> tuple[MarginFit, ...]:
    """Return the fits for 1, 2, ... margins; none if the outputs are not one set of logits per example.

    There are none either if the network has no backward pass for each example.
    """
    if not isinstance(bnn.likelihood, Categorical) or not bnn.posterior.factorized:
        return ()
    terms: list[tuple[Tensor, Tensor]] = []
    for x, _ in small_parts(list(batches), inputs, bnn.batch_first):
        try:
            found = _logs(bnn, bnn.likelihood, x, samples, generator)
        except UnsupportedOperation:
            return ()
        if found is None:
            return ()
        terms.append(found)
    (own, first, true), (total, true_total) = (torch.cat(parts, 1) for parts in zip(*terms, strict=True))
    degrees = torch.tensor((samples - 1) / 2, dtype=torch.float64)
    bias = (degrees.log() - torch.special.digamma(degrees)).to(true.device)
    fits = []
    for count in range(1, own.shape[-1] + 1):
        ratios, errors = (part[:, :count] for part in (own - first, true - first + bias))
        margin = _line(ratios.flatten(), errors.flatten())
        whole = _line(ratios.mean(-1), true_total - total + bias)
        if margin is None or whole is None:
            return ()
        fits.append(MarginFit(*margin, *whole))
    return tuple(fits)


def _line(x: Tensor, y: Tensor) -> tuple[float, float] | None:
    """Return the slope of y on x, from 0 to 1, and exp of half of the intercept; None if there are too few points."""
    usable = x.isfinite() & y.isfinite()
    if usable.sum() < _LEAST_ROWS:
        return None
    x, y = x[usable], y[usable]
    squares = (x - x.mean()).square().sum()
    slope = ((x - x.mean()) * y).sum() / squares if squares > 0 else torch.ones(())
    slope = slope.clamp(0, 1)
    return float(slope), float((0.5 * (y.mean() - slope * x.mean())).exp())


def _logs(
    bnn: BayesianModel, likelihood: Categorical, x: Any, samples: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor] | None:
    """Return logarithms of variances.

    The first are those of the margins, (3, examples, margins): by backward passes, by one pass, and by samples. The
    others are means over the logits, (2, examples): by one pass and by samples.
    """
    rule = Adjoint(mean="moments", margins=_MOST_MARGINS)
    assert rule.mean_rule is not None
    own, first = _output(bnn, x, rule), _output(bnn, x, rule.mean_rule)
    if own.loc.dim() != 2 or own.loc.shape[likelihood.class_dim] < 2:
        return None
    loc, own_variance, own_common = likelihood.logit_moments(own)
    classes = loc.topk(min(_MOST_MARGINS + 1, loc.shape[-1]), -1).indices
    margins, logits = Running(), Running()
    with bnn.using("sample"):
        for number in range(samples):
            output = output_tensor(call_with(bnn, x, _draw=bnn.next_draw(generator, number)))
            drawn = output.double().movedim(likelihood.class_dim, -1)
            chosen = drawn.gather(-1, classes)
            margins.update(chosen[:, :1] - chosen[:, 1:])
            logits.update(drawn)
    _, variance, common = likelihood.logit_moments(first)
    total = variance if common is None else variance + common.square().sum(0)
    found = [margin_variances(own_variance, own_common, classes), margin_variances(variance, common, classes)]
    found.append(margins.squares / (samples - 1))
    totals = torch.stack([total.double(), logits.squares / (samples - 1)])
    random = (totals > 0).all(0)  # a logit may be a constant
    return torch.stack([part.double().log() for part in found]), totals.log().where(random, torch.nan).nanmean(-1)


def _output(bnn: BayesianModel, x: Any, rule: Rule) -> Any:
    with bnn.using(rule), bnn.frozen(0):
        return output_tensor(call_with(bnn, x))
