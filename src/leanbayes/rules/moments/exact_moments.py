"""The mean, slope and variance of f(x) for x ~ N(m, v): in closed form if there is one, else by quadrature.

The mean slope is E f'(x) = Cov(f(x), x)/v (Stein).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.buffers import spent


class Exact(NamedTuple):
    """The moments of f(x) for x ~ N(m, v): the excess E f(x) - f(m), the mean slope, and the variance.

    If the mean E f(x) itself is without rounding errors where v = 0, it may be given in place of the excess.
    """

    excess: Tensor
    slope: Tensor
    variance: Tensor
    is_mean: bool = False  # whether `excess` is the mean


Function = Callable[..., Tensor]
Index = tuple[slice, ...]
Memory = tuple[Tensor, Tensor]  # for the mean, or its excess, and for the variance

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
_PEAK = 1 / math.sqrt(2 * math.pi)  # of the normal density
_TINY = 1e-20  # lower limit of variances in quotients: the cube of 1/√_TINY is finite in single precision
_REACH = 12.5  # stds; the normal density there is 5e-35
_PIECE = 1 << 16  # elements; a dozen such results fit the cache of a CPU
_LARGE = 1 << 19  # elements, from which it pays to compute in pieces
_FAR = 1e15  # upper limit of the distance to a bound, so that products are finite


def _normal_cdf(a: Tensor, bell: Tensor) -> Tensor:
    """Return Φ(a), accurate relative to its size, given `bell` = exp(-a²/2).

    In eager mode erfc is one call. In compiled code a polynomial is far cheaper, and exported graphs have no erfc.
    """
    if a.dtype == torch.float64 or not torch.compiler.is_compiling():
        z = -math.sqrt(0.5) * a
        return torch.mul(torch.erfc(z, out=spent(z)), 0.5, out=spent(z))
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
    a = torch.clamp(a, -_REACH, _REACH, out=spent(a))
    bell = a * a
    bell = torch.exp(torch.mul(bell, -0.5, out=spent(bell)), out=spent(bell))
    slope = _normal_cdf(a, bell)
    density = torch.mul(bell, _PEAK, out=spent(bell))
    e = torch.addcmul(density, a, slope, out=spent(density))
    rest = e - a
    variance = torch.addcmul(slope, e, rest, value=-1, out=spent(rest))
    variance = torch.mul(torch.clamp_min(variance, 0, out=spent(variance)), v, out=spent(variance))
    excess = torch.sub(e, torch.clamp_min(a, 0, out=spent(a)), out=spent(e))
    excess = torch.mul(torch.clamp_min(excess, 0, out=spent(excess)), v * scale, out=spent(excess))
    return Exact(excess, slope, variance)


def in_pieces(
    exact: Callable[..., Exact],
    m: Tensor,
    variance: Callable[[Index], Tensor],
    positions: list[int],
    settings: dict[str, Any],
) -> Exact:
    """Compute moments of a part of the elements at a time on a CPU, so that intermediate results stay in its cache.

    Args:
        exact: The moments of the function.
        m: The mean of its argument.
        variance: Returns the variance of a part of the argument, in a shape that broadcasts to it.
        positions: Dimensions over which the slope is averaged, not the first.
        settings: Other arguments of the function.
    """
    pieces = list(_pieces(m, positions))
    if m.device.type != "cpu" or len(pieces) < 2 or any(isinstance(value, Tensor) for value in settings.values()):
        return _with_mean_slope(exact(m, variance(()), **settings), positions)
    whole: tuple[Tensor, ...] = ()
    for piece in pieces:
        v = variance(piece)
        if not whole:  # not earlier, because the first variance may need memory
            sizes = [1 if dim in positions else size for dim, size in enumerate(m.shape)]
            whole = (torch.empty_like(m), m.new_empty(sizes) if positions else torch.empty_like(m), torch.empty_like(m))
        own = tuple(results[piece] for results in whole)
        given = {"into": (own[0], own[2])} if exact is gelu_moments else {}
        part = _with_mean_slope(exact(m[piece], v, **settings, **given), positions)
        for results, found in zip(own, part[:3], strict=True):
            if found is not results:
                results.copy_(found)
    return Exact(whole[0], whole[1], whole[2], part.is_mean)


def _pieces(m: Tensor, positions: list[int]) -> Iterator[Index]:
    """Cut a large tensor along its examples, and if these are large along its channels, but not along positions."""
    if m.dim() == 0 or m.numel() < _LARGE:
        yield ()
        return
    rows = max(1, len(m) * _PIECE // m.numel())
    sizes = [1 if dim in positions or dim == 0 else size for dim, size in enumerate(m.shape)]
    channel = max(range(m.dim()), key=sizes.__getitem__)
    count = max(1, min(sizes[channel], sizes[channel] * _PIECE * len(m) // m.numel())) if rows == 1 else sizes[channel]
    for start in range(0, len(m), rows):
        for first in range(0, sizes[channel], count):
            index = [slice(None)] * m.dim()
            index[channel] = slice(first, first + count)
            index[0] = slice(start, start + rows)
            yield tuple(index)


def _with_mean_slope(moments: Exact, positions: list[int]) -> Exact:
    return moments._replace(slope=moments.slope.mean(positions, keepdim=True)) if positions else moments


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
    excess, slope, variance, _ = clamp_moments(m, v, -3.0, 3.0)
    return Exact(excess / 6, slope / 6, variance / 36)


def square_moments(m: Tensor, v: Tensor) -> Exact:
    """Return the moments of x²."""
    return Exact(v, 2 * m, 4 * m * m * v + 2 * v * v)


def exp_moments(m: Tensor, v: Tensor) -> Exact:
    """Return the moments of exp(x), a log-normal value."""
    center, growth = m.exp(), (0.5 * v).exp()
    slope = center * growth
    return Exact(center * torch.expm1(0.5 * v), slope, torch.where(v > 0, slope * slope * torch.expm1(v), v))


def gelu_moments(m: Tensor, v: Tensor, approximate: str = "none", into: Memory | None = None) -> Exact:
    """Return the moments of xΦ(x). With r = 1/√(1 + v), a = r·m and g = gelu(a), the mean is r·(g + v·(g + φ(a))).

    The k-th derivative of the mean is the mean of the k-th derivative, so the variance is Σ_k v^k/k!·(∂^k mean)². With
    u = r²v and the Hermite polynomials He, the terms from k = 2 on are u^k/(k!·r²)·φ(a)²(He_{k-2}(a) - r²He_k(a))². The
    sum ends at k = 4: its error is 0.6 % of v at most, where that of 7 nodes of quadrature would be 5 %.
    """
    if approximate != "none":
        return quadrature(F.gelu, m, v, approximate=approximate)
    r = torch.rsqrt(v + 1)
    a = m * r
    mean = F.gelu(a)
    cdf = _cdf_by_gelu(a, mean)
    w = a * a
    density = torch.rsub(w, math.log(_PEAK), alpha=0.5)
    density = torch.exp(density, out=spent(density))
    both = torch.add(mean, density, out=None if into is None else into[0])
    mean = torch.addcmul(mean, v, both, out=spent(both))
    mean = torch.mul(mean, r, out=spent(mean))
    r2 = torch.mul(r, r, out=spent(r))
    u = v * r2
    a = torch.mul(a, density, out=spent(a))
    slope = torch.addcmul(cdf, a, r2, out=spent(cdf))
    # The name of a number k stands for He_{k-2} - r²He_k, for k = 3 without its factor a.
    w = torch.clamp_max(w, _REACH**2, out=spent(w))  # farther away the density is 0
    two = torch.addcmul(r2, r2, w, value=-1, out=spent(a))
    two = torch.add(two, 1, out=spent(two))
    three = torch.add(two, r2, alpha=2, out=spent(r2) if r2.shape == two.shape else None)
    four = torch.sub(w, 6, out=None if into is None else into[1])
    four = torch.addcmul(three, two, four, out=spent(four))
    four = torch.add(four, 4, out=spent(four))
    two, three, four = (torch.mul(term, term, out=spent(term)) for term in (two, three, four))
    three = torch.mul(three, w, out=spent(three))
    three = torch.addcmul(three, four, u, value=1 / 4, out=spent(three))
    two = torch.addcmul(two, three, u, value=1 / 3, out=spent(two))
    two = torch.mul(two, torch.mul(density, density, out=spent(density)), out=spent(two))
    variance = torch.mul(slope, slope, out=spent(four))
    variance = torch.addcmul(variance, two, u, value=1 / 2, out=spent(variance))
    return Exact(mean, slope, torch.mul(variance, v, out=spent(variance)), is_mean=True)


def _cdf_by_gelu(a: Tensor, gelu: Tensor) -> Tensor:
    """Return Φ(a), given gelu(a) = aΦ(a). On a CPU a quotient is faster than erf, but it has no gradient at 0."""
    if spent(a) is None or a.device.type != "cpu":
        return 0.5 + 0.5 * torch.erf(math.sqrt(0.5) * a)
    cdf = gelu / a
    return torch.nan_to_num(cdf, 0.5, out=cdf)


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
        both = torch.sub(both, center, alpha=2, out=spent(both))
        apart = torch.sub(above, under, out=spent(above))
        mean = torch.add(mean, both, alpha=weight, out=spent(mean))
        tilt = torch.add(tilt, apart, alpha=weight * node, out=spent(tilt))
        second = torch.addcmul(second, both, both, value=weight / 2, out=spent(second))
        second = torch.addcmul(second, apart, apart, value=weight / 2, out=spent(second))
    share = torch.div(v, enough, out=spent(enough))
    variance = torch.addcmul(second, mean, mean, value=-1, out=spent(second))
    variance = torch.mul(torch.clamp_min(variance, 0, out=spent(variance)), share, out=spent(variance))
    return Exact(torch.mul(mean, share, out=spent(mean)), torch.div(tilt, std, out=spent(tilt)), variance)
