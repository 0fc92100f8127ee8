"""The Gaussian operations that cost: draw with KL over a flat vector, and the reparameterised draw of an activation.

With σ = softplus(ρ), w = μ + σ·ε and a prior N(m, s²), the whole KL is
    Σ ½[(σ² + (μ-m)²)/s² - 1] - log(σ/s),
and both passes are written by hand, because plain autograd moves three times the bytes and keeps five tensors alive.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanbayes import kernels, noise


class NormalTerms(NamedTuple):
    """A Gaussian prior as numbers: centre (None is 0) and scale, one or one per weight."""

    loc: Tensor | None
    scale: float | Tensor


def inverse_softplus(x: Tensor) -> Tensor:
    """Return ρ with softplus(ρ) = x, for x > 0, without overflow or cancellation."""
    return x + torch.log(-torch.expm1(-x))


def log_density(noise: Tensor, sigma: Tensor) -> Tensor:
    """Sum of the log densities of N(0, σ²) at some noise: log q(w) at the draw that it belongs to."""
    return -0.5 * (noise / sigma).square().sum() - sigma.log().sum() - 0.5 * math.log(2 * math.pi) * noise.numel()


def normal_kl(mean: Tensor, sigma: Tensor, prior: NormalTerms) -> Tensor:
    """Sum of KL(N(μ, σ²) ‖ N(m, s²)) over all weights, by dot products: each operand is read once."""
    centred = mean if prior.loc is None else mean - prior.loc
    if isinstance(prior.scale, Tensor):
        centred, sigma = centred / prior.scale, sigma / prior.scale
        squares, log_scale = torch.dot(centred, centred) + torch.dot(sigma, sigma), 0.0
    else:
        squares = (torch.dot(centred, centred) + torch.dot(sigma, sigma)) / prior.scale**2
        log_scale = math.log(prior.scale)
    return 0.5 * squares - torch.log(sigma).sum() + mean.numel() * (log_scale - 0.5)


def mean_kl(mean: Tensor, prior: NormalTerms) -> Tensor:
    """Return the part of `normal_kl` that the means have: Σ ½(μ-m)²/s²."""
    centred = mean if prior.loc is None else mean - prior.loc
    if isinstance(prior.scale, Tensor):
        return 0.5 * torch.linalg.vector_norm(centred / prior.scale).square()
    return 0.5 * (torch.linalg.vector_norm(centred) / prior.scale).square()


def _kl_slopes(
    mean: Tensor, sigma: Tensor, loc: Tensor | None, scales: Tensor | None, scale: float, grad_kl: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of grad_kl·KL for μ and σ, as two tensors and the one factor that both still need."""
    centred = mean if loc is None else mean - loc
    one = mean.new_ones(())
    if scales is None:
        return centred, torch.addcdiv(sigma, one, sigma, value=-(scale**2)), grad_kl / scale**2
    return centred / scales.square(), sigma / scales.square() - one / sigma, grad_kl


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        rho: Tensor,
        key: Tensor,
        loc: Tensor | None,
        scales: Tensor | None,
        scale: float,
        with_kl: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.scale, ctx.with_kl, ctx.fused = scale, with_kl, kernels.usable(mean)
        if ctx.fused:
            ctx.save_for_backward(mean, rho, loc, scales, key)
            return kernels.ops.draw_forward(mean, rho, key, loc, scales, scale, with_kl)
        sigma = F.softplus(rho)
        epsilon = noise.normal(mean, key)
        weights = torch.addcmul(mean, sigma, epsilon)
        # The noise is kept here: making it again on a CPU costs more time than the memory is worth.
        ctx.save_for_backward(mean, rho, loc, scales, epsilon, sigma if with_kl else None)
        terms = NormalTerms(loc, scale if scales is None else scales)
        return weights, normal_kl(mean, sigma, terms) if with_kl else mean.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        mean, rho, loc, scales, *rest = ctx.saved_tensors
        if ctx.fused:
            gradients = kernels.ops.draw_backward(
                grad.contiguous(), grad_kl, mean, rho, rest[0], loc, scales, ctx.scale, ctx.with_kl
            )
            return *gradients, None, None, None, None, None
        epsilon, sigma = rest
        grad_mean, grad_sigma = grad, grad * epsilon
        if ctx.with_kl:
            slope_mean, slope_sigma, factor = _kl_slopes(mean, sigma, loc, scales, ctx.scale, grad_kl)
            grad_mean = torch.addcmul(grad, slope_mean, factor)
            grad_sigma = grad_sigma.addcmul_(slope_sigma, factor)
        grad_rho = torch.ops.aten.softplus_backward(grad_sigma, rho, 1, 20)
        return grad_mean, grad_rho, None, None, None, None, None


