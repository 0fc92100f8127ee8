"""Gradients of one layer with respect to its weight, separately for each example of a batch.

The output of most layers is a product with the weight at each position p (pixel, token), so the gradient of one example
is Σ_p δ[o, p] a[k, p]: `factors` gives δ and a. An embedding, and functions that users registered with
`linear_in_weight`, have their own formulas. Nothing here keeps batch × weights: callers pass a few examples at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from leanbayes.rules.random_weight import LinearUse

Factors = tuple[Tensor, Tensor]  # (examples, groups, outputs, positions) and (examples, groups, inputs, positions)
PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, torch.addmm, Tensor.addmm)
_CONVS = {getattr(F, f"conv{dims}d"): dims for dims in (1, 2, 3)}
_TRANSPOSED = {getattr(F, f"conv_transpose{dims}d"): dims for dims in (1, 2, 3)}
POSITIONS, WEIGHTS = 64, 2304  # the fewest positions, and the most weights per position, of grouped convolutions
CONVOLUTIONS = {**_CONVS, **_TRANSPOSED}  # each with its number of spatial dimensions


@dataclass(frozen=True)
class Examples:
    """A call of a layer for some examples.

    Attributes:
        function: The function, which is linear in its weight.
        use: Its arguments. Inputs are those of the whole batch.
        weight: The mean of the weight.
        inputs: The inputs by example: (examples, rows of each, ...); for an embedding the indices.
        delta: The gradient of the scalars with respect to the output, (examples, rows of each, ...).
    """

    function: Callable[..., Any]
    use: LinearUse
    weight: Tensor
    inputs: Sequence[Tensor]
    delta: Tensor

    @property
    def rows(self) -> int:
        """The number of examples; a symbol while a graph is traced for any number of them."""
        return self.delta.shape[0]

    def part(self, start: int, end: int) -> "Examples":
        """Return the call for some of the examples."""
        inputs = [x[start:end] for x in self.inputs]
        return Examples(self.function, self.use, self.weight, inputs, self.delta[start:end])

    def elements(self) -> int:
        """Return how many elements the gradient of one example needs, with the windows of a convolution."""
        windows = 0
        if self.function in CONVOLUTIONS and not self._groups_are_faster():
            small = self.delta if self.function in _CONVS else self.inputs[0]
            kernel = self.weight.shape[2:]
            channels = (self.inputs[0] if self.function in _CONVS else self.delta).shape[2]
            windows = small.shape[1] * math.prod(small.shape[3:]) * channels * math.prod(kernel)
        return self.weight.numel() + windows

    def squared(self, variance: Tensor) -> Tensor:
        """Return Σ_w σ_w² g_w² of each example, for a gradient g of this call only."""
        if self.function is F.embedding:
            return self._squared_lookup(variance)
        if self._groups_are_faster():
            return weighted_squares(self._by_groups(), variance)
        factors = self._factors()
        if factors is not None and factors[0].shape[-1] == 1:  # one position: g² is the product of both squares
            delta, a = (_single(part.squeeze(-1)).square() for part in factors)
            weighted = torch.einsum("ngk,gok->ngo", a, variance.reshape(a.shape[1], delta.shape[2], a.shape[2]))
            return (weighted * delta).sum((1, 2))
        gradients = self.gradients() if factors is None else _product(factors)
        return weighted_squares(gradients, variance)

    def gradients(self) -> Tensor:
        """Return the gradient of each example, (examples, *shape of the weight)."""
        if self.function is F.embedding:
            (index,), rows = self.inputs, len(self.weight)
            delta = _single(self.delta).reshape(self.rows, -1, self.weight.shape[1])
            offset = rows * torch.arange(self.rows, device=index.device).unsqueeze(1)
            flat = delta.new_zeros(self.rows * rows, delta.shape[2])
            flat.index_add_(0, (index.reshape(self.rows, -1) + offset).flatten(), delta.flatten(0, 1))
            return flat.view(self.rows, *self.weight.shape)
        if self._groups_are_faster():
            return self._by_groups()
        factors = self._factors()
        if factors is not None:
            return _product(factors).reshape(self.rows, *self.weight.shape)
        return torch.func.vmap(self._gradient)(tuple(self.inputs), self.delta)

    def _gradient(self, inputs: tuple[Tensor, ...], delta: Tensor) -> Tensor:
        def call(weight: Tensor) -> Tensor:
            return self.use.call(self.function, inputs, weight, bias=False)

        pullback: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(call, self.weight.to(delta.dtype))[1]
        return pullback(delta)[0]

    def _groups_are_faster(self) -> bool:
        """Whether oneDNN computes the gradients as one grouped convolution, in which each example is a group."""
        if self.function is not F.conv2d or self.delta.device.type != "cpu" or self.delta.shape[1] != 1:
            return False
        if isinstance(self.rows, torch.SymInt):  # then the number of groups would be unknown
            return False
        if self.delta.dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
            return False
        settings = _convolution_settings(self.use.arguments, self.weight.shape[2:])
        return settings.same and by_groups(math.prod(self.delta.shape[3:]), self.weight.shape)

    def _by_groups(self) -> Tensor:
        settings = _convolution_settings(self.use.arguments, self.weight.shape[2:])
        rows, shape = self.rows, self.weight.shape
        gradients = conv2d_weight(
            self.inputs[0].reshape(1, -1, *self.inputs[0].shape[3:]),
            (rows * shape[0], *shape[1:]),
            self.delta.reshape(1, -1, *self.delta.shape[3:]),
            settings.stride,
            [before for before, _ in settings.padding],
            settings.dilation,
            rows * self.use.arguments.get("groups", 1),
        )
        return gradients.view(rows, *shape)

    def _squared_lookup(self, variance: Tensor) -> Tensor:
        """Add the gradients of positions with the same index before squaring, without a gradient of all rows."""
        index = self.inputs[0].reshape(self.rows, -1)
        delta = _single(self.delta).reshape(*index.shape, -1)
        same = (index.unsqueeze(1) == index.unsqueeze(2)).to(delta.dtype)
        return (variance[index] * delta * (same @ delta)).sum((1, 2))

    def _factors(self) -> Factors | None:
        function, delta = self.function, self.delta
        if function is F.linear:
            return _columns(delta), _columns(self.inputs[0])
        if function is F.bilinear:
            first, second = map(_columns, self.inputs)
            return _columns(delta), (first.unsqueeze(3) * second.unsqueeze(2)).flatten(2, 3)
        if function in PRODUCTS and self.weight.dim() == 2:
            return _columns(self.inputs[0]), _columns(delta)
        if function in CONVOLUTIONS:
            settings = _convolution_settings(self.use.arguments, self.weight.shape[2:])
            x, groups = self.inputs[0], self.use.arguments.get("groups", 1)
            if function in _CONVS:
                return _grouped(delta, groups), _grouped(_windows(x, settings), groups)
            windows = _windows(delta, settings)
            if windows.shape[-1] == math.prod(x.shape[3:]):
                return _grouped(x, groups), _grouped(windows, groups)
        return None


def by_groups(positions: int, weight: Sequence[int]) -> bool:
    """Whether a grouped convolution is faster than a product of windows, by the pixels of its output and its weight.

    It is not for kernels of one pixel, few pixels and many channels (`benchmarks/example_gradients.py`).
    """
    return math.prod(weight[2:]) > 1 and positions >= POSITIONS and math.prod(weight) <= WEIGHTS * positions


def weighted_squares(gradients: Tensor, variance: Tensor) -> Tensor:
    """Return Σ_w σ_w² g_w² of each example. It overwrites the gradients."""
    return _single(gradients).square_().flatten(1) @ variance.reshape(-1)


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _product(factors: Factors) -> Tensor:
    return factors[0] @ factors[1].mT


def _columns(x: Tensor) -> Tensor:
    """Return values (examples, ..., channels) as (examples, 1, channels, positions)."""
    return x.reshape(x.shape[0], 1, -1, x.shape[-1]).mT


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return values (examples, rows, channels, ...) as (examples, groups, channels of a group, positions)."""
    examples, rows, channels = x.shape[:3]
    x = x.reshape(examples, rows, groups, channels // groups, -1)
    return x[:, 0] if rows == 1 else x.permute(0, 2, 3, 1, 4).flatten(3)


@dataclass(frozen=True)
class _Convolution:
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def same(self) -> bool:
        """Whether the padding is the same on both sides."""
        return all(before == after for before, after in self.padding)


def _convolution_settings(arguments: dict[str, Any], kernel: Sequence[int]) -> _Convolution:
    def each(name: str, default: int) -> tuple[int, ...]:
        value = arguments.get(name, default)
        value = (value,) if isinstance(value, int) else tuple(value)
        return value * len(kernel) if len(value) == 1 else value

    stride, dilation = each("stride", 1), each("dilation", 1)
    if arguments.get("padding") == "same":
        totals = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        padding = [(total // 2, total - total // 2) for total in totals]
    elif arguments.get("padding") == "valid":
        padding = [(0, 0)] * len(kernel)
    else:
        padding = [(size, size) for size in each("padding", 0)]
    return _Convolution(tuple(kernel), stride, dilation, tuple(padding))


def _windows(x: Tensor, settings: _Convolution) -> Tensor:
    """Return the windows of (examples, rows, channels, ...) as (examples, rows, channels · kernel, positions)."""
    dims, padding = len(settings.kernel), (0,) * len(settings.kernel)
    if dims == 2 and settings.same:
        padding = tuple([before for before, _ in settings.padding])
    elif any(size for pair in settings.padding for size in pair):
        x = F.pad(x, [size for pair in reversed(settings.padding) for size in pair])
    if dims == 2:  # faster than the copy below
        columns = F.unfold(x.flatten(0, 1), settings.kernel, settings.dilation, padding, settings.stride)
        return columns.unflatten(0, x.shape[:2])
    for dim, (size, stride, dilation) in enumerate(
        zip(settings.kernel, settings.stride, settings.dilation, strict=True), 3
    ):
        x = x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    x = x.permute(0, 1, 2, *range(3 + dims, 3 + 2 * dims), *range(3, 3 + dims))
    return x.reshape(*x.shape[:2], -1, math.prod(x.shape[3 + dims :]))
