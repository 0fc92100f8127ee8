"""The mean, slope and variance of f(x) for x ~ N(m, v): in closed form if there is one, else by quadrature.

The mean slope is E f'(x) = Cov(f(x), x)/v (Stein).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
_FAR = 1e15  # upper limit of the distance to a bound, so that products are finite


def _tail(b: Tensor, bell: Tensor) -> Tensor:
    """Return Φ(-b) for b ≥ 0, given `bell` = exp(-b²/2); in single precision this is far cheaper than erfc."""
    if b.dtype == torch.float64:
        return 0.5 * torch.erfc(math.sqrt(0.5) * b)
    t = 1 / (1 + 0.325 * b)
    polynomial = torch.full_like(t, _TAIL[-1])
    for coefficient in _TAIL[-2::-1]:
        polynomial = polynomial * t + coefficient
    return bell * polynomial * t


def relu_moments(m: Tensor, v: Tensor) -> Exact:
    """Return the moments of relu(x): with b = |m|/√v and h = φ(b) - bΦ(-b), the variance is v·(slope - h(h + b)).

    This equals E x₊² - (E x₊)² without the cancellation of large numbers, and each term vanishes far below 0.
    """
    scale = v.clamp_min(_TINY).rsqrt()
    a = m * scale
    b = a.abs()
    bell = torch.exp(-0.5 * a * a)
    tail = _tail(b, bell)
    h = (bell * (1 / math.sqrt(2 * math.pi)) - b * tail).clamp_min(0)
    slope = torch.where(a > 0, 1 - tail, tail)
    return Exact(v * scale * h, slope, v * (slope - h * (h + b)).clamp_min(0))


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


def quadrature(function: Function, slope: Function, m: Tensor, v: Tensor, **settings: Any) -> Exact:
    """Compute moments with 7 nodes x: weighted sums of d = f(m + √v·x) - f(m), of d·x/√v and of d².

    If √v is so small that the differences are rounding errors, the function is linear with its slope at m.
    """
    linear = v < 1e-8 * m * m + 1e-7
    std = torch.where(linear, 1.0, v).sqrt()
    center = function(m, **settings)
    mean = tilt = second = torch.zeros_like(m)
    for node, weight in _NODES:
        above = function(m + node * std, **settings) - center
        under = function(m - node * std, **settings) - center
        mean = mean + weight * (above + under)
        tilt = tilt + weight * node * (above - under)
        second = second + weight * (above * above + under * under)
    local = slope(m, **settings)
    variance = torch.where(linear, local * local * v, (second - mean * mean).clamp_min(0))
    return Exact(torch.where(linear, 0.0, mean), torch.where(linear, local, tilt / std), variance)
