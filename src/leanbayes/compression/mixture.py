"""A mixture of Gaussians on the plane, its log-density, and the blend of components for a point far from its own.

A covariance is as small as 1e-11, so all numbers of a mixture are in double precision, and each covariance is made
regular by a share of its own trace.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHI2_95 = 5.991  # of two degrees of freedom: the border of an ellipse that holds 95 % of a Gaussian
JITTER = 1e-6


class Factors(NamedTuple):
    """What a log-density is computed from: with d = θ - m, z = (d₀·first, (d₁ - slope·d₀)·second) has D² = ‖z‖²."""

    first: Tensor
    second: Tensor
    slope: Tensor
    constant: Tensor


@dataclass(frozen=True)
class Mixture:
    """Σ π_k N(θ | m_k, Σ_k), π_k = mass_k / Σ mass; mean (K, 2), covariance (K, 2, 2), mass (K), in fp64."""

    mean: Tensor
    covariance: Tensor
    mass: Tensor

    def __len__(self) -> int:
        return len(self.mass)

    def __getitem__(self, which: Tensor) -> "Mixture":
        return Mixture(self.mean[which], self.covariance[which], self.mass[which])

    def factors(self) -> Factors:
        """Take the root of each Σ⁻¹, and the constant log π - log 2π - ½ log det Σ."""
        xx, xy, yy = self.covariance[:, 0, 0], self.covariance[:, 0, 1], self.covariance[:, 1, 1]
        slope = xy / xx
        rest = yy - slope * xy
        log_share = self.mass.log() - self.mass.sum().log()
        constant = log_share - math.log(2 * math.pi) - 0.5 * (xx.log() + rest.log())
        return Factors(xx.rsqrt(), rest.rsqrt(), slope, constant)

    def log_joint(self, points: Tensor) -> Tensor:
        """log π_k + log N(θ_i | m_k, Σ_k), (n, K): for few points."""
        difference, factors = points.double()[:, None] - self.mean, self.factors()
        first = difference[..., 0] * factors.first
        second = (difference[..., 1] - factors.slope * difference[..., 0]) * factors.second
        return factors.constant - 0.5 * (first.square() + second.square())

    def log_density(self, points: Tensor, chunk: int = 1 << 22) -> Tensor:
        """Log-density of each point under all components, a chunk of points at a time."""
        parts = points.split(max(1, chunk // len(self)))
        return torch.cat([self.log_joint(part).logsumexp(1) for part in parts])


def regular(covariance: Tensor, floor: float) -> Tensor:
    """Make covariances safely positive definite: by a share of each trace, or of a floor where that is more.

    Of a cluster of one or two points, rounding leaves nothing that is a covariance otherwise.
    """
    xx, xy, yy = covariance[:, 0, 0], covariance[:, 0, 1], covariance[:, 1, 1]
    least = JITTER * (xx + yy).clamp_min(floor)
    xx, yy = torch.maximum(xx, least), torch.maximum(yy, least)
    limit = (1 - JITTER) * (xx * yy).sqrt()
    xy = torch.maximum(torch.minimum(xy, limit), -limit)
    return torch.stack([xx + least, xy, xy, yy + least], 1).view(-1, 2, 2)


def blend_weights(log_joint: Tensor) -> Tensor:
    """α = softmax(log π_k + log N(θ | m_k, Σ_k)) over a point's nearest components (equation 7); -inf is none."""
    return log_joint.softmax(-1)


def blended(mean: Tensor, std: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of Σ α_k N(m_k, s_k²): m = Σ α m_k and s² = Σ α(s_k² + (m_k - m)²)."""
    centre = (alpha * mean).sum(-1)
    return centre, (alpha * (std.square() + (mean - centre[..., None]).square())).sum(-1)
