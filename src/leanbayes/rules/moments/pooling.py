"""Moments through pooling. The common part does not change, because all positions share it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.arithmetic import scaled
from leanbayes.rules.moments.registry import moment_rule, named
from leanbayes.rules.moments.resizing import over_positions
from leanbayes.rules.moments.shape import settled
from leanbayes.rules.moments.value import Moments


def _winner(x: Moments, dims: int, function: Any, *settings: Any) -> tuple[Moments, Tensor]:
    """Return the maxima, with the noise of the elements with the largest means, and the indices of these."""
    x = settled(x, range(-dims, 0))
    loc, indices = function(x.loc, *settings, return_indices=True)
    independent = x.rest.flatten(-dims).gather(-1, indices.flatten(-dims)).reshape(loc.shape)
    return over_positions(x, loc, independent, dims), indices


def _max_pool(dims: int) -> None:
    function, adaptive = getattr(F, f"max_pool{dims}d"), getattr(F, f"adaptive_max_pool{dims}d")

    def max_pool(
        input: Moments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Moments:
        return _winner(input, dims, function, kernel_size, stride or None, padding, dilation, ceil_mode)[0]

    def max_pool_with_indices(
        input: Moments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = True,
    ) -> tuple[Moments, Tensor]:
        return _winner(input, dims, function, kernel_size, stride or None, padding, dilation, ceil_mode)

    def adaptive_max_pool(input: Moments, output_size: Any, return_indices: bool = False) -> Moments:
        return _winner(input, dims, adaptive, output_size)[0]

    def adaptive_max_pool_with_indices(
        input: Moments, output_size: Any, return_indices: bool = True
    ) -> tuple[Moments, Tensor]:
        return _winner(input, dims, adaptive, output_size)

    # torch dispatches to one of two functions, depending on `return_indices`.
    moment_rule(function, getattr(torch, f"max_pool{dims}d"))(max_pool)
    moment_rule(*named(f"max_pool{dims}d_with_indices"))(max_pool_with_indices)
    moment_rule(adaptive)(adaptive_max_pool)
    moment_rule(*named(f"adaptive_max_pool{dims}d_with_indices"))(adaptive_max_pool_with_indices)


for _dims in (1, 2, 3):
    _max_pool(_dims)


def _sizes(size: Any, dims: int) -> tuple[int, ...]:
    """Expand a size to one per dimension."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * dims if len(sizes) == 1 else sizes


def _avg_pool(x: Moments, loc: Tensor, dims: int, window: tuple[Any, ...], divisor: int | None) -> Moments:
    """Return averages over windows (size, stride, padding, ceil_mode, count_include_pad), with the variance Σv/n²."""
    size, stride, padding, ceil_mode, include = window
    size, padding = _sizes(size, dims), _sizes(padding, dims)
    stride = _sizes(stride, dims) if stride else size
    x = settled(x, range(-dims, 0))
    v = x.rest
    lead = v.shape[:-dims]
    planes = v.reshape(-1, 1, *v.shape[-dims:])
    if dims == 1:  # avg_pool1d cannot return sums
        planes, size, stride, padding = planes.unsqueeze(-2), (1, *size), (1, *stride), (0, *padding)
    pool = F.avg_pool3d if dims == 3 else F.avg_pool2d
    here = torch.ones_like(planes[:1])
    real = pool(here, size, stride, padding, ceil_mode, True, 1)  # elements of each window without padding
    share = real / divisor if divisor else pool(here, size, stride, padding, ceil_mode, include)  # real / n
    total = pool(planes, size, stride, padding, ceil_mode, True, 1)
    weights = share.square() / (real if x.within.coherent else real.square())
    averaged = (total * weights).reshape(*lead, *loc.shape[-dims:])
    result = over_positions(x, loc, averaged, dims)
    if result.common is None or not (divisor or (include and any(padding))):
        return result
    shared = over_positions(x, loc, torch.zeros_like(averaged), dims)
    shared = scaled(shared, loc, share.reshape(loc.shape[-dims:]))
    return shared.like(loc, averaged + shared.independent, shared.common, shared.grid)


@moment_rule(*named("avg_pool1d"))
def avg_pool1d(
    input: Moments,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Moments:
    """Average over windows of sequences."""
    window = (kernel_size, stride or None, padding, ceil_mode, count_include_pad)
    loc = F.avg_pool1d(input.loc, kernel_size, stride or (), padding, ceil_mode, count_include_pad)
    return _avg_pool(input, loc, 1, window, None)


def _avg_pool_rule(dims: int) -> None:
    @moment_rule(*named(f"avg_pool{dims}d"))
    def avg_pool(
        input: Moments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Moments:
        window = (kernel_size, stride or None, padding, ceil_mode, count_include_pad)
        loc = getattr(F, f"avg_pool{dims}d")(input.loc, *window, divisor_override)
        return _avg_pool(input, loc, dims, window, divisor_override)


def _adaptive_avg_pool_rule(dims: int) -> None:
    @moment_rule(*named(f"adaptive_avg_pool{dims}d"))
    def adaptive_avg_pool(input: Moments, output_size: Any) -> Moments:
        return _adaptive_average(input, output_size, dims)


for _dims in (2, 3):
    _avg_pool_rule(_dims)
for _dims in (1, 2, 3):
    _adaptive_avg_pool_rule(_dims)


def _adaptive_average(input: Moments, output_size: Any, dims: int) -> Moments:
    """Average over windows that cover the positions evenly, with the variance Σv/n² for windows of size n."""
    x = settled(input, range(-dims, 0))
    function = getattr(F, f"adaptive_avg_pool{dims}d")
    loc, averaged = function(x.loc, output_size), function(x.rest, output_size)
    if x.within.coherent:
        return over_positions(x, loc, averaged, dims)
    for dim in range(-dims, 0):
        size, count = x.shape[dim], loc.shape[dim]
        lengths = [-(-(place + 1) * size // count) - place * size // count for place in range(count)]
        shape = [1] * (-1 - dim)
        averaged = averaged / averaged.new_tensor(lengths).reshape(count, *shape)
    return over_positions(x, loc, averaged, dims)
