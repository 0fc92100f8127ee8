"""Weights that are mostly zero: on a CPU, layers multiply by them with sparse kernels where these are faster.

A `SparseWeight` stands in a network in the place of a tensor and answers `F.linear` and the convolutions; every other
function gets the dense tensor. Which way a layer takes is measured when it first meets a batch of some size.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.layout import Slot
from leanbayes.sparsity.blocks import Blocks
from leanbayes.tensor_like import TensorLike

DENSEST = 0.1  # above this density sparse kernels never pay
SMALLEST = 4096  # below this many weights a layer takes no time either way
ROUNDS = 5  # of each way, when they are compared
CLEARLY = 0.8  # of the dense time that a sparse product may take at most: a busy machine misleads by less
_DTYPES = (torch.float32, torch.float64)  # of which torch has sparse products on a CPU
Product = Callable[[Tensor], Tensor]  # an input times a weight


class Rows(NamedTuple):
    """A pattern as a matrix (outputs, inputs) in compressed rows, of single weights or of blocks."""

    starts: Tensor
    columns: Tensor
    width: int
    order: Tensor  # from that of memory to that of rows
    block: tuple[int, int]


class Pattern:
    """Where one parameter is not zero."""

    def __init__(self, positions: Tensor, slot: Slot, block: tuple[int, int] = (1, 1)) -> None:
        """Take positions in the memory of the slot, which may order its dimensions differently, in whole blocks."""
        self.positions, self.slot, self.block = positions.long(), slot, Blocks(slot, block).shape
        self.chosen: dict[Any, bool] = {}  # by the kind of call, whether the sparse way was faster

    @property
    def suits(self) -> bool:
        """Whether this is a large matrix or kernel with few weights."""
        size = self.slot.numel
        return len(self.slot.shape) >= 2 and size >= SMALLEST and len(self.positions) <= DENSEST * size

    @cached_property
    def rows(self) -> Rows:
        """The matrix, but for its values."""
        slot = self.slot
        in_memory = torch.unravel_index(self.positions, [slot.shape[dim] for dim in slot.order])
        row, *rest = [in_memory[slot.order.index(dim)] for dim in range(len(slot.shape))]
        column = torch.zeros_like(row)
        for size, along in zip(slot.shape[1:], rest, strict=True):
            column = column * size + along
        width = math.prod(slot.shape[1:])
        # The kernels take square blocks; and windows take the inputs of a block apart.
        whole = width == slot.shape[1] and self.block[0] == self.block[1]
        high, wide = self.block if whole else (1, 1)
        across = width // wide
        place = (row // high * across + column // wide) * high * wide + row % high * wide + column % wide
        order = torch.argsort(place)
        first = order[:: high * wide]  # of each block
        starts = F.pad(torch.bincount(row[first] // high, minlength=slot.shape[0] // high).cumsum(0), (1, 0))
        columns = column[first] // wide
        return Rows(starts.to(torch.int32), columns.to(torch.int32), width, order, (high, wide))

    def matrix(self, values: Tensor) -> Tensor:
        """Return the sparse matrix with these values, given in the order of memory."""
        starts, columns, width, order, block = self.rows
        size, values = (self.slot.shape[0], width), values[order]
        _warn_no_more()
        if block == (1, 1):
            return torch.sparse_csr_tensor(starts, columns, values, size, check_invariants=False)
        return torch.sparse_bsr_tensor(starts, columns, values.view(-1, *block), size, check_invariants=False)

    def dense(self, values: Tensor) -> Tensor:
        """Return the parameter with these values."""
        slot = self.slot
        flat = values.new_zeros(slot.numel).index_copy_(0, self.positions, values)
        in_memory = flat.view([slot.shape[dim] for dim in slot.order])
        return in_memory.permute([slot.order.index(dim) for dim in range(len(slot.order))])

    def pays(self, call: Any, values: Tensor, sparse: Product, dense: Product) -> bool:
        """Whether the sparse way is clearly faster for calls of a kind; found out once, by timing both.

        Each draw of the weights makes a matrix, or a dense tensor, that is used once: its making is part of the time.
        """
        if call not in self.chosen:
            taken = _fastest(lambda: sparse(self.matrix(values)))
            self.chosen[call] = taken < CLEARLY * _fastest(lambda: dense(self.dense(values)))
        return self.chosen[call]


@cache
def _warn_no_more() -> None:
    """Let torch say once, unheard, that its compressed tensors are in beta state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float32, check_invariants=False)


