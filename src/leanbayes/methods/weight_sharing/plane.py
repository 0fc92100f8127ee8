"""The plane in which weights are clustered: (μ, σ), or (μ, log σ) in units of their standard deviations."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.methods.weight_sharing.mixture import Mixture

Metric = Literal["plain", "whitened", "sensitivity"]


@dataclass(frozen=True)
class Plane:
    """The coordinates of a weight: (μ, σ)/scale, or (μ, log σ)/scale."""

    scale: tuple[float, float] = (1.0, 1.0)
    logarithmic: bool = False

    def points(self, mean: Tensor, std: Tensor) -> Tensor:
        """Return the coordinates of weights (n, 2)."""
        second = std.log() if self.logarithmic else std
        return torch.stack([mean / self.scale[0], second / self.scale[1]], 1)

    def weights(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ of points."""
        second = points[:, 1] * self.scale[1]
        return points[:, 0] * self.scale[0], second.exp() if self.logarithmic else second.clamp_min(0)

    def covariance(self, mixture: Mixture) -> Tensor:
        """Return the covariance of (μ, σ) of each component, to first order if the plane has log σ."""
        mean, std = self.weights(mixture.mean)
        slopes = torch.stack([torch.full_like(mean, self.scale[0]), torch.full_like(std, self.scale[1])], 1)
        slopes[:, 1] *= std if self.logarithmic else 1
        return slopes[:, :, None] * mixture.covariance * slopes[:, None]


def plane_for(metric: Metric, mean: Tensor, std: Tensor) -> Plane:
    """Return the plane of a metric. That of `sensitivity` is plain, with weighted points."""
    if metric in ("plain", "sensitivity"):
        return Plane()
    if metric != "whitened":
        raise LeanBayesError(f"metric={metric!r} is unknown: use 'plain', 'whitened' or 'sensitivity'.")
    return Plane((_std(mean), _std(std.log())), logarithmic=True)


def _std(values: Tensor) -> float:
    """Return the std, or 1 if all values are equal."""
    values = values.double()
    std = float(values.std(correction=0))
    return std if std > 1e-12 * float(values.abs().max()) else 1.0
