"""Sparse weights: on a CPU, layers multiply by them with sparse kernels where these are usually faster.

A `SparseWeight` replaces a tensor in the network. It handles `F.linear` and convolutions; all other functions get the
dense tensor. Sizes and density alone decide on the kernel, so a model predicts the same bits each time it is loaded:
`benchmarks/sparse_inference.py` measures how good this rule is.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core.layout import Slot
from leanbayes.core.tensor_like import TensorLike
from leanbayes.posteriors.subspace.blocks import Blocks

# The rule was measured at densities of 2, 5 and 10 %: it is as fast as the faster kernel to within a few percent.
DENSITY, WEIGHTS = 1 / 16, 1 << 15  # matrices with at least so many weights and at most this density are sparse
LARGE_DENSITY, LARGE_WEIGHTS = 1 / 8, 1 << 20  # large matrices also up to this density
WINDOW_WEIGHTS, WINDOW_COLUMNS = 1 << 19, 256  # convolutions with windows: unfolding many columns is slow
_DTYPES = (torch.float32, torch.float64)  # with sparse products in torch on a CPU


class Rows(NamedTuple):
    """A pattern as a matrix (outputs, inputs) in compressed rows, of single weights or of blocks."""

    starts: Tensor
    columns: Tensor
    width: int
    order: Tensor  # from the order in memory to the order of rows
    block: tuple[int, int]


class Pattern:
    """The nonzero positions of one parameter."""

    def __init__(self, positions: Tensor, slot: Slot, block: tuple[int, int] = (1, 1)) -> None:
        """Take positions in the memory order of the slot, in whole blocks."""
        self.positions, self.slot, self.block = positions.long(), slot, Blocks(slot, block).shape

    @property
    def suits(self) -> bool:
        """Whether this is a large matrix or convolution kernel with few nonzero weights."""
        return len(self.slot.shape) >= 2 and self.pays(1)

    def pays(self, columns: int) -> bool:
        """Whether the sparse kernel is used for an input of so many columns: examples times pixels of the output.

        The rule counts the time for building the matrix or the dense tensor, since each sample of the weights is used
        once. It reads no clock.
        """
        size, active = self.slot.numel, len(self.positions)
        if math.prod(self.slot.shape[2:]) > 1:
            return size >= WINDOW_WEIGHTS and active <= DENSITY * size and columns <= WINDOW_COLUMNS
        return (size >= WEIGHTS and active <= DENSITY * size) or (
            size >= LARGE_WEIGHTS and active <= LARGE_DENSITY * size
        )

    @cached_property
    def rows(self) -> Rows:
        """The sparsity structure of the matrix."""
        slot = self.slot
        in_memory = torch.unravel_index(self.positions, [slot.shape[dim] for dim in slot.order])
        row, *rest = [in_memory[slot.order.index(dim)] for dim in range(len(slot.shape))]
        column = torch.zeros_like(row)
        for size, along in zip(slot.shape[1:], rest, strict=True):
            column = column * size + along
        width = math.prod(slot.shape[1:])
        # Kernels need square blocks, and the windows of a convolution separate the inputs of a block.
        whole = width == slot.shape[1] and self.block[0] == self.block[1]
        high, wide = self.block if whole else (1, 1)
        across = width // wide
        place = (row // high * across + column // wide) * high * wide + row % high * wide + column % wide
        order = torch.argsort(place)
        first = order[:: high * wide]  # the first weight of each block
        starts = F.pad(torch.bincount(row[first] // high, minlength=slot.shape[0] // high).cumsum(0), (1, 0))
        columns = column[first] // wide
        return Rows(starts.to(torch.int32), columns.to(torch.int32), width, order, (high, wide))

    def matrix(self, values: Tensor) -> Tensor:
        """Return the sparse matrix with these values, given in memory order."""
        starts, columns, width, order, block = self.rows
        size, values = (self.slot.shape[0], width), values[order]
        _silence_beta_warning()
        if block == (1, 1):
            return torch.sparse_csr_tensor(starts, columns, values, size, check_invariants=False)
        return torch.sparse_bsr_tensor(starts, columns, values.view(-1, *block), size, check_invariants=False)

    def dense(self, values: Tensor) -> Tensor:
        """Return the dense parameter with these values."""
        slot = self.slot
        flat = values.new_zeros(slot.numel).index_copy_(0, self.positions, values)
        in_memory = flat.view([slot.shape[dim] for dim in slot.order])
        return in_memory.permute([slot.order.index(dim) for dim in range(len(slot.order))])


@cache
def _silence_beta_warning() -> None:
    """Trigger and suppress the warning of torch that compressed tensors are in beta, which it raises once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float32, check_invariants=False)