def _fastest(run: Callable[[], Tensor]) -> float:
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


class SparseWeight(TensorLike):
    """The values of a parameter at the places of a pattern, and zero elsewhere."""

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

    # What a layer or the model asks before it multiplies needs no dense tensor.
    shape = property(lambda self: torch.Size(self.pattern.slot.shape))
    dtype = property(lambda self: self.values.dtype)
    device = property(lambda self: self.values.device)
    ndim = property(lambda self: len(self.pattern.slot.shape))
    requires_grad = property(lambda self: False)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.pattern.slot.shape)

    def size(self, dim: int | None = None) -> Any:
        """Shape, as for a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the values to another dtype; anything else goes by the dense tensor."""
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
        answer = _FUNCTIONS.get(func)
        if answer is not None and isinstance(args[0], Tensor) and len(args) > 1 and isinstance(args[1], cls):
            result = answer(*args, **kwargs)
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
    """Return W·x + b, or None where the dense product is faster."""
    x = input.reshape(-1, input.shape[-1])
    if not _can(x, weight):
        return None

    def sparse(matrix: Tensor) -> Tensor:
        return (matrix @ x.T).T.contiguous()

    if not weight.pattern.pays((x.dtype, _size(len(x))), weight.values, sparse, partial(F.linear, x)):
        return None
    y = sparse(weight.matrix).reshape(*input.shape[:-1], -1)
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
    """Return a convolution as a product of the kernel with the windows, or None where the dense one is faster."""
    dims = weight.dim() - 2
    if groups != 1 or isinstance(padding, str) or dims > 2 or input.dim() != dims + 2 or not _can(input, weight):
        return None
    window = weight.shape[2:]
    stride, padding, dilation = (_each(setting, dims) for setting in (stride, padding, dilation))
    call = (input.dtype, _size(len(input)), *input.shape[2:], stride, padding, dilation)
    if weight.pattern.chosen.get(call) is False:
        return None
    sizes = [
        (size + 2 * pad - dil * (taps - 1) - 1) // step + 1
        for size, pad, dil, taps, step in zip(input.shape[2:], padding, dilation, window, stride, strict=True)
    ]

    def sparse(matrix: Tensor) -> Tensor:
        if set(window) == {1} and not any(padding):
            x = input[(slice(None), slice(None), *(slice(None, None, step) for step in stride))]
        else:
            x = input if dims == 2 else input.unsqueeze(-2)
            ahead = (1,) * (2 - dims)
            x = F.unfold(x, ahead + window, ahead + dilation, (0,) * (2 - dims) + padding, ahead + stride)
        y = matrix @ x.transpose(0, 1).flatten(1)
        return y.view(-1, len(input), *sizes).transpose(0, 1).contiguous()

    def dense(kernel: Tensor) -> Tensor:
        return _DENSE_CONVOLUTIONS[dims](input, kernel, None, stride, padding, dilation)

    if not weight.pattern.pays(call, weight.values, sparse, dense):
        return None
    y = sparse(weight.matrix)
    return y if bias is None else y + bias.view(-1, *[1] * dims)


def _can(x: Tensor, weight: SparseWeight) -> bool:
    """Whether there is a choice. Nothing is measured while somebody counts operations: that would count them too."""
    counted = torch._C._len_torch_dispatch_stack() > 0
    plain = x.device.type == "cpu" and x.dtype == weight.dtype in _DTYPES and not torch.is_autocast_enabled("cpu")
    return plain and len(x) > 0 and not counted


def _size(rows: int) -> int:
    """Batches of about one size are of one kind: the number of bits."""
    return rows.bit_length()


def _each(setting: Any, dims: int) -> tuple[int, ...]:
    return (setting,) * dims if isinstance(setting, int) else tuple(setting) * (dims if len(setting) == 1 else 1)


_DENSE_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d}
_FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {F.linear: _linear, F.conv1d: _conv, F.conv2d: _conv}
