"""A function that computes gradients, as a graph of tensor operations that needs no autograd.

`make_fx` records the operations of the forward and the backward passes, for any number of examples. What torch.onnx
cannot translate, the backward operations of torch, is written in terms of operations that it can.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten


def gradient_graph(function: Callable[..., Any], inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Return the operations of a function of tensors, for any number of examples, as a module.

    Args:
        function: The function. It may call `torch.autograd.grad`.
        inputs: Its arguments. Those with as many examples as the first one may have any number of them, if it is not 1.
    """
    mode, rows = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), inputs[0].shape[0]
    symbols = []
    for tensor in inputs:
        kinds = [DimDynamic.STATIC] * tensor.dim()
        if kinds and tensor.shape[0] == rows:
            kinds[0] = DimDynamic.DYNAMIC
        symbols.append(mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)))
    with mode, sdpa_kernel(SDPBackend.MATH):  # whose gradient is a composition
        graph: torch.fx.GraphModule = make_fx(function, decomposition_table=_formulas())(*symbols)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@functools.cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    """Return the operations that are written in terms of others, each with its formula."""
    backward = {
        op: formula
        for op, formula in decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload) and "backward" in str(op)
    }
    own = {
        aten.avg_pool2d_backward.default: _of_average_pool,
        aten._adaptive_avg_pool2d_backward.default: _of_adaptive_average_pool,
        aten.constant_pad_nd.default: _padded,  # torch's own would fix the number of examples
        aten.convolution_backward.default: _of_convolution,
        aten.max_pool2d_with_indices_backward.default: _of_max_pool,
    }
    return {**core_aten_decompositions(), **backward, **own}


def _of_convolution(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradient of a convolution with respect to its input; its weights are constants here."""
    if output_mask[1] or output_mask[2]:
        return NotImplemented
    dims = weight.dim() - 2
    stride, padding, dilation = (list(one) * (dims if len(one) == 1 else 1) for one in (stride, padding, dilation))
    if transposed:
        return aten.convolution(grad, weight, None, stride, padding, dilation, False, [0] * dims, groups), None, None
    rest = []  # pixels at the end that no window has
    for dim in range(dims):
        reached = (grad.shape[2 + dim] - 1) * stride[dim] + dilation[dim] * (weight.shape[2 + dim] - 1) + 1
        rest.append(x.shape[2 + dim] + 2 * padding[dim] - reached)
    return aten.convolution(grad, weight, None, stride, padding, dilation, True, rest, groups), None, None


def _of_max_pool(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Add each gradient to the pixel that it comes from."""
    flat = torch.zeros_like(x).flatten(-2)
    return flat.scatter_add(-1, indices.flatten(-2), grad.flatten(-2)).view(x.shape)


def _of_average_pool(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Give each pixel of a window its share, by a transposed convolution with one channel at a time."""
    kernel, stride, padding = (list(one) * (2 if len(one) == 1 else 1) for one in (kernel, stride or kernel, padding))
    if ceil_mode or (any(padding) and not count_include_pad and divisor_override is None):
        return NotImplemented
    share = torch.full((1, 1, *kernel), 1 / (divisor_override or math.prod(kernel)), dtype=grad.dtype)
    images, of_grad = x.reshape(-1, 1, *x.shape[-2:]), grad.reshape(-1, 1, *grad.shape[-2:])
    found, *_ = _of_convolution(
        of_grad, images, share, None, stride, padding, [1, 1], False, [0, 0], 1, (True, False, False)
    )
    return found.view(x.shape)


def _of_adaptive_average_pool(grad: Tensor, x: Tensor) -> Any:
    """Do the same for windows of equal sizes that do not overlap."""
    (height, width), (rows, columns) = x.shape[-2:], grad.shape[-2:]
    if height % rows or width % columns:
        return NotImplemented
    kernel = [height // rows, width // columns]
    shares = (grad / math.prod(kernel)).unsqueeze(-1).unsqueeze(-3)
    return shares.expand(*grad.shape[:-2], rows, kernel[0], columns, kernel[1]).reshape(x.shape)


def _padded(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Pad a tensor by joining constants, or cut it where the padding is negative."""
    for number, size in enumerate(pad):
        dim, at_end = x.dim() - 1 - number // 2, number % 2 == 1
        if size < 0:
            x = x.narrow(dim, 0 if at_end else -size, x.shape[dim] + size)
        elif size > 0:
            sizes = list(x.shape)
            sizes[dim] = size
            constant = x.new_full(sizes, value)
            x = torch.cat([x, constant] if at_end else [constant, x], dim)
    return x
