"""The removal criteria of SSVI (Li et al. 2024, section 3.3.1): how important each Gaussian weight is.

Each function takes μ and σ > 0 and returns a score that ranks weights as the criterion does; the lowest are removed. If
the criterion itself overflows or loses its order to rounding, the score is an increasing function of it.

The criteria of e^{λ|θ|} are computed in double precision, because all weights score almost the same when λσ is close to
0. With r = |μ|/σ and t = λσ,
    E e^{λ|θ|} = Φ(r+t)e^{t²/2+rt} + Φ(t-r)e^{t²/2-rt}, so log E e^{λ|θ|} = t²/2 + rt + g(t)
    with g(t) = log[1 + Φ(t-r)e^{-2rt} - Φ(-r-t)].
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.special import ndtr


def mean(mu: Tensor, sigma: Tensor, exponent: float = 1.0) -> Tensor:
    """|μ|."""
    return mu.abs()


def snr(mu: Tensor, sigma: Tensor, exponent: float = 1.0) -> Tensor:
    """|μ|/σ."""
    return mu.abs() / sigma


def absolute_mean(mu: Tensor, sigma: Tensor, exponent: float = 1.0) -> Tensor:
    """E|θ| = μ(2Φ(μ/σ) - 1) + 2σφ(μ/σ)."""
    ratio = mu.abs() / sigma
    return mu.abs() * torch.erf(ratio / math.sqrt(2)) + 2 * sigma * _density(ratio)


def absolute_snr(mu: Tensor, sigma: Tensor, exponent: float = 1.0) -> Tensor:
    """SNR(|θ|) = E|θ|/√(μ² + σ² - (E|θ|)²), computed as |μ|/σ, of which it is an increasing function.

    In floating point the printed formula loses its order for small |μ|/σ and is infinite for large ones.
    """
    return snr(mu, sigma)


def exponential_mean(mu: Tensor, sigma: Tensor, exponent: float = 1.0) -> Tensor:
    """log E e^{λ|θ|}."""
    ratio, tilt = _double(mu, sigma, exponent)
    return (0.5 * tilt.square() + ratio * tilt + _folded(ratio, tilt)).to(mu.dtype)


def exponential_snr(mu: Tensor, sigma: Tensor, exponent: float = 1.0) -> Tensor:
    """2 log SNR(e^{λ|θ|}) = -log(e^x - 1), with x = log E e^{2λ|θ|} - 2 log E e^{λ|θ|} = t² + g(2t) - 2g(t)."""
    ratio, tilt = _double(mu, sigma, exponent)
    excess = tilt.square() + _folded(ratio, 2 * tilt) - 2 * _folded(ratio, tilt)
    # For small t the differences cancel; x is then t²·Var|θ|/σ² = t²(1 - δ(2r + δ)) with δ = E|θ|/σ - r.
    surplus = 2 * (_density(ratio) - ratio * ndtr(-ratio))
    series = tilt.square() * (1 - surplus * (2 * ratio + surplus))
    excess = torch.where(tilt < 1e-5, series, excess)
    return (-excess - torch.log(-torch.expm1(-excess))).to(mu.dtype)


def _double(mu: Tensor, sigma: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """Return r and t."""
    return mu.double().abs() / sigma.double(), exponent * sigma.double()


def _folded(ratio: Tensor, tilt: Tensor) -> Tensor:
    """Return g(t), the correction for |θ| instead of ±θ."""
    return torch.log1p(ndtr(tilt - ratio) * torch.exp(-2 * ratio * tilt) - ndtr(-ratio - tilt))


def _density(x: Tensor) -> Tensor:
    """Return φ(x)."""
    return torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)


REMOVAL: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (mean, snr, absolute_mean, absolute_snr, exponential_mean, exponential_snr)
}
