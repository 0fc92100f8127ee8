"""ReLU and GELU of Gaussian values by one kernel on a GPU, with the means over positions that later rules need.

The kernel reads a value as (examples, positions, channels), in any order in memory (`kernels.activation_ops`). In
compiled code it also computes a batch norm and a sum before the activation, whose results then are not stored.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core import kernels, noise
from leanbayes.rules.moments.buffers import is_exporting
from leanbayes.rules.moments.context import Source
from leanbayes.rules.moments.value import Moments

Parts = tuple[list[int], list[int], list[int]]  # dimensions of the examples, the positions and the channels


def averaged_positions(x: Moments) -> list[int]:
    """Return the dimensions over which the slope of an activation is averaged: padding would not count."""
    return x.positions if x.within.counted is None and not x.within.coherent else []


def by_one_kernel(x: Moments, function: Callable[..., Any], settings: dict[str, Any]) -> Moments | None:
    """Return the value of an activation, or None if there is no kernel for it, its settings, or this device."""
    is_relu = function is F.relu and not settings
    if not is_relu and not (function is F.gelu and settings.get("approximate", "none") == "none"):
        return None
    if not kernels.usable(x.loc) or torch.is_grad_enabled() or noise.in_transform() or is_exporting():
        return None
    if x.loc.numel() == 0:
        return None
    averaged = averaged_positions(x)
    parts = _parts_of(x.loc.dim(), averaged)
    if parts is None or not all([_is_merged(x.loc, dims) for dims in parts]):
        return None
    ops = kernels.activation_ops
    mean_variance = bool(averaged) and not x.within.maps and not x.varies(averaged)
    loc, more = _loc_of(x, parts)
    kind = ops.RELU if is_relu else ops.GELU
    found = ops.activation_moments(loc, _variance_of(x, parts), kind, bool(averaged), mean_variance, *more)
    mean, slope, variance = (_restored(value, x.loc.shape, parts) for value in found[:3])
    result = x.follow(mean, slope, variance)
    if averaged:
        first, second = (_restored(value, x.loc.shape, parts) for value in found[3:])
        result.averages = (averaged, first, second)
    return result


def source_of_norm(
    x: Moments,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Source | None:
    """Return how the mean after a batch norm in evaluation mode is computed, or None outside of compiled code."""
    if not torch.compiler.is_compiling() or is_exporting() or torch.is_grad_enabled() or not kernels.usable(x.loc):
        return None
    if mean is None or variance is None or weight is None or bias is None:
        return None
    return Source(x.loc, (mean, variance, weight, bias), eps)


def source_of_sum(x: Any, y: Any) -> Source | None:
    """Return how the mean of a sum is computed if one of its terms is that of a batch norm, else None."""
    if not (isinstance(x, Moments) and isinstance(y, Moments) and x.loc.shape == y.loc.shape):
        return None
    for one, other in ((x, y), (y, x)):
        if one.source is not None and one.source.added is None:
            return one.source._replace(added=other.loc)
    return None


def _loc_of(x: Moments, parts: Parts) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the mean as (examples, positions, channels), and what the kernel has to compute before the activation."""
    source = x.source
    if source is None or parts[2] != [1] or source.value.dtype != x.loc.dtype or source.value.shape != x.loc.shape:
        return _joined(x.loc, parts), ()
    given = [source.value] if source.added is None else [source.value, source.added]
    if not all([_is_merged(value, dims) for value in given for dims in parts]):
        return _joined(x.loc, parts), ()
    loc, *added = (_joined(value, parts) for value in given)
    return loc, (*source.norm, source.eps, *added)


def _parts_of(dims: int, positions: list[int]) -> Parts | None:
    """Return which dimensions are which; without positions to average over, only their order in memory matters."""
    if dims < 2:
        return None
    if dims == 2:  # a program of the kernel has many positions, but one example
        return [], [0], [1]
    positions = positions or (list(range(2, dims)) if dims > 3 else [1])
    return [0], positions, [dim for dim in range(1, dims) if dim not in positions]


def _is_merged(x: Tensor, dims: Sequence[int]) -> bool:
    """Whether some dimensions of a tensor can be viewed as one. A tensor that is expanded cannot."""
    dims = [dim for dim in dims if x.shape[dim] != 1]
    steps = [x.stride(inner) * x.shape[inner] for inner in dims[1:]]
    return all([x.stride(dim) != 0 for dim in dims]) and [x.stride(outer) for outer in dims[:-1]] == steps


def _joined(x: Tensor, parts: Parts) -> Tensor:
    """Return a tensor as (examples, positions, channels)."""
    sizes = [math.prod([x.shape[dim] for dim in dims]) for dims in parts]
    return x.permute([dim for dims in parts for dim in dims]).reshape(sizes)


def _variance_of(x: Moments, parts: Parts) -> Tensor:
    """Return the variance in the same form; it has size 1 along the parts along which it is constant."""
    variance = x.variance_of(())
    variance = variance.reshape([1] * (x.loc.dim() - variance.dim()) + list(variance.shape))
    sizes = list(variance.shape)
    for dims in parts:
        if any([sizes[dim] != 1 for dim in dims]):  # then it has all elements of this part
            for dim in dims:
                sizes[dim] = x.loc.shape[dim]
    return _joined(variance.expand(sizes), parts)


def _restored(value: Tensor, shape: Sequence[int], parts: Parts) -> Tensor:
    """Return a result in the shape of the value; means have size 1 along the positions."""
    examples, positions, channels = parts
    inner = [1 if value.shape[1] == 1 else shape[dim] for dim in positions]
    value = value.reshape([shape[dim] for dim in examples] + inner + [shape[dim] for dim in channels])
    order = [dim for dims in parts for dim in dims]
    return value.permute([order.index(dim) for dim in range(len(order))])
