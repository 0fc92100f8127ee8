"""Sums, products, quotients and selections of Moments, tensors and numbers, with broadcasting.

All of them use `combined`, the tangent Σ_i s_i·x_i of the result. Its common part is the mean of Σ_i s_i·U_i over the
positions, so noise that two branches of a network share stays shared. The deviation from this mean becomes independent.
If a value is broadcast over positions, they share all of its noise, but its independent part has no sign and stays
independent.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.fused_activations import source_of_sum
from leanbayes.rules.moments.joining import on_one_grid, stretched
from leanbayes.rules.moments.registry import moment_rule, named, unsupported
from leanbayes.rules.moments.value import Moments, shrunk, variance_dtype

Slope = Tensor | float
_TINY = 1e-20  # lower limit of variances in quotients
_PEAK = 1 / math.sqrt(2 * math.pi)  # of the normal density


def combined(loc: Tensor, terms: Sequence[tuple[Moments, Slope]], extra: Tensor | None = None) -> Moments:
    """Return `loc` with the noise Σ_i s_i·x_i of values and slopes that broadcast to it, plus an `extra` variance."""
    dtype = variance_dtype(loc.dtype)
    slopes = [slope.to(dtype) if isinstance(slope, Tensor) else slope for _, slope in terms]
    values = on_one_grid([stretched(value, loc.shape) for value, _ in terms])
    independent = extra
    for value, slope in zip(values, slopes, strict=True):
        part = shrunk(value.rest).to(dtype)
        part = part if isinstance(slope, float | int) and slope * slope == 1 else slope * slope * part
        independent = part if independent is None else independent + part
    assert independent is not None
    tangents = [(value, slope) for value, slope in zip(values, slopes, strict=True) if value.common is not None]
    if not tangents:
        return values[0].like(loc, _whole(independent, loc))
    common, lost, grid = _mean_tangent(loc.shape, tangents)
    if lost is not None:
        independent = independent + lost
    return values[0].like(loc, _whole(independent, loc), common, grid)


def _whole(variance: Tensor, loc: Tensor) -> Tensor:
    """Expand a variance to the shape of the mean; return the same tensor if possible, which `Shares` relies on."""
    return variance if variance.shape == loc.shape else variance.expand(loc.shape)


def _mean_tangent(
    shape: torch.Size, terms: Sequence[tuple[Moments, Slope]]
) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """Return the mean Σ_i s̄_i·U_i over positions, the rest Σ_r (Σ_i (s_i - s̄_i)·U_i)² of the variance, and the grid."""
    grid = terms[0][0].grid
    commons = [value.common for value, _ in terms if value.common is not None]
    constant = [dim for dim in range(len(grid)) if all([common.shape[dim + 1] == 1 for common in commons])]
    kept: Tensor | None = None
    deviations: list[tuple[Tensor, Tensor]] = []
    for common, (_, slope) in zip(commons, terms, strict=True):
        if isinstance(slope, Tensor):
            slope = _on_grid(slope, shape, grid)
            dims = [dim for dim in constant if slope.shape[dim] != 1]
            if dims:
                mean = terms[0][0].within.mean(slope, dims)
                deviations.append((slope - mean, common))
                slope = mean
        part = common if isinstance(slope, float | int) and slope == 1 else slope * common
        kept = part if kept is None else kept + part
    assert kept is not None
    if not deviations:
        return kept, None, grid
    lost: Tensor | float = 0.0
    for number, (deviation, common) in enumerate(deviations):
        lost = lost + deviation.square() * common.square().sum(0)
        for other, second in deviations[:number]:
            lost = lost + 2 * deviation * other * (common * second).sum(0)
    assert isinstance(lost, Tensor)
    return kept, lost.expand(grid).reshape(shape).clamp_min(0), grid


def _on_grid(slope: Tensor, shape: torch.Size, grid: tuple[int, ...]) -> Tensor:
    """Reshape a slope to the dimensions of the grid; it stays small if the grid is the shape of the value."""
    if grid == tuple(shape):
        return slope.reshape([1] * (len(shape) - slope.dim()) + list(slope.shape))
    return slope.expand(shape).reshape(grid)


def covariance(x: Moments, y: Moments, shape: torch.Size) -> Tensor | None:
    """Return the covariance Σ_r U_x·U_y of the common parts of two values, or None if one has no common part."""
    x, y = on_one_grid([stretched(x, shape), stretched(y, shape)])
    if x.common is None or y.common is None:
        return None
    shared = (x.common * y.common).sum(0)
    return shared if x.grid == tuple(shape) else shared.expand(x.grid).reshape(shape)


def scaled(x: Moments, loc: Tensor, slope: Slope) -> Moments:
    """Return `loc` with the noise of x times a slope that broadcasts to it."""
    return combined(loc, [(x, slope)])


@moment_rule(*named("add", "__add__", "__radd__"))
def add(input: Any, other: Any, *, alpha: float = 1) -> Moments:
    """Return x + alpha·y."""
    loc = loc_of(input) + loc_of(other) if alpha == 1 else torch.add(loc_of(input), loc_of(other), alpha=alpha)
    result = combined(loc, [(x, s) for x, s in ((input, 1.0), (other, alpha)) if isinstance(x, Moments)])
    result.source = source_of_sum(input, other) if alpha == 1 else None
    return result


@moment_rule(*named("sub", "subtract", "__sub__"))
def sub(input: Any, other: Any, *, alpha: float = 1) -> Moments:
    """Return x - alpha·y."""
    loc = loc_of(input) - loc_of(other) if alpha == 1 else torch.sub(loc_of(input), loc_of(other), alpha=alpha)
    return combined(loc, [(x, s) for x, s in ((input, 1.0), (other, -alpha)) if isinstance(x, Moments)])


@moment_rule(*named("rsub", "__rsub__"))
def rsub(input: Any, other: Any, *, alpha: float = 1) -> Moments:
    """Return y - alpha·x."""
    return sub(other, input, alpha=alpha)


@moment_rule(*named("neg", "negative", "__neg__"))
def neg(input: Moments) -> Moments:
    """Return -x."""
    return scaled(input, -input.loc, -1.0)


@moment_rule(*named("positive", "__pos__"))
def positive(input: Moments) -> Moments:
    """Return x."""
    return input


@moment_rule(*named("mul", "multiply", "__mul__", "__rmul__"))
def mul(input: Any, other: Any) -> Moments:
    """Return x·y, exact for Gaussians with the covariance c.

    The mean is m_x m_y + c, the variance m_y²v_x + m_x²v_y + 2m_x m_y c + v_x v_y + c²; for a square, c = v.
    """
    loc = loc_of(input) * loc_of(other)
    if not isinstance(other, Moments):
        return scaled(input, loc, other)
    if not isinstance(input, Moments):
        return scaled(other, loc, input)
    dtype = variance_dtype(loc.dtype)
    v, w = input.variance.to(dtype), other.variance.to(dtype)
    if input is other:
        m = input.loc.to(dtype)
        return input.follow((loc + v).to(loc.dtype), 2 * m, 4 * m.square() * v + 2 * v.square())
    shared = covariance(input, other, loc.shape)
    extra = v * w if shared is None else v * w + shared.square()
    loc = loc if shared is None else (loc + shared).to(loc.dtype)
    return combined(loc, [(input, other.loc), (other, input.loc)], extra)


@moment_rule(*named("div", "divide", "true_divide", "__truediv__", "__div__"))
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Moments:
    """Return x / y; for a random y to first order, m_x/m_y with slopes 1/m_y and -m_x/m_y²."""
    if rounding_mode is not None:
        raise unsupported("torch.div with a rounding_mode")
    loc = loc_of(input) / loc_of(other)
    divisor = loc_of(other)
    if isinstance(divisor, Tensor):
        divisor = divisor.to(variance_dtype(loc.dtype))
    terms = []
    if isinstance(input, Moments):
        terms.append((input, 1 / divisor))
    if isinstance(other, Moments):
        terms.append((other, -loc.to(divisor.dtype) / divisor))
    return combined(loc, terms)


@moment_rule(*named("__rtruediv__", "__rdiv__"))
def rdiv(input: Any, other: Any) -> Moments:
    """Return y / x."""
    return div(other, input)


@moment_rule(*named("addcmul"))
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Moments:
    """Return x + value·y·z."""
    product = mul(tensor1, tensor2)
    total = add(input, product, alpha=value)
    bias = product.loc - loc_of(tensor1) * loc_of(tensor2)  # the covariance of the factors
    loc = torch.addcmul(loc_of(input), loc_of(tensor1), loc_of(tensor2), value=value) + value * bias
    return total.like(loc, total.independent, total.common, total.grid)


@moment_rule(*named("lerp"))
def lerp(input: Any, end: Any, weight: Any) -> Moments:
    """Return x + weight·(y - x), exact for independent values: the slopes are 1 - weight, weight and y - x."""
    share = loc_of(weight)
    loc = torch.lerp(loc_of(input), loc_of(end), share)
    terms = [(x, s) for x, s in ((input, 1 - share), (end, share)) if isinstance(x, Moments)]
    if not isinstance(weight, Moments):
        return combined(loc, terms)
    extra = [weight.variance * x.variance for x, _ in terms]
    terms.append((weight, loc_of(end) - loc_of(input)))
    return combined(loc, terms, sum(extra[1:], extra[0]) if extra else None)


@moment_rule(*named("glu"))
def glu(input: Moments, dim: int = -1) -> Moments:
    """Return a·sigmoid(b) for the two halves a, b of a value."""
    first, second = input.chunk(2, dim)
    return mul(first, second.sigmoid())


def _extreme(input: Any, other: Any, sign: float) -> Moments:
    """Return max(x, y), or min(x, y) for the sign -1, exact for Gaussians (Clark 1961).

    With θ² = Var(x - y), α = (m_x - m_y)/θ and Φ, φ of the normal distribution, the maximum has the mean m_x Φ(α) +
    m_y Φ(-α) + θ φ(α), the slopes Φ(α) and Φ(-α), and the second moment (m_x² + v_x) Φ(α) + (m_y² + v_y) Φ(-α) +
    (m_x + m_y) θ φ(α). Here all of them are relative to the larger mean, so that little cancels.
    """
    if input is other:
        return input
    choose = torch.maximum if sign > 0 else torch.minimum
    plain = choose(loc_of(input), loc_of(other))
    dtype = variance_dtype(plain.dtype)
    x, y = (loc_of(value).to(dtype) for value in (input, other))
    loses = sign * x < sign * y  # whether y has the larger mean
    random = [value for value in (input, other) if isinstance(value, Moments)]
    if random[0].within.activations != "exact":
        return where(~loses, input, other)
    v, w = (value.variance.to(dtype) if isinstance(value, Moments) else x.new_zeros(()) for value in (input, other))
    shared = covariance(random[0], random[1], plain.shape) if len(random) == 2 else None
    theta = (v + w if shared is None else v + w - 2 * shared).clamp_min(_TINY).sqrt()
    gap = -(x - y).abs()
    share, bell = torch.special.ndtr(gap / theta), theta * torch.exp(-0.5 * (gap / theta).square()) * _PEAK
    excess = (gap * share + bell).clamp_min(0)
    low, high = torch.where(loses, v, w), torch.where(loses, w, v)
    total = (gap.square() + low) * share + high * (1 - share) + gap * bell - excess.square()
    slope = torch.where(loses, share, 1 - share)
    slopes = ((input, slope), (other, 1 - slope))
    loc = (plain + sign * excess).to(plain.dtype)
    result = combined(loc, [(value, own) for value, own in slopes if isinstance(value, Moments)])
    return result.like_total(loc, total.clamp_min(0).expand(loc.shape), result.common, result.grid)


@moment_rule(*named("maximum"))
def maximum(input: Any, other: Any) -> Moments:
    """Return max(x, y)."""
    return _extreme(input, other, 1.0)


@moment_rule(*named("minimum"))
def minimum(input: Any, other: Any) -> Moments:
    """Return min(x, y)."""
    return _extreme(input, other, -1.0)


@moment_rule(torch.where)
def where(condition: Tensor, input: Any, other: Any) -> Moments:
    """Select from two values, element by element."""
    loc = torch.where(condition, loc_of(input), loc_of(other))
    choices = ((input, condition), (other, ~condition))
    return combined(loc, [(x, selected) for x, selected in choices if isinstance(x, Moments)])


@moment_rule(Tensor.where)
def where_method(input: Any, condition: Tensor, other: Any) -> Moments:
    """Select from two values, element by element."""
    return where(condition, input, other)


@moment_rule(*named("masked_fill"))
def masked_fill(input: Moments, mask: Tensor, value: Any) -> Moments:
    """Replace elements by a number, which has no noise."""
    return scaled(input, input.loc.masked_fill(mask, value), ~mask)


@moment_rule(*named("tril"))
def tril(input: Moments, diagonal: int = 0) -> Moments:
    """Keep the lower triangle of matrices."""
    return scaled(input, input.loc.tril(diagonal), input.loc.new_ones(input.shape[-2:]).tril(diagonal))


@moment_rule(*named("triu"))
def triu(input: Moments, diagonal: int = 0) -> Moments:
    """Keep the upper triangle of matrices."""
    return scaled(input, input.loc.triu(diagonal), input.loc.new_ones(input.shape[-2:]).triu(diagonal))


def _in_place(name: str, rule: Callable[..., Moments]) -> None:
    @moment_rule(*named(name))
    def assign(input: Any, *args: Any, **kwargs: Any) -> Moments:
        if isinstance(input, Moments):
            return input.assign(rule(input, *args, **kwargs))
        # `t += x` for a plain tensor t: the tensor gets the mean, and the name t gets the returned Moments.
        result = rule(input.clone(), *args, **kwargs)
        loc = getattr(input, name)(*[loc_of(arg) for arg in args], **kwargs)
        return result.like(loc, result.independent, result.common, result.grid)


for _name, _rule in (
    ("add_", add),
    ("sub_", sub),
    ("subtract_", sub),
    ("neg_", neg),
    ("negative_", neg),
    ("mul_", mul),
    ("multiply_", mul),
    ("div_", div),
    ("divide_", div),
    ("true_divide_", div),
    ("addcmul_", addcmul),
    ("lerp_", lerp),
    ("masked_fill_", masked_fill),
    ("tril_", tril),
    ("triu_", triu),
):
    _in_place(_name, _rule)
