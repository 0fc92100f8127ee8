"""Intervals of a regression with a Gaussian predictive distribution, per example, in float64.

error is the target minus the predicted mean, and std the predicted standard deviation, both of the same shape.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError


def interval_coverage(error: Tensor, std: Tensor, level: float = 0.95) -> Tensor:
    """Return 1 if the target is in the central interval of probability `level`, else 0: |error| ≤ z·std."""
    error, std = _checked(error, std)
    return (error.abs() <= _quantile(level) * std).double()


def interval_width(std: Tensor, level: float = 0.95) -> Tensor:
    """Return the width of the central interval of probability `level`: 2z·std."""
    return 2 * _quantile(level) * _checked(std, std)[1]


def crps(error: Tensor, std: Tensor) -> Tensor:
    """Return the continuous ranked probability score of a Gaussian, in the unit of the targets; lower is better.

    ∫(F(t) - [t ≥ y])² dt = error·(2Φ(z) - 1) + std·(2φ(z) - 1/√π), z = error/std (Gneiting & Raftery 2007, eq. 21);
    |error| if std is 0.
    """
    error, std = _checked(error, std)
    random = std > 0
    z = error / std.where(random, 1)  # not 0, which would give nan gradients
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    score = error * torch.erf(z / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))
    return score.where(random, error.abs())


def _quantile(level: float) -> float:
    if not 0 < level < 1:
        raise LeanBayesError(f"level={level} must be between 0 and 1, such as 0.95.")
    return NormalDist().inv_cdf((1 + level) / 2)


def _checked(error: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    if error.shape != std.shape:
        raise LeanBayesError(
            f"Errors of shape {tuple(error.shape)} do not match stds of shape {tuple(std.shape)}: pass one std "
            "per error."
        )
    error, std = error.double(), std.double()
    if error.isnan().any() or not (std >= 0).all():  # written so that NaN is rejected too
        raise LeanBayesError(
            "Errors must not be NaN, and stds must be at least 0: check for NaN or a negative variance."
        )
    return error, std
