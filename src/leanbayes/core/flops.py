"""The FLOPs of the products in a computation on any device, with and without products with a weight of 0."""

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from leanbayes.core.counters import Observer, any_nested, buffer_of, storage_of, tensors_in

# Products with a matrix, and the names of their factors. (A product of two vectors costs no more than a sum.)
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
    """FLOPs of products: `dense` counts all of them, `effective` leaves out products with a weight of 0."""

    dense: int = 0
    effective: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.dense + other.dense, self.effective + other.effective)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.dense * times, self.effective * times)


class FlopCounter(Observer):
    """Counts the FLOPs of the products inside the block, forward and backward: matrices, convolutions, attention, RNNs.

    By the usual convention a multiply-add is 2 FLOPs, padding and masked positions count, and elementwise operations do
    not. `effective` multiplies the FLOPs of a product by the density of its weight, the fraction of entries that are
    not exactly 0; if both factors are weights, by that of the last one. Zeros in activations do not reduce it. A weight
    is a tensor in the memory of `weights`, or one computed from them and constants without a product, such as a cast, a
    mask or a parametrization. In a backward pass the gradient of a weight is not a product with it, and counts in full.
    """

    def __init__(self, weights: Iterable[Tensor] = (), constants: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.flops = Flops()
        self._weights: dict[int, Tensor] = {}
        # Memory of tensors that do not depend on the inputs, and whether they depend on weights.
        self._derived: dict[int, bool] = {storage_of(tensor): False for tensor in constants}
        self.add_weights(weights)

    def add_weights(self, weights: Iterable[Tensor]) -> None:
        """Treat more tensors as weights from now on."""
        self._weights |= {storage_of(tensor): tensor for tensor in weights}

    def observe(self, func: OpOverload, arguments: dict[str, Any], result: Any) -> None:
        products = _products(func, arguments, result)
        for flops, operands in products:
            self.flops += Flops(flops, self._effective(flops, operands))
        given = None if func is torch.ops.aten.lift_fresh.default else arguments  # the memory of `torch.tensor`
        kinds = [self._is_weight(tensor) for tensor in tensors_in(given)]
        if products or None in kinds:
            for tensor in tensors_in(result):
                self._derived.pop(storage_of(tensor), None)  # overwritten
            return
        for tensor in tensors_in(result):
            key = storage_of(tensor)
            if key in self._weights:
                continue
            if key not in self._derived:
                weakref.finalize(tensor.untyped_storage(), self._derived.pop, key, None).atexit = False
            self._derived[key] = any(kinds) or self._derived.get(key, False)

    def _is_weight(self, tensor: Tensor) -> bool | None:
        """Return True for a weight, False for a constant, and None for a tensor that may depend on the inputs."""
        key = storage_of(tensor)
        return True if key in self._weights else self._derived.get(key)

    def _effective(self, flops: int, operands: Sequence[Tensor]) -> int:
        weights = [tensor for tensor in operands if self._is_weight(tensor)]
        if not weights or flops == 0:
            return flops
        return flops // weights[-1].numel() * int(weights[-1].count_nonzero())


def _products(func: OpOverload, bound: dict[str, Any], result: Any) -> list[tuple[int, Sequence[Tensor]]]:
    """Return the products in one call: the FLOPs of each, and the factors that may be weights."""
    name = func.overloadpacket.__name__.removesuffix("_") if func.namespace == "aten" else ""
    backward, name = name.endswith("_backward"), name.removesuffix("_backward")
    if name in _FUSED_LAYERS:
        raise TypeError(
            f"The products inside {name} are unknown: call torch.backends.mha.set_fastpath_enabled(False) first."
        )
    if name == "linear" and not backward:  # not decomposed for nested tensors
        return [(2 * buffer_of(bound["input"]).numel() * bound["weight"].shape[0], (bound["weight"],))]
    if any_nested(bound) and (name in ("linear", "matmul", *_MATRIX_PRODUCTS) or name.startswith("_scaled_dot_")):
        raise TypeError(f"The products of nested tensors in {name} are unknown: measure padded tensors.")
    if name in _MATRIX_PRODUCTS:
        a, b = (bound[operand] for operand in _MATRIX_PRODUCTS[name])
        return [(2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1), (a, b))]
    if name == "_trilinear":
        shapes = [_expanded(bound[f"i{i}"], bound[f"expand{i}"]) for i in (1, 2, 3)]
        return [(2 * math.prod(torch.broadcast_shapes(*shapes)), (bound["i1"], bound["i3"], bound["i2"]))]
    if name in _CONVOLUTIONS:
        # Each weight is used once per output pixel, or once per input pixel of a transposed convolution.
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
        if backward:  # recompute the scores; then two products for each of the two products
            return [(pairs * (3 * k.shape[-1] + 2 * v.shape[-1]), ())]
        return [(pairs * k.shape[-1], (q, k)), (pairs * v.shape[-1], (v,))]
    return []


def _layer(
    flops: int, weight: Tensor, backward: bool, wanted: Sequence[bool] | None = None
) -> list[tuple[int, Sequence[Tensor]]]:
    """Return the product with a layer's weight; backward, those for the gradients of its inputs and of its weight."""
    if not backward:
        return [(flops, (weight,))]
    both: list[tuple[int, Sequence[Tensor]]] = [(flops, (weight,)), (flops, ())]
    return [product for product, needed in zip(both, wanted or (True, True), strict=False) if needed]


def _expanded(tensor: Tensor, dims: Sequence[int]) -> torch.Size:
    """Return the shape of a tensor with new dimensions of size 1."""
    for dim in dims:
        tensor = tensor.unsqueeze(dim)
    return tensor.shape
