"""The cost of a computation on any device: its number of kernels, the bytes that they move, and its peak memory."""

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Operations that only allocate, or return metadata. (Views are recognized by their results.)
_FREE = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _efficientzerotensor "
    "_local_scalar_dense device is_contiguous is_pinned is_same_size layout record_stream size stride "
    "sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride "
    "_nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets "
    "_nested_get_ragged_idx _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides".split()
)
# Operations that write their first argument, or a tensor of its shape, without reading it.
_FIRST_UNREAD = frozenset(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ copy_ fill_ zero_ "
    "full_like ones_like rand_like randint_like randn_like zeros_like new_full new_ones new_zeros "
    "index_copy_ index_fill_ scatter_".split()
)
# Operations that read as many entries of their first argument as they return.
_LOOKUPS = frozenset("embedding gather index index_select take _unsafe_index".split())
# Operations whose schema says that they write the gradients; they do so only to unscale them.
_OPTIMIZERS = frozenset("_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_".split())


@dataclass(frozen=True)
class OpCost:
    """The cost of all calls of one operation."""

    bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True)
class Cost:
    """The cost of a computation, in total and by operation."""

    bytes: int
    kernels: int
    by_op: Mapping[str, OpCost]

    def __str__(self) -> str:
        """Return a table of the ten operations that move the most bytes."""
        ops = sorted(self.by_op.items(), key=lambda item: item[1].bytes, reverse=True)
        rows = [(name, cost.kernels, cost.bytes) for name, cost in ops[:10]]
        if rest := [cost for _, cost in ops[10:]]:
            rows.append((f"{len(rest)} others", sum(c.kernels for c in rest), sum(c.bytes for c in rest)))
        rows.append(("total", self.kernels, self.bytes))
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{'operation':<{width}}  {'kernels':>8}  {'bytes':>16}   share"]
        for name, kernels, size in rows:
            lines.append(f"{name:<{width}}  {kernels:>8,}  {size:>16,}  {size / max(self.bytes, 1):>6.1%}")
        return "\n".join(lines)


class Observer(TorchDispatchMode):
    """Calls `observe` for each operation that runs inside the block, including the backward pass."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode an operation arrives here before torch decomposes it. Operations of nested tensors are not
        # decomposed.
        nested = any_nested((args, kwargs))
        if not nested and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        result = func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        self.observe(func, dict(zip(names, args, strict=False)) | kwargs, result)
        return result

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        """Process an operation, given its arguments by name and its result."""
        raise NotImplementedError  # abstract


class CostCounter(Observer):
    """Counts the kernels that run inside the block, including the backward pass, and the bytes they read and write.

    An operation, also a custom one, reads each distinct region of memory among its inputs once and writes each of its
    outputs once, as a fused kernel does. Views, allocations and metadata cost nothing. Indexing reads and writes the
    entries that it uses. For a nested tensor its buffer counts. Scratch memory inside a kernel is not counted. A
    compiled function is counted as if it were not compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: dict[str, OpCost] = {}

    @property
    def bytes(self) -> int:
        return sum(cost.bytes for cost in self.by_op.values())

    @property
    def kernels(self) -> int:
        return sum(cost.kernels for cost in self.by_op.values())

    @property
    def cost(self) -> Cost:
        return Cost(self.bytes, self.kernels, dict(self.by_op))

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        if moved := _bytes_moved(func, arguments, result):
            name = str(func.overloadpacket)
            before = self.by_op.get(name, OpCost())
            self.by_op[name] = OpCost(before.bytes + moved, before.kernels + 1)


class PeakMemory(Observer):
    """Tracks the memory that is allocated inside the block: `live_bytes` now, and `peak_bytes` at most.

    Memory that was allocated before the block does not count, nor does scratch memory inside a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: set[int] = set()

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        # `torch.tensor(...)` allocates its memory unseen, and passes it to this operation.
        given = None if func is torch.ops.aten.lift_fresh.default else arguments
        old = {storage_of(tensor) for tensor in tensors_in(given)} | self._live
        for tensor in tensors_in(result):
            if storage_of(tensor) not in old:
                old.add(storage_of(tensor))
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.live_bytes -= size


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return all tensors in nested lists, tuples and dicts; for nested tensors their buffers."""
    return map(buffer_of, _leaves(value))


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def any_nested(value: Any) -> bool:
    """Whether nested lists, tuples and dicts contain a nested tensor."""
    return any(tensor.is_nested for tensor in _leaves(value))


