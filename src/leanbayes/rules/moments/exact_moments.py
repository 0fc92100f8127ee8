"""The mean, slope and variance of f(x) for x ~ N(m, v): in closed form if there is one, else by quadrature.

The mean slope is E f'(x) = Cov(f(x), x)/v (Stein).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.core import noise


class Exact(NamedTuple):
    """The moments of f(x) for x ~ N(m, v): the excess E f(x) - f(m), the mean slope, and the variance."""

    excess: Tensor
    slope: Tensor
    variance: Tensor


Function = Callable[..., Tensor]

# Gauss-Hermite with 7 nodes, for the density exp(-x²/2)/√(2π): the positive nodes and their weights. The node at 0
# contributes nothing to sums of differences from f(m).
_NODES = (
    (1.1544053947399682, 0.24012317860501265),
    (2.366759410734541, 0.030757123967586487),
    (3.750439717725742, 0.0005482688559722181),
)
# Φ(-b)/exp(-b²/2) for b ≥ 0 as a polynomial in t = 1/(1 + 0.325·b) without constant term; its error is below 7e-7.
_TAIL = (
    0.129656152,
    0.129672143,
    0.115503139,
    0.093520543,
    0.026033829,
    0.085327419,
    -0.113534019,
    0.033821061,
)
_TINY = 1e-20  # lower limit of variances in quotients: the cube of 1/√_TINY is finite in single precision
_REACH = 12.5  # stds; the normal density there is 5e-35
_PIECE = 1 << 16  # elements; a dozen such results fit the cache of a CPU
_LARGE = 1 << 19  # elements, from which it pays to compute in pieces
_FAR = 1e15  # upper limit of the distance to a bound, so that products are finite


def _spent(x: Tensor) -> Tensor | None:
    """Return a tensor that is not needed any more as `out=` of the next operation, if gradients do not need it either.

    New memory is expensive on a CPU: half of the time of a ReLU would be page faults.
    """
    needed = torch.is_grad_enabled() or torch.compiler.is_compiling() or noise.in_transform()
    return None if needed else x


def _normal_cdf(a: Tensor, bell: Tensor) -> Tensor:
    """Return Φ(a), accurate relative to its size, given `bell` = exp(-a²/2).

    In eager mode erfc is one call. In compiled code a polynomial is far cheaper, and exported graphs have no erfc.
    """
    if a.dtype == torch.float64 or not torch.compiler.is_compiling():
        z = -math.sqrt(0.5) * a
        return torch.mul(torch.erfc(z, out=_spent(z)), 0.5, out=_spent(z))
    t = 1 / (1 + 0.325 * a.abs())
    polynomial = torch.full_like(t, _TAIL[-1])
    for coefficient in _TAIL[-2::-1]:
        polynomial = polynomial * t + coefficient
    tail = bell * polynomial * t
    return torch.where(a > 0, 1 - tail, tail)


def relu_moments(m: Tensor, v: Tensor) -> Exact:
    """Return the moments of relu(x): with a = m/√v and e = φ(a) + aΦ(a), mean √v·e and variance v(Φ - e(e - a)).

    Each term vanishes far below 0. Farther away than `_REACH` the ReLU is linear in single precision, and without this
    limit many terms would be denormal numbers, with which CPUs compute slowly.
    """
    scale = v.clamp_min(_TINY).rsqrt()
    a = m * scale
    a = torch.clamp(a, -_REACH, _REACH, out=_spent(a))
    bell = a * a
    bell = torch.exp(torch.mul(bell, -0.5, out=_spent(bell)), out=_spent(bell))
    slope = _normal_cdf(a, bell)
    density = torch.mul(bell, 1 / math.sqrt(2 * math.pi), out=_spent(bell))
    e = torch.addcmul(density, a, slope, out=_spent(density))
    rest = e - a
    variance = torch.addcmul(slope, e, rest, value=-1, out=_spent(rest))
    variance = torch.mul(torch.clamp_min(variance, 0, out=_spent(variance)), v, out=_spent(variance))
    excess = torch.sub(e, torch.clamp_min(a, 0, out=_spent(a)), out=_spent(e))
    excess = torch.mul(torch.clamp_min(excess, 0, out=_spent(excess)), v * scale, out=_spent(excess))
    return Exact(excess, slope, variance)


def in_pieces(exact: Callable[..., Exact], m: Tensor, v: Tensor, settings: dict[str, Any]) -> Exact:
    """Compute moments of a few examples at a time on a CPU, so that all intermediate results stay in its cache."""
    rows = 0 if m.dim() == 0 or m.numel() < _LARGE else max(1, len(m) * _PIECE // m.numel())
    if m.device.type != "cpu" or not 0 < rows < len(m) or any(isinstance(value, Tensor) for value in settings.values()):
        return exact(m, v, **settings)
    found = Exact(torch.empty_like(m), torch.empty_like(m), torch.empty_like(m))
    for start in range(0, len(m), rows):
        piece = slice(start, start + rows)
        for whole, part in zip(found, exact(m[piece], v[piece] if len(v) == len(m) else v, **settings), strict=True):
            whole[piece] = part
    return found


def leaky_relu_moments(m: Tensor, v: Tensor, negative_slope: Tensor | float = 0.01) -> Exact:
    """Return the moments of n·x + (1-n)·relu(x); the covariance of the two terms is n(1-n)·v·slope."""
    kink, rest = relu_moments(m, v), 1 - negative_slope
    variance = negative_slope**2 * v + rest**2 * kink.variance + 2 * negative_slope * rest * v * kink.slope
    return Exact(rest * kink.excess, negative_slope + rest * kink.slope, variance.clamp_min(0))


def clamp_moments(m: Tensor, v: Tensor, min: Any = None, max: Any = None) -> Exact:
    """Return the moments of y = lo + relu(x - lo) - relu(x - hi): the variance is Var₁ - Var₂ - 2E₂(hi - E y).

    The nearer bound is the first, so that E₂ and Var₂ are the smaller terms and little cancels.
    """
    if max is None:
        return relu_moments(m - min, v)
    if min is None:
        kink = relu_moments(max - m, v)
        return Exact(-kink.excess, kink.slope, kink.variance)
    up, down = m - min, max - m
    reach, half = torch.maximum(up, down).clamp_max(_FAR), (0.5 * up + 0.5 * down).clamp_max(_FAR)
    near, far = relu_moments(torch.minimum(up, down), v), relu_moments(-reach, v)
    excess = near.excess - far.excess
    variance = near.variance - far.variance - 2 * far.excess * (torch.minimum(reach, 2 * half) - excess)
    variance = torch.minimum(variance.clamp_min(0), half * half)  # the largest variance between two bounds
    return Exact(torch.where(up < down, excess, -excess), near.slope - far.slope, variance)


def hardsigmoid_moments(m: Tensor, v: Tensor) -> Exact:
    """Return the moments of clamp(x, -3, 3)/6 + 1/2."""
    excess, slope, variance = clamp_moments(m, v, -3.0, 3.0)
    return Exact(excess / 6, slope / 6, variance / 36)


def square_moments(m: Tensor, v: Tensor) -> Exact:
    """Return the moments of x²."""
    return Exact(v, 2 * m, 4 * m * m * v + 2 * v * v)


def exp_moments(m: Tensor, v: Tensor) -> Exact:
    """Return the moments of exp(x), a log-normal value."""
    center, growth = m.exp(), (0.5 * v).exp()
    slope = center * growth
    return Exact(center * torch.expm1(0.5 * v), slope, torch.where(v > 0, slope * slope * torch.expm1(v), v))


def quadrature(function: Function, m: Tensor, v: Tensor, **settings: Any) -> Exact:
    """Compute moments with 7 nodes x: weighted sums of d = f(m + √v·x) - f(m), of d·x/√v and of d².

    If √v is so small that the differences would be rounding errors, they are computed for a larger v. Excess and
    variance are then in proportion to v, because the function is linear or quadratic over so short a distance.
    """
    enough = torch.maximum(v, 1e-6 * m * m + 1e-6)
    std = enough.sqrt()
    center = function(m, **settings)
    mean, tilt, second = (torch.zeros_like(center) for _ in range(3))
    for node, weight in _NODES:
        above = function(torch.add(m, std, alpha=node), **settings)
        under = function(torch.sub(m, std, alpha=node), **settings)
        both = above + under
        both = torch.sub(both, center, alpha=2, out=_spent(both))
        apart = torch.sub(above, under, out=_spent(above))
        mean = torch.add(mean, both, alpha=weight, out=_spent(mean))
        tilt = torch.add(tilt, apart, alpha=weight * node, out=_spent(tilt))
        second = torch.addcmul(second, both, both, value=weight / 2, out=_spent(second))
        second = torch.addcmul(second, apart, apart, value=weight / 2, out=_spent(second))
    share = torch.div(v, enough, out=_spent(enough))
    variance = torch.addcmul(second, mean, mean, value=-1, out=_spent(second))
    variance = torch.mul(torch.clamp_min(variance, 0, out=_spent(variance)), share, out=_spent(variance))
    return Exact(torch.mul(mean, share, out=_spent(mean)), torch.div(tilt, std, out=_spent(tilt)), variance)
