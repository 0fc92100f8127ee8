"""What a computation costs, on any device: the bytes its kernels move, how many, its FLOPs, and its peak memory."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# Products with a matrix, and the names of what is multiplied. (Two vectors are no more work than a sum.)
_MATRIX_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
}
_CONVOLUTIONS = frozenset("convolution _convolution convolution_overrideable convolution_backward".split())
_RECURRENT = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")
_FUSED_LAYERS = frozenset("_native_multi_head_attention _transformer_encoder_layer_fwd".split())


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


class _Observer(TorchDispatchMode):
    """Shows each operation run inside the block, backward too, to `observe`."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode an operation arrives here before torch has cut it into those that do the work. For nested
        # tensors it does not: they have operations of their own.
        nested = _any_nested((args, kwargs))
        if not nested and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        result = func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        self.observe(func, dict(zip(names, args, strict=False)) | kwargs, result)
        return result

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        raise NotImplementedError  # abstract


class CostCounter(_Observer):
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


@dataclass(frozen=True)
class Flops:
    """FLOPs of products: `dense` counts each in full, `effective` leaves out what is multiplied by a weight of 0."""

    dense: int = 0
    effective: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.dense + other.dense, self.effective + other.effective)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.dense * times, self.effective * times)


class FlopCounter(_Observer):
    """Counts the FLOPs of the products run inside the block, backward too: matrices, convolutions, attention, RNNs.

    A multiply-add is 2 FLOPs; padding and masked positions count, and elementwise work does not: the usual convention.
    `effective` multiplies a product by the density of its weight, the share of entries that are not exactly 0; of two
    weights the last one's. The zeros of activations never count. A weight is what lies in the memory of `weights`,
    or was computed from them and from constants alone without a product, as a cast, a mask or a parametrisation does.
    In a backward pass the weight's own gradient is no product with it, and is counted in full.
    """

    def __init__(self, weights: Iterable[Tensor] = (), constants: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.flops = Flops()
        self._weights: dict[int, Tensor] = {}
        # Memory that holds what does not depend on the inputs, and whether weights went into it.
        self._derived: dict[int, bool] = {_storage(tensor): False for tensor in constants}
        self.add_weights(weights)

    def add_weights(self, weights: Iterable[Tensor]) -> None:
        """Take these for weights too, from now on."""
        self._weights |= {_storage(tensor): tensor for tensor in weights}

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        products = _products(func, arguments, result)
        for flops, operands in products:
            self.flops += Flops(flops, self._effective(flops, operands))
        given = None if func is torch.ops.aten.lift_fresh.default else arguments  # which is what `torch.tensor` made
        kinds = [self._is_weight(tensor) for tensor in _tensors(given)]
        if products or None in kinds:
            for tensor in _tensors(result):
                self._derived.pop(_storage(tensor), None)  # written over, if it was there
            return
        for tensor in _tensors(result):
            key = _storage(tensor)
            if key in self._weights:
                continue
            if key not in self._derived:
                weakref.finalize(tensor.untyped_storage(), self._derived.pop, key, None).atexit = False
            self._derived[key] = any(kinds) or self._derived.get(key, False)

    def _is_weight(self, tensor: Tensor) -> bool | None:
        """True for a weight, False for a constant, None for what may depend on the inputs."""
        key = _storage(tensor)
        return True if key in self._weights else self._derived.get(key)

    def _effective(self, flops: int, operands: Sequence[Tensor]) -> int:
        weights = [tensor for tensor in operands if self._is_weight(tensor)]
        if not weights or flops == 0:
            return flops
        return flops // weights[-1].numel() * int(weights[-1].count_nonzero())


class PeakMemory(_Observer):
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
        old = {_storage(tensor) for tensor in _tensors(given)} | self._live
        for tensor in _tensors(result):
            if _storage(tensor) not in old:
                old.add(_storage(tensor))
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


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in lists of lists, tuples and dicts; of nested tensors their buffers."""
    return map(_buffer, _leaves(value))


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def _any_nested(value: Any) -> bool:
    return any(tensor.is_nested for tensor in _leaves(value))


def _buffer(tensor: Tensor) -> Tensor:
    """The tensor that holds the elements: of a nested one those of all its parts, one after the other."""
    return tensor.values() if tensor.is_nested else tensor


def _storage(tensor: Tensor) -> int:
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
    return (_storage(tensor), tensor.storage_offset(), tuple(dims)), min(entries, extent) * tensor.element_size()


def _bytes_moved(func: OpOverload, bound: dict[str, Any], result: Any) -> int:
    """The bytes that one call reads and writes."""
    name = func.overloadpacket.__name__.removeprefix("_foreach_")
    if name in _FREE or torch.Tag.inplace_view in func.tags:
        return 0
    written = _written_arguments(func, name, bound)
    given = {_storage(tensor) for tensor in _tensors(bound)}
    results = list(_tensors(result))
    new = [tensor for tensor in results if _storage(tensor) not in given]
    if results and not new and not written:
        return 0  # a view, annotated as one or not
    writes = dict(map(_region, new))
    first = next(iter(bound), None)
    touched = _entries_touched(name, bound)
    reads: dict[Any, int] = {}
    for argument in func._schema.arguments:
        for region, size in map(_region, _tensors(bound.get(argument.name))):
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


def _products(func: OpOverload, bound: dict[str, Any], result: Any) -> list[tuple[int, Sequence[Tensor]]]:
    """The products in one call: the FLOPs of each, and what is multiplied, where it may be a weight."""
    name = func.overloadpacket.__name__.removesuffix("_") if func.namespace == "aten" else ""
    backward, name = name.endswith("_backward"), name.removesuffix("_backward")
    if name in _FUSED_LAYERS:
        raise TypeError(
            f"The products inside {name} are not known; call torch.backends.mha.set_fastpath_enabled(False) first."
        )
    if name == "linear" and not backward:  # which torch does not cut into smaller ones for nested tensors
        return [(2 * _buffer(bound["input"]).numel() * bound["weight"].shape[0], (bound["weight"],))]
    if _any_nested(bound) and (name in ("linear", "matmul", *_MATRIX_PRODUCTS) or name.startswith("_scaled_dot_")):
        raise TypeError(f"The products of nested tensors in {name} are not known; measure padded tensors.")
    if name in _MATRIX_PRODUCTS:
        a, b = (bound[operand] for operand in _MATRIX_PRODUCTS[name])
        return [(2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1), (a, b))]
    if name == "_trilinear":
        shapes = [_expanded(bound[f"i{i}"], bound[f"expand{i}"]) for i in (1, 2, 3)]
        return [(2 * math.prod(torch.broadcast_shapes(*shapes)), (bound["i1"], bound["i3"], bound["i2"]))]
    if name in _CONVOLUTIONS:
        # Each weight serves every pixel that comes out, or of a transposed convolution that goes in.
        outputs = bound["grad_output"] if backward else result
        pixels = bound["input"] if bound["transposed"] else outputs
        flops = 2 * pixels.numel() // max(pixels.shape[1], 1) * bound["weight"].numel()
        return _layer(flops, bound["weight"], backward, bound.get("output_mask"))
    if name in _RECURRENT:
        steps = bound["input"].numel() // max(bound["input"].shape[-1], 1)  # of all sequences together
        given = {key: value for key, value in bound.items() if key.startswith("weight")}
        matrices = [tensor for tensor in _tensors(given) if tensor.dim() == 2]
        return [product for m in matrices for product in _layer(2 * steps * m.numel(), m, backward)]
    if name.startswith("_scaled_dot_product_") and "attention" in name:
        q, k, v = bound["query"], bound["key"], bound["value"]
        pairs = 2 * math.prod(q.shape[:-1]) * k.shape[-2]
        if backward:  # the scores again; then for each of the two products one with each factor
            return [(pairs * (3 * k.shape[-1] + 2 * v.shape[-1]), ())]
        return [(pairs * k.shape[-1], (q, k)), (pairs * v.shape[-1], (v,))]
    return []


def _layer(
    flops: int, weight: Tensor, backward: bool, wanted: Sequence[bool] | None = None
) -> list[tuple[int, Sequence[Tensor]]]:
    """The product with a layer's weight, or backward the one for its inputs and the one for the weight's gradient."""
    if not backward:
        return [(flops, (weight,))]
    both: list[tuple[int, Sequence[Tensor]]] = [(flops, (weight,)), (flops, ())]
    return [product for product, needed in zip(both, wanted or (True, True), strict=False) if needed]


def _expanded(tensor: Tensor, dims: Sequence[int]) -> torch.Size:
    """The shape with dimensions of size 1 put in."""
    for dim in dims:
        tensor = tensor.unsqueeze(dim)
    return tensor.shape
