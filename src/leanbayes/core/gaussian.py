"""The expensive Gaussian operations: sampling all weights with their KL, and sampling an activation.

With σ = softplus(ρ), w = μ + σ·ε and a prior N(m, s²), the KL of all weights is
    Σ ½[(σ² + (μ-m)²)/s² - 1] - log(σ/s).
The forward and backward passes are written by hand, because plain autograd moves three times the bytes and keeps five
tensors in memory. Transforms of `torch.func` use plain torch operations with the same noise.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanbayes.core import kernels, noise


class NormalTerms(NamedTuple):
    """The center (None means 0) and the scale of a Gaussian prior, each one number or one per weight."""

    loc: Tensor | None
    scale: float | Tensor


def inverse_softplus(x: Tensor) -> Tensor:
    """Return ρ with softplus(ρ) = x, for x > 0, without overflow or cancellation."""
    return x + torch.log(-torch.expm1(-x))


def log_density(noise: Tensor, sigma: Tensor) -> Tensor:
    """Return the sum of the log densities of N(0, σ²) at some noise: log q(w) of the sample with this noise."""
    return -0.5 * (noise / sigma).square().sum() - sigma.log().sum() - 0.5 * math.log(2 * math.pi) * noise.numel()


def normal_kl(mean: Tensor, sigma: Tensor, prior: NormalTerms) -> Tensor:
    """Return the sum of KL(N(μ, σ²) ‖ N(m, s²)) over all weights, by dot products that read each operand once."""
    centered = mean if prior.loc is None else mean - prior.loc
    if isinstance(prior.scale, Tensor):
        centered, sigma = centered / prior.scale, sigma / prior.scale
        squares, log_scale = torch.dot(centered, centered) + torch.dot(sigma, sigma), 0.0
    else:
        squares = (torch.dot(centered, centered) + torch.dot(sigma, sigma)) / prior.scale**2
        log_scale = math.log(prior.scale)
    return 0.5 * squares - torch.log(sigma).sum() + mean.numel() * (log_scale - 0.5)


def mean_kl(mean: Tensor, prior: NormalTerms) -> Tensor:
    """Return the part of `normal_kl` that depends on the means: Σ ½(μ-m)²/s²."""
    centered = mean if prior.loc is None else mean - prior.loc
    if isinstance(prior.scale, Tensor):
        return 0.5 * torch.linalg.vector_norm(centered / prior.scale).square()
    return 0.5 * (torch.linalg.vector_norm(centered) / prior.scale).square()


def _kl_slopes(
    mean: Tensor, sigma: Tensor, loc: Tensor | None, scales: Tensor | None, scale: float, grad_kl: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of grad_kl·KL with respect to μ and σ, up to a common factor, and that factor."""
    centered = mean if loc is None else mean - loc
    one = mean.new_ones(())
    if scales is None:
        return centered, torch.addcdiv(sigma, one, sigma, value=-(scale**2)), grad_kl / scale**2
    return centered / scales.square(), sigma / scales.square() - one / sigma, grad_kl


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
        # The fused kernels do not make noise by position, which only parts of vectors need.
        ctx.scale, ctx.with_kl, ctx.fused = scale, with_kl, kernels.usable(mean) and key.numel() == 2
        ctx.key = key if kernels.usable(mean) else None
        ctx.set_materialize_grads(False)  # a KL that is only reported has no gradient
        if ctx.fused:
            ctx.save_for_backward(mean, rho, loc, scales, key)
            return kernels.ops.draw_forward(mean, rho, key, loc, scales, scale, with_kl)
        sigma = F.softplus(rho)
        epsilon = noise.normal(mean, key)
        weights = torch.addcmul(mean, sigma, epsilon)
        # A CPU stores the noise: recomputing it costs more time than the memory is worth.
        stored = epsilon if ctx.key is None else None
        ctx.save_for_backward(mean, rho, loc, scales, stored, sigma if with_kl else None)
        terms = NormalTerms(loc, scale if scales is None else scales)
        return weights, normal_kl(mean, sigma, terms) if with_kl else mean.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_kl: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, rho, loc, scales, *rest = ctx.saved_tensors
        grad = torch.zeros_like(mean) if grad is None else grad
        grad_kl = grad_kl if ctx.with_kl else None
        if ctx.fused:
            grad, key = grad.contiguous(), rest[0]
            if grad_kl is None:
                return grad, kernels.ops.scale_backward(grad, rho, key), None, None, None, None, None
            gradients = kernels.ops.draw_backward(grad, grad_kl, mean, rho, key, loc, scales, ctx.scale)
            return *gradients, None, None, None, None, None
        epsilon, sigma = rest
        epsilon = noise.normal(mean, ctx.key) if epsilon is None else epsilon
        grad_mean, grad_sigma = grad, grad * epsilon
        if grad_kl is not None:
            slope_mean, slope_sigma, factor = _kl_slopes(mean, sigma, loc, scales, ctx.scale, grad_kl)
            grad_mean = torch.addcmul(grad, slope_mean, factor)
            grad_sigma = grad_sigma.addcmul_(slope_sigma, factor)
        grad_rho = torch.ops.aten.softplus_backward(grad_sigma, rho, 1, 20)
        return grad_mean, grad_rho, None, None, None, None, None


