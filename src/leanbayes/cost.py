"""What a computation costs, on any device: the bytes its kernels move, how many, and its peak memory."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Allocate, or answer from what the host knows of a tensor. (Views are told by what they return.)
_FREE = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _efficientzerotensor "
    "_local_scalar_dense device is_contiguous is_pinned is_same_size layout record_stream size stride "
    "sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride "
    "_nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets "
    "_nested_get_ragged_idx _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides".split()
)
# Write their first argument, or something of its shape, without reading it.
_FIRST_UNREAD = frozenset(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ copy_ fill_ zero_ "
    "full_like ones_like rand_like randint_like randn_like zeros_like new_full new_ones new_zeros "
    "index_copy_ index_fill_ scatter_".split()
)
# Read as many entries of their first argument as they return.
_LOOKUPS = frozenset("embedding gather index index_select take _unsafe_index".split())
# Annotated as if they wrote the gradients, which they do only to unscale them.
_OPTIMISERS = frozenset("_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_".split())


@dataclass(frozen=True)
class OpCost:
    """What all calls of one operation cost."""

    bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True)
class Cost:
    """What a computation cost, in all and by operation."""

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
    """Shows each operation run inside the block, backward too, to `observe`."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode an operation arrives here before torch has cut it into those that do the work. For nested
        # tensors it does not: they have operations of their own.
        nested = any_nested((args, kwargs))
        if not nested and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        result = func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        self.observe(func, dict(zip(names, args, strict=False)) | kwargs, result)
        return result

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        """See an operation with its arguments by name, and what it returned."""
        raise NotImplementedError  # abstract


class CostCounter(Observer):
    """Counts the kernels of everything run inside the block, backward too, and the bytes they read and write.

    An operation, a custom one too, reads each distinct piece of memory among its inputs once and writes each of its
    outputs once, as a fused kernel does. Views, allocations and questions about shapes cost nothing. Indexing reads and
    writes the entries it touches. Of a nested tensor its buffer counts. Scratch memory inside a kernel is not seen. A
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


def count_cost(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Cost:
    """Call the function and return what that cost."""
    with CostCounter() as counter:
        function(*args, **kwargs)
    return counter.cost


class PeakMemory(Observer):
    """Tracks the bytes of the memory allocated inside the block that are alive at once: `live_bytes`, `peak_bytes`.

    What was there before the block does not count, nor does scratch memory inside a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: set[int] = set()

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        # `torch.tensor(...)` allocates out of sight and shows its memory only as what this operation is given.
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
    """All tensors in lists of lists, tuples and dicts; of nested tensors their buffers."""
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
    """Whether there is a nested tensor among them."""
    return any(tensor.is_nested for tensor in _leaves(value))


def buffer_of(tensor: Tensor) -> Tensor:
    """The tensor that holds the elements: of a nested one those of all its parts, one after the other."""
    return tensor.values() if tensor.is_nested else tensor


def storage_of(tensor: Tensor) -> int:
    """What identifies the memory that a tensor lies in."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"The cost of tensors of layout {tensor.layout} is not known; measure dense tensors.")
    return tensor.untyped_storage()._cdata


def _region(tensor: Tensor) -> tuple[Any, int]:
    """Which memory a tensor covers, the same for all views that cover the same, and its size in bytes."""
    if tensor.numel() == 0:
        return None, 0
    # Smallest stride first, broadcast dimensions dropped, and neighbours that lie end to end joined.
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if dims and dims[-1][0] * dims[-1][1] == stride:
            dims[-1] = (dims[-1][0], dims[-1][1] * size)
        else:
            dims.append((stride, size))
    entries = math.prod(size for _, size in dims)
    extent = 1 + sum(stride * (size - 1) for stride, size in dims)  # less than the entries where windows overlap
    return (storage_of(tensor), tensor.storage_offset(), tuple(dims)), min(entries, extent) * tensor.element_size()


def _bytes_moved(func: OpOverload, bound: dict[str, Any], result: Any) -> int:
    """The bytes that one call reads and writes."""
    name = func.overloadpacket.__name__.removeprefix("_foreach_")
    if name in _FREE or torch.Tag.inplace_view in func.tags:
        return 0
    written = _written_arguments(func, name, bound)
    given = {storage_of(tensor) for tensor in tensors_in(bound)}
    results = list(tensors_in(result))
    new = [tensor for tensor in results if storage_of(tensor) not in given]
    if results and not new and not written:
        return 0  # a view, annotated as one or not
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
    """The names of the arguments that a call writes to: as its schema says, but for the known errors of schemas."""
    schema = func._schema.arguments
    written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write and a.name in bound}
    if name in _OPTIMISERS and bound.get("grad_scale") is None:
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
    """How many entries of its first argument a call that updates some of them by their index touches (at most)."""
    if name in ("index_put_", "_index_put_impl_"):
        used = [index for index in bound["indices"] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in used):
            return None  # a mask may choose all
        points = math.prod(torch.broadcast_shapes(*(index.shape for index in used)))
        shape = bound["self"].shape
        kept = [i for i in range(len(shape)) if i >= len(bound["indices"]) or bound["indices"][i] is None]
        return points * math.prod(shape[i] for i in kept)
    if name in ("index_add_", "index_copy_", "index_fill_", "index_reduce_"):
        return bound["index"].numel() * bound["self"].numel() // max(bound["self"].shape[bound["dim"]], 1)
    if name in ("scatter_", "scatter_add_", "scatter_reduce_"):
        return bound["index"].numel()
    return None