class SparseWeight(TensorLike):
    """A parameter with values at the positions of a pattern, and zeros elsewhere."""

    def __init__(self, pattern: Pattern, values: Tensor) -> None:
        self.pattern, self.values = pattern, values
        self._loc: Tensor | None = None
        self._matrix: Tensor | None = None

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        """The dense tensor."""
        if self._loc is None:
            self._loc = self.pattern.dense(self.values)
        return self._loc

    @property
    def matrix(self) -> Tensor:
        """The sparse matrix (outputs, inputs)."""
        if self._matrix is None:
            self._matrix = self.pattern.matrix(self.values)
        return self._matrix

    # Layers and the model read these before they multiply; the dense tensor is not needed for them.
    shape = property(lambda self: torch.Size(self.pattern.slot.shape))
    dtype = property(lambda self: self.values.dtype)
    device = property(lambda self: self.values.device)
    ndim = property(lambda self: len(self.pattern.slot.shape))
    requires_grad = property(lambda self: False)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.pattern.slot.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, as for a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the values to another dtype. Other conversions return a dense tensor."""
        if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
            return SparseWeight(self.pattern, self.values.to(args[0]))
        return self.loc.to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Tensor:
        return self.loc[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loc, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        handler = _FUNCTIONS.get(func)
        if handler is not None and isinstance(args[0], Tensor) and len(args) > 1 and isinstance(args[1], cls):
            result = handler(*args, **kwargs)
            if result is not None:
                return result
        args = [_dense(value) for value in args]
        return func(*args, **{name: _dense(value) for name, value in kwargs.items()})


def _dense(value: Any) -> Any:
    if isinstance(value, SparseWeight):
        return value.loc
    if isinstance(value, (list, tuple)):
        return type(value)(_dense(part) for part in value)
    return value


def _linear(input: Tensor, weight: SparseWeight, bias: Tensor | None = None) -> Tensor | None:
    """Return W·x + b, or None for a dense product."""
    x = input.reshape(-1, input.shape[-1])
    if not _can_choose(x, weight) or not weight.pattern.pays(len(x)):
        return None
    y = (weight.matrix @ x.T).T.contiguous().reshape(*input.shape[:-1], -1)
    return y if bias is None else y + bias


def _conv(
    input: Tensor,
    weight: SparseWeight,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return a convolution as a product of the kernel with unfolded windows, or None for a dense one."""
    dims = weight.dim() - 2
    if groups != 1 or isinstance(padding, str) or dims > 2 or input.dim() != dims + 2 or not _can_choose(input, weight):
        return None
    window = weight.shape[2:]
    stride, padding, dilation = (_each(setting, dims) for setting in (stride, padding, dilation))
    sizes = [
        (size + 2 * pad - dil * (taps - 1) - 1) // step + 1
        for size, pad, dil, taps, step in zip(input.shape[2:], padding, dilation, window, stride, strict=True)
    ]
    if not weight.pattern.pays(len(input) * math.prod(sizes)):
        return None
    if set(window) == {1} and not any(padding):
        x = input[(slice(None), slice(None), *(slice(None, None, step) for step in stride))]
    else:
        x = input if dims == 2 else input.unsqueeze(-2)
        ahead = (1,) * (2 - dims)
        x = F.unfold(x, ahead + window, ahead + dilation, (0,) * (2 - dims) + padding, ahead + stride)
    y = (weight.matrix @ x.transpose(0, 1).flatten(1)).view(-1, len(input), *sizes).transpose(0, 1).contiguous()
    return y if bias is None else y + bias.view(-1, *[1] * dims)


def _can_choose(x: Tensor, weight: SparseWeight) -> bool:
    """Whether the sparse kernel can be used. While operations are counted, they are dense: counters know only those."""
    counted = torch._C._len_torch_dispatch_stack() > 0
    plain = x.device.type == "cpu" and x.dtype == weight.dtype in _DTYPES and not torch.is_autocast_enabled("cpu")
    return plain and len(x) > 0 and not counted


def _each(setting: Any, dims: int) -> tuple[int, ...]:
    return (setting,) * dims if isinstance(setting, int) else tuple(setting) * (dims if len(setting) == 1 else 1)


_FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {F.linear: _linear, F.conv1d: _conv, F.conv2d: _conv}