def draw(mean: Tensor, rho: Tensor, key: Tensor) -> Tensor:
    """Draw μ + softplus(ρ)·ε(key)."""
    return _Draw.apply(mean, rho, key, None, None, 1.0, False)[0]


def std_of_draws(rho: Tensor) -> Tensor | None:
    """Return softplus(ρ), which many a `draw` may share; None where a kernel makes it on the way."""
    return None if kernels.usable(rho) else F.softplus(rho)


def draw_and_kl(mean: Tensor, rho: Tensor, key: Tensor, prior: NormalTerms) -> tuple[Tensor, Tensor]:
    """Draw, and the exact KL to a Gaussian prior, in one pass over the weights."""
    return _Draw.apply(mean, rho, key, prior.loc, *_scales(prior), True)


def _scales(prior: NormalTerms) -> tuple[Tensor | None, float]:
    return (prior.scale, 1.0) if isinstance(prior.scale, Tensor) else (None, prior.scale)


class _VarianceAndKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, rho: Tensor, loc: Tensor | None, scales: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        sigma = F.softplus(rho)
        ctx.scale = scale
        ctx.save_for_backward(mean, rho, loc, scales, sigma)
        return sigma * sigma, normal_kl(mean, sigma, NormalTerms(loc, scale if scales is None else scales))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        mean, rho, loc, scales, sigma = ctx.saved_tensors
        slope_mean, slope_sigma, factor = _kl_slopes(mean, sigma, loc, scales, ctx.scale, grad_kl)
        grad_sigma = slope_sigma.mul_(factor).addcmul_(grad, sigma, value=2)
        return slope_mean * factor, torch.ops.aten.softplus_backward(grad_sigma, rho, 1, 20), None, None, None


def variance_and_kl(mean: Tensor, rho: Tensor, prior: NormalTerms) -> tuple[Tensor, Tensor]:
    """Return softplus(ρ)², and the exact KL to a Gaussian prior."""
    return _VarianceAndKL.apply(mean, rho, prior.loc, *_scales(prior))


class _Reparameterise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor, key: Tensor, stream: int) -> Tensor:
        ctx.stream, ctx.fused = stream, kernels.usable(loc)
        if ctx.fused:
            ctx.save_for_backward(variance, key)
            return kernels.ops.reparameterise_forward(loc, variance, key, stream)
        std, epsilon = variance.clamp_min(0).sqrt(), noise.normal(loc, key, stream)
        ctx.save_for_backward(std, epsilon)
        return torch.addcmul(loc, std, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.fused:
            variance, key = ctx.saved_tensors
            grad = _match(grad, variance)
            return grad, kernels.ops.reparameterise_backward(grad, variance, key, ctx.stream), None, None
        std, epsilon = ctx.saved_tensors
        # The slope of √v is infinite at 0; a variance of exactly 0 means that no noise reached this value.
        return grad, torch.where(std > 0, 0.5 * grad * epsilon / std, 0.0), None, None


def _match(tensor: Tensor, like: Tensor) -> Tensor:
    """Give `tensor` the strides of `like`, so that both can be walked as flat memory."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def reparameterise(loc: Tensor, variance: Tensor, key: Tensor, stream: int = 0) -> Tensor:
    """Draw loc + √variance·ε(key, stream) elementwise, with a finite gradient where the variance is 0."""
    if kernels.usable(loc):
        loc = loc if _is_dense(loc) else loc.contiguous()
        variance = _match(variance, loc)
    return _Reparameterise.apply(loc, variance, key, stream)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
