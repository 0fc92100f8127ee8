"""`covariance`: mean and full covariance in one pass (VDP, Dera et al. 2019), the baseline for `moments`.

A vector (B, n) carries its covariance (B, n, n). A feature map (B, C, H, W) carries that of the pixels of each channel,
(B, C, HW, HW), and its channels count as independent. Memory grows with the fourth power of an image's side, so this
is for networks of the size of LeNet.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.noise import NoiseSource
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule
from leanbayes.rules.moments.registry import name_of, named
from leanbayes.rules.moments.value import Moments, variance_dtype
from leanbayes.rules.weights import LinearUse, RandomWeight
from leanbayes.tensor_like import TensorLike

GIB = 2**30
LIMIT = 8 * GIB  # bytes that one covariance may take

Pair = tuple[int, int]
_FORMULAS: dict[Callable[..., Any], Callable[..., Any]] = {}


def _formula(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(formula: Callable[..., Any]) -> Callable[..., Any]:
        _FORMULAS.update(dict.fromkeys(functions, formula))
        return formula

    return register


def _unsupported(operation: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"The rule 'covariance' has no formula for {operation}: it is a baseline for networks of the size of LeNet, "
        'so use bnn.using("moments") for this one.'
    )


def _check_memory(shape: Sequence[int], dtype: torch.dtype) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    if size > LIMIT:
        raise LeanBayesError(
            f"The rule 'covariance' would need {size / GIB:,.1f} GiB for a covariance of shape {tuple(shape)}, "
            f'more than {LIMIT / GIB:.0f} GiB: use bnn.using("moments"), smaller batches or a smaller network.'
        )


class Covariances(TensorLike):
    """A Gaussian value, tensor-like: vectors with their covariance, or maps with the covariance of each channel."""

    def __init__(self, loc: Tensor, covariance: Tensor) -> None:
        expected = covariance_shape(loc.shape)
        if tuple(covariance.shape) != expected:
            raise LeanBayesError(
                f"A value of shape {tuple(loc.shape)} needs a covariance of shape {expected}, "
                f"not {tuple(covariance.shape)}."
            )
        self.loc, self.covariance = loc, covariance

    @property
    def variance(self) -> Tensor:
        """The variance of each element, in the shape of `loc`."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).reshape(self.loc.shape).clamp_min(0)

    def moments(self) -> Moments:
        """Forget the covariance between elements."""
        return Moments(self.loc, self.variance)

    def assign(self, other: "Covariances") -> Self:
        """Become another value, as in-place functions do."""
        self.loc, self.covariance = other.loc, other.covariance
        return self

    def __repr__(self) -> str:
        return f"Covariances(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _FORMULAS:
            raise _unsupported(name_of(func))
        return _FORMULAS[func](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.__torch_function__(method, (), (self, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    return lambda self, *args: self.__torch_function__(method, (), (self, *args))


# Python looks these up in the class, not through __getattr__.
for _name in (
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __neg__ __matmul__ "
    "__rmatmul__ __getitem__"
).split():
    setattr(Covariances, _name, _operator(_name))


def covariance_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the covariance of a value: (B, n, n) for vectors, (B, C, HW, HW) for maps."""
    if len(shape) == 2:
        return (*shape, shape[1])
    if len(shape) == 4:
        return (*shape[:2], shape[2] * shape[3], shape[2] * shape[3])
    raise _unsupported(f"a value of shape {tuple(shape)} (only for vectors and images, in batches)")


# -- layers: y = W x + b, where the noise of W, b and x is independent -------------------------------------------------


class CovarianceWeight(RandomWeight):
    """A Gaussian weight; `spread` is its variance."""

    rule = "covariance"

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Refuse a function that has no formula here."""
        raise self._unsupported(name_of(function))

    def scaled(self, factor: Tensor | float) -> "CovarianceWeight":
        """Multiply by a constant."""
        return self.like(self.loc * factor, self.spread * factor**2)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.linear, F.conv2d):
            return _FORMULAS[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _unsupported(self, operation: str) -> UnsupportedOperation:
        return _unsupported(f"{operation} on the Bayesian weight {self.name!r}")


def _parts(x: Any) -> tuple[Any, Tensor | None]:
    """Mean and (co)variance of an argument; None for one without noise."""
    if isinstance(x, Covariances):
        return x.loc, x.covariance
    return (x.loc, x.spread) if isinstance(x, RandomWeight) else (x, None)


@_formula(F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Covariances:
    """Σ_y = W Σ Wᵀ + diag(Σ_j σ²_oj (m_j² + Σ_jj) + σ²_b)."""
    (m, covariance), (w, w_variance), (b, b_variance) = _parts(input), _parts(weight), _parts(bias)
    loc = F.linear(m, w, b)
    shape, dtype = covariance_shape(loc.shape), variance_dtype(loc.dtype)
    _check_memory(shape, dtype)
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


@_formula(F.conv2d)
def _conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Covariances:
    """Cov(p, p') = Σ_c w_c Σ_c w_cᵀ + Σ_{c,k} σ²[o,c,k] E[x_c(p+k) x_c(p'+k)] + σ²_b, as all pixels share W and b."""
    if groups != 1:
        raise _unsupported("conv2d with groups")
    (m, covariance), (w, w_variance), (b, b_variance) = _parts(input), _parts(weight), _parts(bias)
    loc = F.conv2d(m, w, b, stride, padding, dilation)
    shape, dtype = covariance_shape(loc.shape), variance_dtype(loc.dtype)
    _check_memory(shape, dtype)
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
    """Where a convolution looks."""

    def __init__(self, kernel: Pair, stride: Pair, dilation: Pair, padding: Any) -> None:
        self.kernel, self.stride, self.dilation = kernel, stride, dilation
        if padding == "same":
            totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
            sides = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = [(p, p) for p in _pair(0 if padding == "valid" else padding)]
        self.pads = (*sides[1], *sides[0])  # as F.pad counts them, the last dimension first

    def patches(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C·k, P): what each output pixel sees."""
        return F.unfold(F.pad(images, self.pads), self.kernel, self.dilation, 0, self.stride)

    def shifted_pairs(self, covariance: Tensor, size: Sequence[int]) -> Tensor:
        """(B, C, HW, HW) → (B, C·k, P·P): the covariance of what two output pixels see at the same place k."""
        batch, channels = covariance.shape[:2]
        padded = F.pad(covariance.reshape(batch, channels, *size, *size), self.pads * 2)
        (high, wide), (d, e), (s, t) = self.kernel, self.dilation, self.stride
        rows = [slice(i * d, padded.shape[2] - (high - 1 - i) * d, s) for i in range(high)]
        columns = [slice(j * e, padded.shape[3] - (wide - 1 - j) * e, t) for j in range(wide)]
        shifted = [padded[:, :, i, j, i, j] for i in rows for j in columns]
        _check_memory((len(shifted), *shifted[0].shape), covariance.dtype)
        return torch.stack(shifted, 2).reshape(batch, channels * high * wide, -1)


def _own_noise(m: Tensor, covariance: Tensor | None, variance: Tensor, window: _Window) -> Tensor:
    """Noise of the weights of a convolution: Σ_k σ²[o,k] (m_k(p) m_k(p') + Σ_k(p, p'))."""
    patches, variance = window.patches(m), variance.flatten(1)
    batch, pixels, channels = len(m), patches.shape[2], len(variance)
    scaled = (patches.mT[:, None] * variance[:, None]).reshape(batch, channels * pixels, -1)
    result = (scaled @ patches).reshape(batch, channels, pixels, pixels)
    if covariance is None:
        return result
    return result + (variance @ window.shifted_pairs(covariance, m.shape[2:])).view_as(result)


def _incoming_noise(covariance: Tensor, w: Tensor, size: Sequence[int], window: _Window) -> Tensor:
    """Noise of the inputs of a convolution: Σ_c K_oc Σ_c K_ocᵀ, where K_oc is one kernel as a matrix (P, HW)."""
    (batch, _, pixels, _), (outputs, inputs) = covariance.shape, w.shape[:2]
    impulses = torch.eye(pixels, dtype=w.dtype, device=w.device).reshape(pixels, 1, *size)
    seen = window.patches(impulses)  # (HW, k, P): dense products are faster than convolutions for such small maps
    _check_memory((outputs, inputs, batch, seen.shape[2], pixels), w.dtype)
    kernels = torch.einsum("ock,nkp->ocpn", w.flatten(2), seen)
    half = torch.einsum("ocpn,bcnm->ocbpm", kernels, covariance)
    return torch.einsum("ocbpm,ocqm->bopq", half, kernels)


# -- everything between layers -----------------------------------------------------------------------------------------


def _scaled(x: Covariances, loc: Tensor, slope: Tensor) -> Covariances:
    """Cov(s x) = s sᵀ ∘ Σ, for a slope of each element."""
    slope = slope.to(x.covariance.dtype).reshape(x.covariance.shape[:-1])
    return Covariances(loc, x.covariance * slope[..., None] * slope[..., None, :])


@_formula(*named("relu"))
def _relu(input: Covariances, inplace: bool = False) -> Covariances:
    """First-order Taylor: the slope at the mean."""
    result = _scaled(input, F.relu(input.loc), input.loc > 0)
    return input.assign(result) if inplace else result


@_formula(*named("relu_"))
def _relu_(input: Covariances) -> Covariances:
    return _relu(input, inplace=True)


@_formula(*named("max_pool2d"))
def _max_pool2d(
    input: Covariances,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Covariances:
    """Rows and columns of the pixels whose means win."""
    loc, winners = F.max_pool2d(input.loc, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True)
    winners = winners.flatten(2)
    rows = input.covariance.take_along_dim(winners[..., None], -2)
    return Covariances(loc, rows.take_along_dim(winners[..., None, :], -1))


def _average(function: Callable[..., Tensor], input: Covariances, *args: Any, **kwargs: Any) -> Covariances:
    """A Σ Aᵀ: average the rows of each channel's covariance, then the columns."""
    loc = function(input.loc, *args, **kwargs)
    covariance = input.covariance.flatten(0, 1)
    for _ in range(2):
        images = covariance.mT.reshape(*covariance.mT.shape[:2], *input.shape[2:])
        covariance = function(images, *args, **kwargs).flatten(2)
    return Covariances(loc, covariance.unflatten(0, input.shape[:2]))


@_formula(*named("avg_pool2d"))
def _avg_pool2d(input: Covariances, *args: Any, **kwargs: Any) -> Covariances:
    return _average(F.avg_pool2d, input, *args, **kwargs)


@_formula(*named("adaptive_avg_pool2d"))
def _adaptive_avg_pool2d(input: Covariances, output_size: Any) -> Covariances:
    return _average(F.adaptive_avg_pool2d, input, output_size)


def _reshaped(input: Covariances, loc: Tensor) -> Covariances:
    """Make vectors of maps: channels are independent, so the covariance is block-diagonal."""
    if loc.shape == input.shape:
        return Covariances(loc, input.covariance)
    if loc.dim() != 2 or len(loc) != len(input):
        raise _unsupported(f"a change of shape from {tuple(input.shape)} to {tuple(loc.shape)}")
    shape = covariance_shape(loc.shape)
    _check_memory(shape, input.covariance.dtype)
    same = torch.eye(input.shape[1], dtype=input.covariance.dtype, device=input.device)[:, None, :, None]
    return Covariances(loc, (input.covariance[:, :, :, None] * same).reshape(shape))


@_formula(*named("flatten"))
def _flatten(input: Covariances, *args: Any, **kwargs: Any) -> Covariances:
    return _reshaped(input, input.loc.flatten(*args, **kwargs))


@_formula(*named("reshape"))
def _reshape(input: Covariances, *shape: Any, **kwargs: Any) -> Covariances:
    return _reshaped(input, input.loc.reshape(*shape, **kwargs))


@_formula(*named("view"))
def _view(input: Covariances, *shape: Any) -> Covariances:
    return _reshaped(input, input.loc.view(*shape))


@_formula(F.batch_norm)
def _batch_norm(
    input: Covariances,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Covariances:
    """γ/s of each channel is a constant in evaluation mode."""
    if training or running_var is None:
        raise _unsupported("batch_norm with the statistics of a batch (bnn.eval() uses the running ones)")
    if isinstance(weight, RandomWeight) or isinstance(bias, RandomWeight):
        raise _unsupported("batch_norm with a Bayesian weight")
    loc = F.batch_norm(input.loc, running_mean, running_var, weight, bias, False, momentum, eps)
    slope = (running_var + eps).rsqrt() if weight is None else (running_var + eps).rsqrt() * weight
    return _scaled(input, loc, slope.reshape(-1, *[1] * (loc.dim() - 2)).expand(loc.shape))


@_formula(F.dropout, F.dropout2d)
def _dropout(input: Covariances, p: float = 0.5, training: bool = True, inplace: bool = False) -> Covariances:
    if training and p > 0:
        raise _unsupported("dropout in training mode (bnn.eval() turns it off)")
    return input


@_formula(*named("add", "__add__", "__radd__"))
def _add(input: Any, other: Any, *, alpha: float = 1) -> Covariances:
    """Add independent values, Σ_x + α² Σ_y, or a constant."""
    if isinstance(input, RandomWeight) or isinstance(other, RandomWeight):
        raise _unsupported("a sum with a Bayesian weight")
    (m, covariance), (n, other_covariance) = _parts(input), _parts(other)
    loc = torch.add(m, n, alpha=alpha)
    if any(part.shape != loc.shape for part in (input, other) if isinstance(part, Covariances)):
        raise _unsupported("a sum that spreads a value over more elements")
    if other_covariance is not None:
        other_covariance = alpha**2 * other_covariance
        covariance = other_covariance if covariance is None else covariance + other_covariance
    return Covariances(loc, covariance)  # type: ignore[arg-type] # one of the two has one


@_formula(*named("add_", "__iadd__"))
def _add_(input: Covariances, other: Any, *, alpha: float = 1) -> Covariances:
    return input.assign(_add(input, other, alpha=alpha))


class Covariance(Rule):
    """Full covariances instead of draws."""

    name = "covariance"
    random = False

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Give each layer the mean and variance of its weights."""
        layout, source = posterior.layout, NoiseSource(key)
        variance, kl = posterior.variance_and_kl(key) if with_kl else (posterior.variance(), None)
        means, variances = layout.split(posterior.mean()), layout.split(variance)
        parts = zip(means, variances, layout, posterior.random_slots(), strict=True)
        return [CovarianceWeight(m, v, source, slot.name) if random else m for m, v, slot, random in parts], kl
