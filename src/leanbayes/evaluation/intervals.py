"""Intervals of a regression with a Gaussian predictive distribution, example by example, in float64.

error is target minus predicted mean, std the predicted standard deviation, both of one shape.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError


def interval_coverage(error: Tensor, std: Tensor, level: float = 0.95) -> Tensor:
    """Return 1 where the target is in the central interval of probability `level`, else 0: |error| ≤ z·std."""
    error, std = _checked(error, std)
    return (error.abs() <= _quantile(level) * std).double()


def interval_width(std: Tensor, level: float = 0.95) -> Tensor:
    """Width of the central interval of probability `level`: 2z·std."""
    return 2 * _quantile(level) * _checked(std, std)[1]


def crps(error: Tensor, std: Tensor) -> Tensor:
    """Continuous ranked probability score of a Gaussian: lower is better, in the unit of the targets.

    ∫(F(t) - [t ≥ y])² dt = error·(2Φ(z) - 1) + std·(2φ(z) - 1/√π), z = error/std (Gneiting & Raftery 2007, eq. 21);
    |error| where std is 0, as for a point prediction.
    """
    error, std = _checked(error, std)
    spread = std > 0
    z = error / std.where(spread, 1)  # not 0, which would make gradients nan
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    score = error * torch.erf(z / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
    return score.where(spread, error.abs())


def _quantile(level: float) -> float:
    if not 0 < level < 1:
        raise LeanBayesError(f"level={level} must lie between 0 and 1: 0.95 is the usual one.")
    return NormalDist().inv_cdf((1 + level) / 2)


def _checked(error: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    if error.shape != std.shape:
        raise LeanBayesError(
            f"Errors of shape {tuple(error.shape)} do not fit standard deviations of shape {tuple(std.shape)}: pass "
            "one for each."
        )
    error, std = error.double(), std.double()
    if error.isnan().any() or not (std >= 0).all():  # in this form NaN is refused too
        raise LeanBayesError(
            "Errors must be numbers and standard deviations at least 0: look for NaN or a negative variance."
        )
    return error, std
