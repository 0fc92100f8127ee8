"""The moments of an activation of Gaussian values as one Triton kernel, with the means that the next layer needs.

`kernels.py` imports it if Triton is installed, and decides when to use it. In plain torch a ReLU takes some twenty
kernels and five times the memory traffic. The formulas are those of `rules/moments/exact_moments.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

RELU, GELU = 0, 1
_TILE = 256  # values of one step of a program
_WIDE = 64  # channels of a program if channels follow one another in memory, else positions
_PROGRAMS = 1024  # fewer blocks of channels than these are shared by several programs, with some positions each
_LEAST = 4  # steps of such a program
_TINY = tl.constexpr(1e-20)
_REACH = tl.constexpr(12.5)
_CURVE = tl.constexpr(-0.7213475204444817)  # -½ log₂ e
_PEAK = tl.constexpr(0.3989422804014327)
_ROOT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _power_of_two(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _relu_moments(m, v):
    """Return the excess of the mean over relu(m) and the variance, both for a unit variance, and the mean slope.

    With a = |m|/√v, φ(a) and the tail Φ(-a): the excess is φ - aΦ(-a), and the variance is slope - excess·(excess + a).
    """
    a = tl.minimum(tl.abs(m * tl.rsqrt(tl.maximum(v, _TINY))), _REACH)
    bell = _power_of_two(_CURVE * a * a)
    t = _reciprocal(1.0 + 0.325 * a)
    tail = ((0.033821061 * t - 0.113534019) * t + 0.085327419) * t + 0.026033829
    tail = (((tail * t + 0.093520543) * t + 0.115503139) * t + 0.129672143) * t + 0.129656152
    tail *= bell * t
    slope = tl.where(m > 0.0, 1.0 - tail, tail)
    excess = tl.maximum(bell * _PEAK - a * tail, 0.0)
    return excess, slope, tl.maximum(slope - excess * (excess + a), 0.0)


@triton.jit
def _gelu_moments(m, v):
    """Return the mean, the mean slope, and the variance."""
    r = tl.rsqrt(1.0 + v)
    a = m * r
    cdf = 0.5 * (1.0 + tl.erf(a * _ROOT_HALF))
    w = a * a
    density = tl.exp(-0.5 * w) * _PEAK
    mean = a * cdf
    mean = (mean + v * (mean + density)) * r
    r2 = r * r
    u = v * r2
    slope = cdf + a * density * r2
    w = tl.minimum(w, _REACH * _REACH)
    two = 1.0 + r2 - r2 * w
    three = two + 2.0 * r2
    four = three + two * (w - 6.0) + 4.0
    three = three * three * w + four * four * u * 0.25
    two = (two * two + three * u * (1.0 / 3.0)) * (density * density)
    return mean, slope, (slope * slope + two * u * 0.5) * v


@triton.jit
def activation_moments_kernel(
    m_ptr, v_ptr, loc_ptr, slope_ptr, variance_ptr, first_ptr, second_ptr,
    center_ptr, square_ptr, weight_ptr, bias_ptr, added_ptr,
    examples, positions, channels, at_once, eps,
    m0, m1, m2, v0, v1, v2, loc0, loc1, loc2, added0, added1, added2,
    NORMALIZED: tl.constexpr, ADDED: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    MEAN_SLOPE: tl.constexpr, MEAN_VARIANCE: tl.constexpr, VARIES: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, CHANNELS)
    example = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    part = tl.program_id(1)
    exists = channel < channels
    m_ptr += example * m0 + channel.to(tl.int64) * m2
    v_ptr += example * v0 + channel.to(tl.int64) * v2
    written = example * loc0 + channel.to(tl.int64) * loc2
    added_ptr += example * added0 + channel.to(tl.int64) * added2
    same = tl.load(v_ptr, mask=exists, other=0.0).to(tl.float32)  # the variance, unless it varies
    if NORMALIZED:
        factor = tl.load(weight_ptr + channel, mask=exists, other=0.0).to(tl.float32)
        square = tl.load(square_ptr + channel, mask=exists, other=1.0) + eps  # in double precision in compiled code
        factor *= tl.rsqrt(square.to(tl.float32))
        shift = tl.load(bias_ptr + channel, mask=exists, other=0.0).to(tl.float32)
        shift -= tl.load(center_ptr + channel, mask=exists, other=0.0).to(tl.float32) * factor
    slopes = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    variances = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    firsts = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    seconds = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    for start in range(part * at_once, tl.minimum((part + 1) * at_once, positions), POSITIONS):
        position = start + tl.arange(0, POSITIONS)[:, None]
        mask = (position < positions) & exists
        if EVEN:
            mask = tl.full((POSITIONS, CHANNELS), True, tl.int1)
        position = position.to(tl.int64)
        m = tl.load(m_ptr + position * m1, mask=mask, other=0.0).to(tl.float32)
        if NORMALIZED:
            m = m * factor + shift
        if ADDED:
            m += tl.load(added_ptr + position * added1, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + position * v1, mask=mask, other=0.0).to(tl.float32) if VARIES else same
        if KIND == 0:
            excess, slope, variance = _relu_moments(m, v)
            mean = tl.maximum(m, 0.0, propagate_nan=tl.PropagateNan.ALL) + excess * (v * tl.rsqrt(tl.maximum(v, _TINY)))
            if VARIES or not MEAN_VARIANCE:
                variance *= v
        else:
            mean, slope, variance = _gelu_moments(m, v)
        mean = mean.to(loc_ptr.dtype.element_ty)
        places = written + position * loc1
        tl.store(loc_ptr + places, mean, mask=mask)
        if MEAN_SLOPE:
            mean = tl.where(mask, mean.to(tl.float32), 0.0)
            slopes += tl.where(mask, slope, 0.0)
            firsts += mean
            seconds += mean * mean
        else:
            tl.store(slope_ptr + places, slope, mask=mask)
        if MEAN_VARIANCE:
            variances += tl.where(mask, variance, 0.0)
        else:
            tl.store(variance_ptr + places, variance, mask=mask)
    found = (part.to(tl.int64) * examples + example) * channels + channel
    if MEAN_SLOPE:
        tl.store(slope_ptr + found, tl.sum(slopes, 0)[None, :] / positions, mask=exists)
        tl.store(first_ptr + found, tl.sum(firsts, 0)[None, :] / positions, mask=exists)
        tl.store(second_ptr + found, tl.sum(seconds, 0)[None, :] / positions, mask=exists)
    if MEAN_VARIANCE:
        if KIND == 0 and not VARIES:
            variances *= same
        tl.store(variance_ptr + found, tl.sum(variances, 0)[None, :] / positions, mask=exists)


@triton_op("leanbayes::activation_moments", mutates_args={})
def activation_moments(
    m: Tensor,
    v: Tensor,
    kind: int,
    mean_slope: bool,
    mean_variance: bool,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean, the slope and the variance of f(x) for x ~ N(m, v), and means of the mean and its square.

    With the running statistics of a batch norm, and its weight and bias, it is applied to m first. `added` comes after.

    Args:
        m: Means, (examples, positions, channels), with any strides.
        v: Variances, in single precision and in a shape that broadcasts to it.
        kind: `RELU` or `GELU`.
        mean_slope: Whether to return the mean over positions of the slope, (examples, 1, channels). Only then the
            last two results are not empty: the means over positions of the mean and of its square.
        mean_variance: Whether to return the mean over positions of the variance.
        running_mean: (channels,), as the next three.
        running_var: The running variance.
        weight: The weight of the batch norm.
        bias: Its bias.
        eps: What it adds to the running variance.
        added: What is added to the mean, in the shape of m, with any strides.
    """
    examples, positions, channels = m.shape
    wide = triton.next_power_of_2(channels if m.stride(2) == 1 else positions)
    along = min(_WIDE, wide)  # tiles are longest along the dimension whose elements follow one another
    across = min(_TILE // along, triton.next_power_of_2(positions if m.stride(2) == 1 else channels))
    rows, columns = (across, along) if m.stride(2) == 1 else (along, across)
    blocks = examples * triton.cdiv(channels, columns)
    steps = triton.cdiv(positions, rows)
    parts = min(triton.cdiv(_PROGRAMS, max(1, blocks)), triton.cdiv(steps, _LEAST))
    at_once = triton.cdiv(steps, parts) * rows
    parts = triton.cdiv(positions, at_once)
    loc = torch.empty_like(m)

    def result(is_mean: bool) -> Tensor:
        if is_mean:
            return torch.empty((parts, examples, channels), dtype=torch.float32, device=m.device)
        return torch.empty_like(m, dtype=torch.float32)

    slope, variance = result(mean_slope), result(mean_variance)
    first, second = (result(True) if mean_slope else slope.new_empty(0) for _ in range(2))
    own = [0 if size == 1 else stride for size, stride in zip(v.shape, v.stride(), strict=True)]
    norm = [m if part is None else part for part in (running_mean, running_var, weight, bias)]
    more = m if added is None else added
    if m.numel():
        wrap_triton(activation_moments_kernel)[(blocks, parts)](
            m, v, loc, slope, variance, first, second, *norm, more,
            examples, positions, channels, at_once, eps,
            *m.stride(), *own, *loc.stride(), *more.stride(),
            weight is not None, added is not None, kind, positions % rows == 0 and channels % columns == 0,
            mean_slope, mean_variance, v.shape[1] != 1, rows, columns,
        )  # fmt: skip

    def joined(value: Tensor, is_mean: bool) -> Tensor:
        return value.sum(0).unsqueeze(1) if is_mean else value

    return (
        loc, joined(slope, mean_slope), joined(variance, mean_variance), joined(first, mean_slope),
        joined(second, mean_slope),
    )  # fmt: skip
