"""The plane that weights are clustered on: (μ, σ) itself, or both in units of their spread and σ as its logarithm."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanbayes.compression.mixture import Mixture
from leanbayes.errors import LeanBayesError

Metric = Literal["plain", "whitened", "sensitivity"]


@dataclass(frozen=True)
class Plane:
    """Where a weight lies: (μ, σ)/scale, or (μ, log σ)/scale."""

    scale: tuple[float, float] = (1.0, 1.0)
    logarithmic: bool = False

    def points(self, mean: Tensor, std: Tensor) -> Tensor:
        """Place weights on the plane, (n, 2)."""
        second = std.log() if self.logarithmic else std
        return torch.stack([mean / self.scale[0], second / self.scale[1]], 1)

    def weights(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and σ of points on the plane."""
        second = points[:, 1] * self.scale[1]
        return points[:, 0] * self.scale[0], second.exp() if self.logarithmic else second.clamp_min(0)

    def covariance(self, mixture: Mixture) -> Tensor:
        """Return the covariance of (μ, σ) in each component, to first order where the plane has log σ."""
        mean, std = self.weights(mixture.mean)
        slopes = torch.stack([torch.full_like(mean, self.scale[0]), torch.full_like(std, self.scale[1])], 1)
        slopes[:, 1] *= std if self.logarithmic else 1
        return slopes[:, :, None] * mixture.covariance * slopes[:, None]


def plane_for(metric: Metric, mean: Tensor, std: Tensor) -> Plane:
    """Choose the plane for a metric; `sensitivity` is plain, with points weighted."""
    if metric in ("plain", "sensitivity"):
        return Plane()
    if metric != "whitened":
        raise LeanBayesError(f"metric={metric!r} is unknown: use 'plain', 'whitened' or 'sensitivity'.")
    return Plane((_spread(mean), _spread(std.log())), logarithmic=True)


def _spread(values: Tensor) -> float:
    """Return the standard deviation, or 1 where there is none."""
    values = values.double()
    spread = float(values.std(correction=0))
    return spread if spread > 1e-12 * float(values.abs().max()) else 1.0