def buffer_of(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the elements: for a nested tensor those of all its parts, one after the other."""
    return tensor.values() if tensor.is_nested else tensor


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of the memory of a tensor."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"The cost of tensors with layout {tensor.layout} is unknown: measure dense tensors.")
    return tensor.untyped_storage()._cdata


def _region(tensor: Tensor) -> tuple[Any, int]:
    """Return an identifier of the memory that a tensor covers, the same for all views of it, and its size in bytes."""
    if tensor.numel() == 0:
        return None, 0
    # Sort dimensions by stride, drop broadcast ones, and merge those that are contiguous.
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if dims and dims[-1][0] * dims[-1][1] == stride:
            dims[-1] = (dims[-1][0], dims[-1][1] * size)
        else:
            dims.append((stride, size))
    entries = math.prod(size for _, size in dims)
    extent = 1 + sum(stride * (size - 1) for stride, size in dims)  # less than the entries if windows overlap
    return (storage_of(tensor), tensor.storage_offset(), tuple(dims)), min(entries, extent) * tensor.element_size()


def _bytes_moved(func: OpOverload, bound: dict[str, Any], result: Any) -> int:
    """Return the bytes that one call reads and writes."""
    name = func.overloadpacket.__name__.removeprefix("_foreach_")
    if name in _FREE or torch.Tag.inplace_view in func.tags:
        return 0
    written = _written_arguments(func, name, bound)
    given = {storage_of(tensor) for tensor in tensors_in(bound)}
    results = list(tensors_in(result))
    new = [tensor for tensor in results if storage_of(tensor) not in given]
    if results and not new and not written:
        return 0  # a view, whether its schema says so or not
    writes = dict(map(_region, new))
    first = next(iter(bound), None)
    touched = _entries_touched(name, bound)
    reads: dict[Any, int] = {}
    for argument in func._schema.arguments:
        for region, size in map(_region, tensors_in(bound.get(argument.name))):
            if argument.name == first and touched is not None:
                size = min(size, touched * bound[argument.name].element_size())
            if argument.name in written:
                writes[region] = size
            if argument.is_out or (argument.name == first and _first_unread(name, bound)):
                continue
            if argument.name == first and name in _LOOKUPS:
                size = min(size, sum(writes.values()))
            reads[region] = size
    return sum(reads.values()) + sum(writes.values())


def _written_arguments(func: OpOverload, name: str, bound: dict[str, Any]) -> set[str]:
    """Return the names of the arguments that a call writes to, with corrections of known errors in schemas."""
    schema = func._schema.arguments
    written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write and a.name in bound}
    if name in _OPTIMIZERS and bound.get("grad_scale") is None:
        written.discard("grads")
    if name.endswith("batch_norm") and bound.get("training"):
        written |= {"running_mean", "running_var"}
    return written


def _first_unread(name: str, bound: dict[str, Any]) -> bool:
    """Whether a call does not read its first argument."""
    if name in ("index_put_", "_index_put_impl_"):
        return not bound.get("accumulate", False)
    return name in _FIRST_UNREAD and bound.get("reduce") is None


def _entries_touched(name: str, bound: dict[str, Any]) -> int | None:
    """Return how many entries of its first argument an indexed update uses at most, or None for other calls."""
    if name in ("index_put_", "_index_put_impl_"):
        used = [index for index in bound["indices"] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in used):
            return None  # a mask may select all
        points = math.prod(torch.broadcast_shapes(*(index.shape for index in used)))
        shape = bound["self"].shape
        kept = [i for i in range(len(shape)) if i >= len(bound["indices"]) or bound["indices"][i] is None]
        return points * math.prod(shape[i] for i in kept)
    if name in ("index_add_", "index_copy_", "index_fill_", "index_reduce_"):
        return bound["index"].numel() * bound["self"].numel() // max(bound["self"].shape[bound["dim"]], 1)
    if name in ("scatter_", "scatter_add_", "scatter_reduce_"):
        return bound["index"].numel()
    return None