def draw(mean: Tensor, rho: Tensor, key: Tensor) -> Tensor:
    """Return the sample μ + softplus(ρ)·ε(key)."""
    if noise.in_transform():
        return torch.addcmul(mean, F.softplus(rho), noise.normal(mean, key))
    return _Draw.apply(mean, rho, key, None, None, 1.0, False)[0]


def natural_step_(
    mean: Tensor,
    rho: Tensor,
    momentum: Tensor,
    grad: Tensor,
    grad_rho: Tensor,
    prior: NormalTerms,
    *,
    rate: Tensor,
    count: Tensor,
    beta: float,
    gap: float,
    precision: float,
    weight: float,
) -> None:
    """Take one natural-gradient step of N(μ, σ²) in place, with σ = softplus(ρ).

    With the loss L, its weight λ and the prior N(m, s²),
        r  = λσ·∂L/∂σ + σ²/s² - 1                  the gradient of λL + KL with respect to log σ
        σ² ← σ² / (1 + γr + ½γ²r²)                 which stays positive
        v  ← βv + (1-β)·∂L/∂μ
        μ  ← μ - α·(σ²/σ₀²)·(v/(1-βᵗ) + (μ-m)/(λs²)).

    Args:
        mean: μ.
        rho: ρ.
        momentum: v.
        grad: The gradient of L with respect to μ.
        grad_rho: The gradient of L with respect to ρ.
        prior: The prior.
        rate: α, a scalar tensor.
        count: t, the number of this step from 1, a scalar tensor.
        beta: β.
        gap: γ.
        precision: 1/σ₀² - 1/s².
        weight: λ.
    """
    loc, (scales, scale) = prior.loc, _scales(prior)
    if kernels.usable(mean):
        kernels.ops.natural_step(
            mean, rho, momentum, grad.contiguous(), grad_rho.contiguous(), loc, scales, scale, rate, count,
            beta, gap, precision, weight,
        )  # fmt: skip
        return
    inverse = 1 / scale**2 if scales is None else scales.square().reciprocal()
    sigma = F.softplus(rho)
    # ∂L/∂σ is grad_rho / sigmoid(ρ), and sigmoid(ρ) = 1 - exp(-σ).
    slope = torch.addcmul(sigma.square().mul_(inverse).sub_(1), sigma, grad_rho / -torch.expm1(-sigma), value=weight)
    sigma.mul_(slope.mul(0.5 * gap).add_(1).mul_(slope).mul_(gap).add_(1).rsqrt_())
    rho.copy_(inverse_softplus(sigma))
    momentum.lerp_(grad, 1 - beta)
    direction = (mean if loc is None else mean - loc) * (inverse / weight)
    direction.add_(momentum / (1 - beta**count))
    mean.sub_(direction.mul_(sigma.square_().mul_(inverse + precision)).mul_(rate))


def reusable_std(rho: Tensor) -> Tensor | None:
    """Return softplus(ρ) for several calls of `draw`, or None if a kernel computes it in each call."""
    return None if kernels.usable(rho) else F.softplus(rho)


def draw_and_kl(mean: Tensor, rho: Tensor, key: Tensor, prior: NormalTerms) -> tuple[Tensor, Tensor]:
    """Return a sample and the exact KL to a Gaussian prior, in one pass over the weights."""
    if noise.in_transform():
        sigma = F.softplus(rho)
        return torch.addcmul(mean, sigma, noise.normal(mean, key)), normal_kl(mean, sigma, prior)
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
    """Return the variance softplus(ρ)² and the exact KL to a Gaussian prior."""
    if noise.in_transform():
        sigma = F.softplus(rho)
        return sigma.square(), normal_kl(mean, sigma, prior)
    return _VarianceAndKL.apply(mean, rho, prior.loc, *_scales(prior))


class _Reparameterize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor, key: Tensor, stream: int) -> Tensor:
        ctx.stream, ctx.fused = stream, kernels.usable(loc)
        if ctx.fused:
            ctx.save_for_backward(variance, key)
            return kernels.ops.reparameterize_forward(loc, variance, key, stream)
        std, epsilon = variance.clamp_min(0).sqrt(), noise.normal(loc, key, stream)
        ctx.save_for_backward(std, epsilon)
        return torch.addcmul(loc, std, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.fused:
            variance, key = ctx.saved_tensors
            grad = _match(grad, variance)
            return grad, kernels.ops.reparameterize_backward(grad, variance, key, ctx.stream), None, None
        std, epsilon = ctx.saved_tensors
        # The slope of √v is infinite at 0; a variance of exactly 0 means that no noise reaches this value.
        return grad, torch.where(std > 0, 0.5 * grad * epsilon / std, 0.0), None, None


def _match(tensor: Tensor, like: Tensor) -> Tensor:
    """Give `tensor` the strides of `like`, so that both can be read as flat memory."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def reparameterize(loc: Tensor, variance: Tensor, key: Tensor, stream: int = 0) -> Tensor:
    """Return the sample loc + √variance·ε(key, stream), with a finite gradient if the variance is 0."""
    if noise.in_transform():
        positive = variance > 0
        std = torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
        return torch.addcmul(loc, std, noise.normal(loc, key, stream))
    if kernels.usable(loc):
        loc = loc if _is_dense(loc) else loc.contiguous()
        variance = _match(variance, loc)
    return _Reparameterize.apply(loc, variance, key, stream)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
