"""Moments through functions that change the number of positions: interpolation, padding, windows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.arithmetic import scaled
from leanbayes.rules.moments.registry import moment_rule
from leanbayes.rules.moments.shape import regular_along, settled
from leanbayes.rules.moments.value import Moments, variance_dtype


def over_positions(x: Moments, loc: Tensor, independent: Tensor, dims: int) -> Moments:
    """Change the last dimensions of a value, along which its common part is constant."""
    independent = independent.to(variance_dtype(loc.dtype))
    if x.common is None:
        return x.like(loc, independent)
    for dim in range(x.dim() - dims, x.dim()):
        x, _ = regular_along(x, dim)
    return x.like(loc, independent, x.common, (*x.grid[:-dims], *loc.shape[-dims:]))


@moment_rule(F.interpolate, F.upsample)
def interpolate(
    input: Moments,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Moments:
    """Resize: the weights sum to 1, so that the common part stays, and the variance goes through their squares."""
    dims = input.dim() - 2
    loc = F.interpolate(input.loc, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if mode == "area":
        return getattr(F, f"adaptive_avg_pool{dims}d")(input, loc.shape[2:])
    x = settled(input, range(2, input.dim()))
    if mode.startswith("nearest"):
        v = F.interpolate(x.independent, size, scale_factor, mode, None, recompute_scale_factor)
        return over_positions(x, loc, v, dims)
    factors = [scale_factor] * dims if scale_factor is None or isinstance(scale_factor, int | float) else scale_factor
    if recompute_scale_factor:
        factors = [None] * dims
    v = x.independent
    for axis, factor in enumerate(factors):
        weights = _weights(x, x.shape[axis + 2], loc.shape[axis + 2], factor, mode, align_corners, antialias)
        v = (v.movedim(axis + 2, -1) @ weights.square()).movedim(-1, axis + 2)
    return over_positions(x, loc, v, dims)


def _weights(
    x: Moments, size: int, new_size: int, factor: float | None, mode: str, align_corners: bool | None, antialias: bool
) -> Tensor:
    """Weights of interpolation along one axis, (size, new size), from each unit vector as an image one pixel high."""
    units = torch.eye(size, dtype=x.independent.dtype, device=x.device).reshape(1, size, 1, size)
    mode = "bicubic" if mode == "bicubic" else "bilinear"
    if factor is None:
        rows = F.interpolate(units, (1, new_size), None, mode, align_corners, antialias=antialias)
    else:
        rows = F.interpolate(units, None, (1.0, float(factor)), mode, align_corners, False, antialias)
    return rows.reshape(size, new_size)


@moment_rule(F.pad)
def pad(input: Moments, pad: Any, mode: str = "constant", value: float | None = None) -> Moments:
    """Add elements at the ends: constants without noise, or others again.

    Common noise that is constant along a dimension becomes its mean there, and Σ_r (U - Ū)² independent.
    """
    x = input.plain()
    loc = F.pad(x.loc, pad, mode, value)
    changed = [dim for dim in range(x.dim()) if _ends(pad, x.dim(), dim) != (0, 0)]
    if mode != "constant":
        x = settled(x, changed)
        return x.like(loc, F.pad(x.independent, pad, mode), x.common)
    independent = F.pad(x.independent, pad)
    if x.common is None:
        return x.like(loc, independent)
    own = [dim for dim in changed if x.common.shape[dim + 1] == x.shape[dim]]
    ends = [end for dim in reversed(range(x.dim())) for end in (_ends(pad, x.dim(), dim) if dim in own else (0, 0))]
    result = x.like(loc, independent, F.pad(x.common, ends))
    shared = [dim for dim in changed if dim not in own]
    if not shared:
        return result
    sizes = [x.shape[dim] if dim in shared else 1 for dim in range(x.dim())]
    ends = [end for dim in reversed(range(x.dim())) for end in (_ends(pad, x.dim(), dim) if dim in shared else (0, 0))]
    return scaled(result, loc, F.pad(torch.ones(sizes, dtype=independent.dtype, device=x.device), ends))


def _ends(pad: Any, dims: int, dim: int) -> tuple[int, int]:
    """How many elements are added at the two ends of a dimension; `pad` begins with those of the last."""
    place = 2 * (dims - 1 - dim)
    return (pad[place], pad[place + 1]) if place + 1 < len(pad) else (0, 0)


@moment_rule(F.unfold)
def unfold(input: Moments, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Moments:
    """Lay windows side by side, (batch, channels · window, windows)."""
    window = (kernel_size, dilation, padding, stride)
    x = settled(input.plain(), (-2, -1))
    loc, independent = F.unfold(x.loc, *window), F.unfold(x.independent, *window)
    if x.common is None:
        return x.like(loc, independent)
    *rest, channels = x.shape[:-2]
    result = x.like(loc, independent, x.common, (*rest, channels, loc.shape[-2] // channels, loc.shape[-1]))
    if padding in (0, (0, 0)):
        return result
    return scaled(result, loc, F.unfold(torch.ones_like(x.independent), *window))
