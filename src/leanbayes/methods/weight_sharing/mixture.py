"""A mixture of Gaussians on the plane, its log-density, and the blend of components for points far from their own.

Covariances can be as small as 1e-11, so all numbers of a mixture are in double precision, and each covariance is
regularized by a fraction of its trace.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHI2_95 = 5.991  # χ² with two degrees of freedom: the ellipse that holds 95 % of a Gaussian
JITTER = 1e-6


class Factors(NamedTuple):
    """Factors of the log-density: with d = θ - m and z = (d₀·first, (d₁ - slope·d₀)·second), D² = ‖z‖²."""

    first: Tensor
    second: Tensor
    slope: Tensor
    constant: Tensor


@dataclass(frozen=True)
class Mixture:
    """Σ π_k N(θ | m_k, Σ_k) with π_k = mass_k / Σ mass; mean (K, 2), covariance (K, 2, 2), mass (K), in fp64."""

    mean: Tensor
    covariance: Tensor
    mass: Tensor

    def __len__(self) -> int:
        return len(self.mass)

    def __getitem__(self, which: Tensor) -> "Mixture":
        return Mixture(self.mean[which], self.covariance[which], self.mass[which])

    def factors(self) -> Factors:
        """Return the root of each Σ⁻¹, and the constant log π - log 2π - ½ log det Σ."""
        xx, xy, yy = self.covariance[:, 0, 0], self.covariance[:, 0, 1], self.covariance[:, 1, 1]
        slope = xy / xx
        rest = yy - slope * xy
        log_share = self.mass.log() - self.mass.sum().log()
        constant = log_share - math.log(2 * math.pi) - 0.5 * (xx.log() + rest.log())
        return Factors(xx.rsqrt(), rest.rsqrt(), slope, constant)

    def log_joint(self, points: Tensor) -> Tensor:
        """Return log π_k + log N(θ_i | m_k, Σ_k) of all pairs (n, K), for few points."""
        difference, factors = points.double()[:, None] - self.mean, self.factors()
        first = difference[..., 0] * factors.first
        second = (difference[..., 1] - factors.slope * difference[..., 0]) * factors.second
        return factors.constant - 0.5 * (first.square() + second.square())

    def log_density(self, points: Tensor, chunk: int = 1 << 22) -> Tensor:
        """Return the log-density of each point, in chunks of points."""
        parts = points.split(max(1, chunk // len(self)))
        return torch.cat([self.log_joint(part).logsumexp(1) for part in parts])


def regular(covariance: Tensor, floor: float) -> Tensor:
    """Make covariances positive definite, by a fraction of the trace or of `floor`, whichever is larger.

    Otherwise rounding would make the covariances of clusters with one or two points indefinite.
    """
    xx, xy, yy = covariance[:, 0, 0], covariance[:, 0, 1], covariance[:, 1, 1]
    least = JITTER * (xx + yy).clamp_min(floor)
    xx, yy = torch.maximum(xx, least), torch.maximum(yy, least)
    limit = (1 - JITTER) * (xx * yy).sqrt()
    xy = torch.maximum(torch.minimum(xy, limit), -limit)
    return torch.stack([xx + least, xy, xy, yy + least], 1).view(-1, 2, 2)


def blend_weights(log_joint: Tensor) -> Tensor:
    """Return α = softmax(log π_k + log N(θ | m_k, Σ_k)) over a point's nearest components (equation 7)."""
    return log_joint.softmax(-1)
