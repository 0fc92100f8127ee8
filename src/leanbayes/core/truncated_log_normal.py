"""The log-normal distribution, truncated to an interval: log θ ~ N(m, s²) given low ≤ log θ ≤ high.

The interval contains m, so that at least a part of the mass on each side of m remains: then all formulas are stable.
With α = (low - m)/s, β = (high - m)/s and Z = Φ(β) - Φ(α), they are those of Neklyudov et al. (2017).
"""

import math

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtr, ndtri


def _ends(loc: Tensor, scale: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return (low - loc) / scale, (high - loc) / scale


def sample(loc: Tensor, scale: Tensor, low: float, high: float, normal: Tensor) -> Tensor:
    """Return samples, as a differentiable function of independent standard normals.

    Args:
        loc: m, inside the interval.
        scale: s.
        low: The smallest log θ.
        high: The largest log θ.
        normal: The standard normals.
    """
    alpha, beta = _ends(loc, scale, low, high)
    below, above = ndtr(alpha), ndtr(beta)
    end = torch.finfo(normal.dtype).eps
    place = (below + (above - below) * ndtr(normal)).clamp(end, 1 - end)  # the quantile function is infinite at 0 and 1
    return (loc + scale * ndtri(place)).clamp(low, high).exp()


def mean_and_variance(loc: Tensor, scale: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return E[θ] and Var[θ], computed in double precision."""
    m, s = loc.double(), scale.double()
    alpha, beta = _ends(m, s, low, high)
    log_mass = _log_mass(alpha, beta)

    def moment(power: int) -> Tensor:
        """Return E[θ^k] = exp(km + k²s²/2)·[Φ(β - ks) - Φ(α - ks)]/Z, in logarithms that do not overflow."""
        shift = power * s
        return (power * m + 0.5 * shift.square() + _log_mass(alpha - shift, beta - shift) - log_mass).exp()

    mean = moment(1)
    # E[θ²] - E[θ]² is exact to 1e-16·E[θ]², so that a std far below 1e-8 of the mean would be rounding.
    return mean.to(loc.dtype), (moment(2) - mean.square()).clamp_min(0).to(loc.dtype)


def _log_mass(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return log(Φ(β) - Φ(α)) for α < β, also far in the lower tail."""
    upper = log_ndtr(beta)
    return upper + torch.log1p(-(log_ndtr(alpha) - upper).exp())


def log_uniform_kl(loc: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
    """Return KL(q ‖ p) for the prior p with log θ uniform on the interval: it is 0 for s → ∞."""
    alpha, beta = _ends(loc, scale, low, high)
    mass = ndtr(beta) - ndtr(alpha)
    entropy = scale.log() + 0.5 * math.log(2 * math.pi * math.e) + mass.log()
    entropy = entropy + (_times_density(alpha) - _times_density(beta)) / (2 * mass)
    return math.log(high - low) - entropy


def _times_density(z: Tensor) -> Tensor:
    """Return z·φ(z)."""
    return z * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
