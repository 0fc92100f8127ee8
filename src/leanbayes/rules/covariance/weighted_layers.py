"""Layers under the rule `covariance`: y = W x + b, where the noise of W, b and x is independent."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.errors import UnsupportedOperation
from leanbayes.rules.covariance.covariances import (
    FORMULAS,
    Covariances,
    check_memory,
    covariance_shape,
    formula,
    unsupported,
)
from leanbayes.rules.moments.registry import name_of
from leanbayes.rules.moments.value import variance_dtype
from leanbayes.rules.random_weight import LinearUse, RandomWeight

Pair = tuple[int, int]


class CovarianceWeight(RandomWeight):
    """A Gaussian weight; `noise_part` is its variance."""

    rule = "covariance"

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Raise an error for a function without a formula."""
        raise self._unsupported(name_of(function))

    def scaled(self, factor: Tensor | float) -> "CovarianceWeight":
        """Multiply by a constant."""
        return self.like(self.loc * factor, self.noise_part * factor**2)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.linear, F.conv2d):
            return FORMULAS[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _unsupported(self, operation: str) -> UnsupportedOperation:
        return unsupported(f"{operation} on the Bayesian weight {self.name!r}")


def parts(x: Any) -> tuple[Any, Tensor | None]:
    """Return the mean and the (co)variance of an argument, or None for an argument without noise."""
    if isinstance(x, Covariances):
        return x.loc, x.covariance
    return (x.loc, x.noise_part) if isinstance(x, RandomWeight) else (x, None)


@formula(F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Covariances:
    """Σ_y = W Σ Wᵀ + diag(Σ_j σ²_oj (m_j² + Σ_jj) + σ²_b)."""
    (m, covariance), (w, w_variance), (b, b_variance) = parts(input), parts(weight), parts(bias)
    loc = F.linear(m, w, b)
    shape, dtype = covariance_shape(loc.shape), variance_dtype(loc.dtype)
    check_memory(shape, dtype)
    with torch.autocast(loc.device.type, enabled=False):
        own = loc.new_zeros(loc.shape, dtype=dtype)
        if w_variance is not None:
            power = m.to(dtype).square()
            if covariance is not None:
                power = power + covariance.diagonal(dim1=-2, dim2=-1)
            own = own + F.linear(power, w_variance.to(dtype))
        if b_variance is not None:
            own = own + b_variance.to(dtype)
        result = torch.diag_embed(own)
        if covariance is not None:
            w = w.to(dtype)
            result = result + w @ covariance @ w.mT
    return Covariances(loc, result)


@formula(F.conv2d)
def _conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Covariances:
    """Cov(p, p') = Σ_c w_c Σ_c w_cᵀ + Σ_{c,k} σ²[o,c,k] E[x_c(p+k) x_c(p'+k)] + σ²_b, as all pixels share W and b."""
    if groups != 1:
        raise unsupported("conv2d with groups")
    (m, covariance), (w, w_variance), (b, b_variance) = parts(input), parts(weight), parts(bias)
    loc = F.conv2d(m, w, b, stride, padding, dilation)
    shape, dtype = covariance_shape(loc.shape), variance_dtype(loc.dtype)
    check_memory(shape, dtype)
    window = _Window(_pair(w.shape[2:]), _pair(stride), _pair(dilation), padding)
    with torch.autocast(loc.device.type, enabled=False):
        terms = []
        if w_variance is not None:
            terms.append(_own_noise(m.to(dtype), covariance, w_variance.to(dtype), window))
        if b_variance is not None:
            terms.append(b_variance.to(dtype)[:, None, None].expand(shape))
        if covariance is not None:
            terms.append(_incoming_noise(covariance, w.to(dtype), m.shape[2:], window))
    return Covariances(loc, reduce(torch.add, terms))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


class _Window:
    """The geometry of a convolution."""

    def __init__(self, kernel: Pair, stride: Pair, dilation: Pair, padding: Any) -> None:
        self.kernel, self.stride, self.dilation = kernel, stride, dilation
        if padding == "same":
            totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            sides = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = [(p, p) for p in _pair(0 if padding == "valid" else padding)]
        self.pads = (*sides[1], *sides[0])  # in the order of F.pad: the last dimension first

    def patches(self, images: Tensor) -> Tensor:
        """Return the inputs of each output pixel: (B, C, H, W) → (B, C·k, P)."""
        return F.unfold(F.pad(images, self.pads), self.kernel, self.dilation, 0, self.stride)

    def shifted_pairs(self, covariance: Tensor, size: Sequence[int]) -> Tensor:
        """Return the covariance of the inputs of two output pixels at one tap k: (B, C, HW, HW) → (B, C·k, P·P)."""
        batch, channels = covariance.shape[:2]
        padded = F.pad(covariance.reshape(batch, channels, *size, *size), self.pads * 2)
        (high, wide), (d, e), (s, t) = self.kernel, self.dilation, self.stride
        rows = [slice(i * d, padded.shape[2] - (high - 1 - i) * d, s) for i in range(high)]
        columns = [slice(j * e, padded.shape[3] - (wide - 1 - j) * e, t) for j in range(wide)]
        shifted = [padded[:, :, i, j, i, j] for i in rows for j in columns]
        check_memory((len(shifted), *shifted[0].shape), covariance.dtype)
        return torch.stack(shifted, 2).reshape(batch, channels * high * wide, -1)


def _own_noise(m: Tensor, covariance: Tensor | None, variance: Tensor, window: _Window) -> Tensor:
    """Return the noise of the weights of a convolution: Σ_k σ²[o,k] (m_k(p) m_k(p') + Σ_k(p, p'))."""
    patches, variance = window.patches(m), variance.flatten(1)
    batch, pixels, channels = len(m), patches.shape[2], len(variance)
    scaled = (patches.mT[:, None] * variance[:, None]).reshape(batch, channels * pixels, -1)
    result = (scaled @ patches).reshape(batch, channels, pixels, pixels)
    if covariance is None:
        return result
    return result + (variance @ window.shifted_pairs(covariance, m.shape[2:])).view_as(result)


def _incoming_noise(covariance: Tensor, w: Tensor, size: Sequence[int], window: _Window) -> Tensor:
    """Return the noise of the inputs of a convolution: Σ_c K_oc Σ_c K_ocᵀ, with K_oc one kernel as a matrix (P, HW)."""
    (batch, _, pixels, _), (outputs, inputs) = covariance.shape, w.shape[:2]
    impulses = torch.eye(pixels, dtype=w.dtype, device=w.device).reshape(pixels, 1, *size)
    patches = window.patches(impulses)  # (HW, k, P): dense products are faster than convolutions for such small maps
    check_memory((outputs, inputs, batch, patches.shape[2], pixels), w.dtype)
    kernels = torch.einsum("ock,nkp->ocpn", w.flatten(2), patches)
    half = torch.einsum("ocpn,bcnm->ocbpm", kernels, covariance)
    return torch.einsum("ocbpm,ocqm->bopq", half, kernels)
