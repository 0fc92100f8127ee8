"""FLOPs of the products in a computation, on any device, in full and without those with a weight of 0."""

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from leanbayes.cost import Observer, any_nested, buffer_of, storage_of, tensors_in

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
class Flops:
    """FLOPs of products: `dense` counts each in full, `effective` leaves out what is multiplied by a weight of 0."""

    dense: int = 0
    effective: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.dense + other.dense, self.effective + other.effective)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.dense * times, self.effective * times)


class FlopCounter(Observer):
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
        self._derived: dict[int, bool] = {storage_of(tensor): False for tensor in constants}
        self.add_weights(weights)

    def add_weights(self, weights: Iterable[Tensor]) -> None:
        """Take these for weights too, from now on."""
        self._weights |= {storage_of(tensor): tensor for tensor in weights}

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        products = _products(func, arguments, result)
        for flops, operands in products:
            self.flops += Flops(flops, self._effective(flops, operands))
        given = None if func is torch.ops.aten.lift_fresh.default else arguments  # which is what `torch.tensor` made
        kinds = [self._is_weight(tensor) for tensor in tensors_in(given)]
        if products or None in kinds:
            for tensor in tensors_in(result):
                self._derived.pop(storage_of(tensor), None)  # written over, if it was there
            return
        for tensor in tensors_in(result):
            key = storage_of(tensor)
            if key in self._weights:
                continue
            if key not in self._derived:
                weakref.finalize(tensor.untyped_storage(), self._derived.pop, key, None).atexit = False
            self._derived[key] = any(kinds) or self._derived.get(key, False)

    def _is_weight(self, tensor: Tensor) -> bool | None:
        """True for a weight, False for a constant, None for what may depend on the inputs."""
        key = storage_of(tensor)
        return True if key in self._weights else self._derived.get(key)

    def _effective(self, flops: int, operands: Sequence[Tensor]) -> int:
        weights = [tensor for tensor in operands if self._is_weight(tensor)]
        if not weights or flops == 0:
            return flops
        return flops // weights[-1].numel() * int(weights[-1].count_nonzero())


def _products(func: OpOverload, bound: dict[str, Any], result: Any) -> list[tuple[int, Sequence[Tensor]]]:
    """The products in one call: the FLOPs of each, and what is multiplied, where it may be a weight."""
    name = func.overloadpacket.__name__.removesuffix("_") if func.namespace == "aten" else ""
    backward, name = name.endswith("_backward"), name.removesuffix("_backward")
    if name in _FUSED_LAYERS:
        raise TypeError(
            f"The products inside {name} are not known; call torch.backends.mha.set_fastpath_enabled(False) first."
        )
    if name == "linear" and not backward:  # which torch does not cut into smaller ones for nested tensors
        return [(2 * buffer_of(bound["input"]).numel() * bound["weight"].shape[0], (bound["weight"],))]
    if any_nested(bound) and (name in ("linear", "matmul", *_MATRIX_PRODUCTS) or name.startswith("_scaled_dot_")):
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
        matrices = [tensor for tensor in tensors_in(given) if tensor.dim() == 2]
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
