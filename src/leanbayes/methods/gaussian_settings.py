"""What methods with Gaussian weights have in common: the checks of their settings, and the initial μ and σ."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.priors import Prior, layer_stds
from leanbayes.rules import get_rule

_SMALLEST_STD = 1e-8  # for a deterministic weight; softplus cannot be 0


EngineName = Literal["backprop", "ivon"]
EngineChoice = Literal["auto", "backprop", "ivon"]


def check_gaussian_settings(prior: Prior, init_std: float, rule: str, samples: int, engine: str = "backprop") -> None:
    """Raise an error for a setting that no posterior can be made with."""
    if not (math.isfinite(init_std) and init_std > 0):
        raise LeanBayesError(f"init_std={init_std} must be a positive number.")
    if samples < 1:
        raise LeanBayesError(f"samples={samples} must be at least 1.")
    if isinstance(prior, type) or not hasattr(prior, "bind"):
        raise LeanBayesError("prior must be an instance such as lb.Normal(0.1).")
    if engine not in get_args(EngineChoice):
        words = ", ".join(map(repr, get_args(EngineChoice)))
        raise LeanBayesError(f"engine={engine!r} is unknown: use one of {words}.")
    if engine == "ivon" and not getattr(prior, "gaussian", False):
        raise LeanBayesError(f"engine='ivon' needs a Gaussian prior, not {prior!r}: use lb.Normal(), or 'backprop'.")
    get_rule(rule)


def initial_posterior(
    layout: Layout, mean: Tensor, variance: Tensor | None, prior: Prior, init_std: float, relative: bool
) -> MeanFieldPosterior:
    """Return the posterior that training starts from.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: The flat weights, which become μ.
        variance: The variances of an earlier posterior, which become σ², nan if a weight had none, or None.
        prior: The prior.
        init_std: The σ of weights without an earlier variance.
        relative: Whether init_std is a fraction of the std of each layer's weights.
    """
    std = initial_stds(layout, mean, variance, init_std, relative)
    return MeanFieldPosterior(layout, mean, std, prior.bind(layout, mean))


def initial_stds(layout: Layout, mean: Tensor, variance: Tensor | None, init_std: float, relative: bool) -> Tensor:
    """Return the σ that training starts from, for the arguments of `initial_posterior`."""
    if relative:
        stds = [init_std * std for std in layer_stds(layout, mean)]
        std = layout.expand(torch.tensor(stds, dtype=mean.dtype, device=mean.device))
    else:
        std = torch.full_like(mean, init_std)
    if variance is not None:
        std = torch.where(variance.isnan(), std, variance.sqrt().clamp_min(_SMALLEST_STD))
    return std
