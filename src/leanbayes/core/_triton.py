"""Fused GPU operations in Triton. `kernels.py` imports them if Triton is installed, and decides when to use them.

A program computes four blocks of consecutive values, because one Philox call gives four normals. All kernels use the
same order of the noise, so each of them can recompute the noise of another one.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.language.extra import libdevice

BLOCK = 512


@triton.jit
def _noise(key_ptr, stream_id, BLOCK: tl.constexpr):
    """Return four blocks of standard normals: Philox, keyed by (seed, index, stream_id) and counted by position."""
    return _noise_of_program(key_ptr, stream_id, tl.program_id(0), BLOCK)


@triton.jit
def _noise_of_program(key_ptr, stream_id, program, BLOCK: tl.constexpr):
    """Return the four blocks of the program with that number. Philox counts to 2^32, and the seed counts beyond."""
    first = tl.cast(program, tl.int64) * BLOCK
    seed = tl.load(key_ptr).to(tl.uint64)
    index = tl.load(key_ptr + 1).to(tl.uint64)
    state = seed + index * 0x9E3779B97F4A7C15 + tl.full((), stream_id, tl.int64).to(tl.uint64) * 0xD1B54A32D192ED03
    state += (first >> 32).to(tl.uint64) * 0xA0761D6478BD642F
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    counter = (first + tl.arange(0, BLOCK)).to(tl.int32)
    return tl.randn4x((state ^ (state >> 31)).to(tl.int64), counter.to(tl.uint32, bitcast=True), 7)


@triton.jit
def _offsets(part: tl.constexpr, BLOCK: tl.constexpr):
    return (tl.program_id(0).to(tl.int64) * 4 + part) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, libdevice.log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _fill_part(out_ptr, noise, offsets, numel, SIGNS: tl.constexpr):
    if SIGNS:
        noise = tl.where(noise < 0.0, -1.0, 1.0)
    tl.store(out_ptr + offsets, noise, mask=offsets < numel)


@triton.jit
def fill_noise_kernel(out_ptr, key_ptr, stream_id, numel, SIGNS: tl.constexpr, BLOCK: tl.constexpr):
    n0, n1, n2, n3 = _noise(key_ptr, stream_id, BLOCK)
    _fill_part(out_ptr, n0, _offsets(0, BLOCK), numel, SIGNS)
    _fill_part(out_ptr, n1, _offsets(1, BLOCK), numel, SIGNS)
    _fill_part(out_ptr, n2, _offsets(2, BLOCK), numel, SIGNS)
    _fill_part(out_ptr, n3, _offsets(3, BLOCK), numel, SIGNS)


@triton.jit
def _fill_shifted_part(out_ptr, noise, offsets, numel):
    tl.store(out_ptr + offsets, noise, mask=(offsets >= 0) & (offsets < numel))


@triton.jit
def fill_noise_by_position_kernel(out_ptr, key_ptr, stream_id, numel, BLOCK: tl.constexpr):
    """Fill a part of a vector that starts at the position key[2] of the whole with the noise that the whole has."""
    start = tl.load(key_ptr + 2)
    first, shift = start // (4 * BLOCK), start % (4 * BLOCK)
    n0, n1, n2, n3 = _noise_of_program(key_ptr, stream_id, tl.program_id(0) + first, BLOCK)
    _fill_shifted_part(out_ptr, n0, _offsets(0, BLOCK) - shift, numel)
    _fill_shifted_part(out_ptr, n1, _offsets(1, BLOCK) - shift, numel)
    _fill_shifted_part(out_ptr, n2, _offsets(2, BLOCK) - shift, numel)
    _fill_shifted_part(out_ptr, n3, _offsets(3, BLOCK) - shift, numel)


@triton.jit
def _centered(mean_ptr, loc_ptr, scales_ptr, scale, offsets, mask, HAS_LOC: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return the mean minus the prior's center, and one over the prior's scale."""
    mean = tl.load(mean_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_LOC:
        mean -= tl.load(loc_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        inverse = 1.0 / tl.load(scales_ptr + offsets, mask=mask, other=1.0).to(tl.float32)
    else:
        inverse = mean * 0.0 + 1.0 / scale
    return mean, inverse


@triton.jit
def _draw_part(
    mean_ptr, rho_ptr, loc_ptr, scales_ptr, out_ptr, noise, offsets, numel, scale,
    WITH_KL: tl.constexpr, HAS_LOC: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    mask = offsets < numel
    mean = tl.load(mean_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sigma = _softplus(tl.load(rho_ptr + offsets, mask=mask, other=0.0).to(tl.float32))
    tl.store(out_ptr + offsets, mean + sigma * noise, mask=mask)
    kl = mean * 0.0
    if WITH_KL:
        mean, inverse = _centered(mean_ptr, loc_ptr, scales_ptr, scale, offsets, mask, HAS_LOC, HAS_SCALES)
        mean *= inverse
        sigma *= inverse
        kl = tl.where(mask, 0.5 * (mean * mean + sigma * sigma - 1.0) - tl.log(sigma), 0.0)
    return kl


@triton.jit
def draw_forward_kernel(
    mean_ptr, rho_ptr, key_ptr, loc_ptr, scales_ptr, out_ptr, partial_ptr, numel, scale,
    WITH_KL: tl.constexpr, HAS_LOC: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n0, n1, n2, n3 = _noise(key_ptr, 0, BLOCK)
    kl = _draw_part(mean_ptr, rho_ptr, loc_ptr, scales_ptr, out_ptr, n0, _offsets(0, BLOCK), numel, scale,
                    WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip
    kl += _draw_part(mean_ptr, rho_ptr, loc_ptr, scales_ptr, out_ptr, n1, _offsets(1, BLOCK), numel, scale,
                     WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip
    kl += _draw_part(mean_ptr, rho_ptr, loc_ptr, scales_ptr, out_ptr, n2, _offsets(2, BLOCK), numel, scale,
                     WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip
    kl += _draw_part(mean_ptr, rho_ptr, loc_ptr, scales_ptr, out_ptr, n3, _offsets(3, BLOCK), numel, scale,
                     WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip
    if WITH_KL:
        tl.store(partial_ptr + tl.program_id(0), tl.sum(kl, axis=0))


@triton.jit
def _draw_backward_part(
    grad_ptr, grad_kl_ptr, mean_ptr, rho_ptr, loc_ptr, scales_ptr, grad_mean_ptr, grad_rho_ptr, noise, offsets, numel,
    scale, WITH_KL: tl.constexpr, HAS_LOC: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    mask = offsets < numel
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rho = tl.load(rho_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    grad_sigma = grad * noise
    if WITH_KL:  # else the gradient of the mean is `grad` itself
        grad_kl = tl.load(grad_kl_ptr).to(tl.float32)
        mean, inverse = _centered(mean_ptr, loc_ptr, scales_ptr, scale, offsets, mask, HAS_LOC, HAS_SCALES)
        sigma = _softplus(rho)
        grad_sigma += grad_kl * (sigma * inverse * inverse - 1.0 / sigma)
        tl.store(grad_mean_ptr + offsets, grad + grad_kl * mean * inverse * inverse, mask=mask)
    tl.store(grad_rho_ptr + offsets, grad_sigma * tl.sigmoid(rho), mask=mask)


@triton.jit
def draw_backward_kernel(
    grad_ptr, grad_kl_ptr, mean_ptr, rho_ptr, key_ptr, loc_ptr, scales_ptr, grad_mean_ptr, grad_rho_ptr, numel, scale,
    WITH_KL: tl.constexpr, HAS_LOC: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n0, n1, n2, n3 = _noise(key_ptr, 0, BLOCK)
    _draw_backward_part(grad_ptr, grad_kl_ptr, mean_ptr, rho_ptr, loc_ptr, scales_ptr, grad_mean_ptr, grad_rho_ptr,
                        n0, _offsets(0, BLOCK), numel, scale, WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip
    _draw_backward_part(grad_ptr, grad_kl_ptr, mean_ptr, rho_ptr, loc_ptr, scales_ptr, grad_mean_ptr, grad_rho_ptr,
                        n1, _offsets(1, BLOCK), numel, scale, WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip
    _draw_backward_part(grad_ptr, grad_kl_ptr, mean_ptr, rho_ptr, loc_ptr, scales_ptr, grad_mean_ptr, grad_rho_ptr,
                        n2, _offsets(2, BLOCK), numel, scale, WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip
    _draw_backward_part(grad_ptr, grad_kl_ptr, mean_ptr, rho_ptr, loc_ptr, scales_ptr, grad_mean_ptr, grad_rho_ptr,
                        n3, _offsets(3, BLOCK), numel, scale, WITH_KL, HAS_LOC, HAS_SCALES)  # fmt: skip


@triton.jit
def natural_step_kernel(
    mean_ptr, rho_ptr, momentum_ptr, grad_ptr, grad_rho_ptr, loc_ptr, scales_ptr, rate_ptr, count_ptr, numel, scale,
    log_beta, rest, gap, precision, weight, HAS_LOC: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rest` is 1 - β."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    mean = tl.load(mean_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sigma = _softplus(tl.load(rho_ptr + offsets, mask=mask, other=0.0).to(tl.float32))
    momentum = tl.load(momentum_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    grad_rho = tl.load(grad_rho_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    centered, inverse = _centered(mean_ptr, loc_ptr, scales_ptr, scale, offsets, mask, HAS_LOC, HAS_SCALES)
    inverse *= inverse
    slope = weight * sigma * grad_rho / -libdevice.expm1(-sigma) + sigma * sigma * inverse - 1.0
    sigma *= tl.rsqrt(1.0 + gap * slope * (1.0 + 0.5 * gap * slope))
    tl.store(rho_ptr + offsets, sigma + tl.log(-libdevice.expm1(-sigma)), mask=mask)
    momentum += rest * (grad - momentum)
    tl.store(momentum_ptr + offsets, momentum, mask=mask)
    correction = -libdevice.expm1(log_beta * tl.load(count_ptr).to(tl.float32))
    direction = momentum / correction + centered * inverse / weight
    step = tl.load(rate_ptr).to(tl.float32) * sigma * sigma * (precision + inverse)
    tl.store(mean_ptr + offsets, mean - step * direction, mask=mask)


@triton.jit
def _reparameterize_part(loc_ptr, variance_ptr, out_ptr, noise, offsets, numel):
    mask = offsets < numel
    loc = tl.load(loc_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    variance = tl.load(variance_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, loc + tl.sqrt(tl.maximum(variance, 0.0)) * noise, mask=mask)


@triton.jit
def reparameterize_forward_kernel(loc_ptr, variance_ptr, key_ptr, stream_id, out_ptr, numel, BLOCK: tl.constexpr):
    n0, n1, n2, n3 = _noise(key_ptr, stream_id, BLOCK)
    _reparameterize_part(loc_ptr, variance_ptr, out_ptr, n0, _offsets(0, BLOCK), numel)
    _reparameterize_part(loc_ptr, variance_ptr, out_ptr, n1, _offsets(1, BLOCK), numel)
    _reparameterize_part(loc_ptr, variance_ptr, out_ptr, n2, _offsets(2, BLOCK), numel)
    _reparameterize_part(loc_ptr, variance_ptr, out_ptr, n3, _offsets(3, BLOCK), numel)


@triton.jit
def _reparameterize_backward_part(grad_ptr, variance_ptr, out_ptr, noise, offsets, numel):
    mask = offsets < numel
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    variance = tl.load(variance_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    slope = tl.where(variance > 0.0, 0.5 * tl.rsqrt(tl.where(variance > 0.0, variance, 1.0)), 0.0)
    tl.store(out_ptr + offsets, grad * noise * slope, mask=mask)


@triton.jit
def reparameterize_backward_kernel(grad_ptr, variance_ptr, key_ptr, stream_id, out_ptr, numel, BLOCK: tl.constexpr):
    n0, n1, n2, n3 = _noise(key_ptr, stream_id, BLOCK)
    _reparameterize_backward_part(grad_ptr, variance_ptr, out_ptr, n0, _offsets(0, BLOCK), numel)
    _reparameterize_backward_part(grad_ptr, variance_ptr, out_ptr, n1, _offsets(1, BLOCK), numel)
    _reparameterize_backward_part(grad_ptr, variance_ptr, out_ptr, n2, _offsets(2, BLOCK), numel)
    _reparameterize_backward_part(grad_ptr, variance_ptr, out_ptr, n3, _offsets(3, BLOCK), numel)


def _grid(numel: int) -> tuple[int]:
    return ((numel + 4 * BLOCK - 1) // (4 * BLOCK),)


@triton_op("leanbayes::fused_noise", mutates_args={})
def noise(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    """Return standard normals, or random signs, with the shape and strides of a dense tensor."""
    out = torch.empty_like(like)
    if out.numel() and key.numel() == 3 and not signs:
        grid = _grid(out.numel() + 4 * BLOCK - 1)  # the start may lie inside of a program's positions
        wrap_triton(fill_noise_by_position_kernel)[grid](out, key, stream, out.numel(), BLOCK)
    elif out.numel():
        wrap_triton(fill_noise_kernel)[_grid(out.numel())](out, key, stream, out.numel(), signs, BLOCK)
    return out


@triton_op("leanbayes::draw_forward", mutates_args={})
def draw_forward(
    mean: Tensor, rho: Tensor, key: Tensor, loc: Tensor | None, scales: Tensor | None, scale: float, with_kl: bool
) -> tuple[Tensor, Tensor]:
    """Draw w = μ + softplus(ρ)·ε and sum KL(N(μ, σ²) ‖ N(loc, scale²)), in one pass."""
    weights = torch.empty_like(mean)
    grid = _grid(mean.numel())
    partial = torch.empty(grid if with_kl else (1,), dtype=torch.float32, device=mean.device)
    wrap_triton(draw_forward_kernel)[grid](
        mean, rho, key, loc, scales, weights, partial, mean.numel(), scale, with_kl, loc is not None,
        scales is not None, BLOCK,
    )  # fmt: skip
    return weights, partial.sum() if with_kl else partial.new_zeros(())


@triton_op("leanbayes::draw_backward", mutates_args={})
def draw_backward(
    grad: Tensor,
    grad_kl: Tensor,
    mean: Tensor,
    rho: Tensor,
    key: Tensor,
    loc: Tensor | None,
    scales: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `draw_forward` with respect to μ and ρ; the noise is recomputed from its key."""
    grad_mean, grad_rho = torch.empty_like(mean), torch.empty_like(rho)
    wrap_triton(draw_backward_kernel)[_grid(mean.numel())](
        grad, grad_kl, mean, rho, key, loc, scales, grad_mean, grad_rho, mean.numel(), scale, True,
        loc is not None, scales is not None, BLOCK,
    )  # fmt: skip
    return grad_mean, grad_rho


@triton_op("leanbayes::scale_backward", mutates_args={})
def scale_backward(grad: Tensor, rho: Tensor, key: Tensor) -> Tensor:
    """Return the gradient of the weights that `draw_forward` draws with respect to ρ."""
    grad_rho = torch.empty_like(rho)
    wrap_triton(draw_backward_kernel)[_grid(rho.numel())](
        grad, None, None, rho, key, None, None, None, grad_rho, rho.numel(), 1.0, False, False, False, BLOCK,
    )  # fmt: skip
    return grad_rho


def natural_step(
    mean: Tensor,
    rho: Tensor,
    momentum: Tensor,
    grad: Tensor,
    grad_rho: Tensor,
    loc: Tensor | None,
    scales: Tensor | None,
    scale: float,
    rate: Tensor,
    count: Tensor,
    beta: float,
    gap: float,
    precision: float,
    weight: float,
) -> None:
    """Take the step of `gaussian.natural_step_` in one pass over memory."""
    block = 1024
    natural_step_kernel[(triton.cdiv(mean.numel(), block),)](
        mean, rho, momentum, grad, grad_rho, loc, scales, rate, count, mean.numel(), scale, math.log(beta), 1 - beta,
        gap, precision, weight, loc is not None, scales is not None, block,
    )  # fmt: skip


@triton_op("leanbayes::reparameterize_forward", mutates_args={})
def reparameterize_forward(loc: Tensor, variance: Tensor, key: Tensor, stream: int) -> Tensor:
    """Draw loc + √variance·ε; both tensors have the same dense strides."""
    out = torch.empty_like(loc)
    if loc.numel():
        wrap_triton(reparameterize_forward_kernel)[_grid(loc.numel())](
            loc, variance, key, stream, out, loc.numel(), BLOCK
        )
    return out


@triton_op("leanbayes::reparameterize_backward", mutates_args={})
def reparameterize_backward(grad: Tensor, variance: Tensor, key: Tensor, stream: int) -> Tensor:
    """Return the gradient of `reparameterize_forward` with respect to the variance v: grad·ε / (2√v), or 0 if v = 0."""
    out = torch.empty_like(variance)
    if variance.numel():
        wrap_triton(reparameterize_backward_kernel)[_grid(variance.numel())](
            grad, variance, key, stream, out, variance.numel(), BLOCK
        )
    return out
