"""Moments through interpolation, sampling, padding, unfolding and folding, which change the number of positions."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.arithmetic import scaled
from leanbayes.rules.moments.buffers import is_exporting, stored
from leanbayes.rules.moments.map_cells import similarity
from leanbayes.rules.moments.registry import moment_rule, unsupported
from leanbayes.rules.moments.shape import regular_along, settled
from leanbayes.rules.moments.value import Moments, variance_dtype


def over_positions(x: Moments, loc: Tensor, independent: Tensor, dims: int) -> Moments:
    """Replace the last dimensions of a value, along which its common part is constant."""
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
    """Interpolate: the weights sum to 1, so the common part stays, and variances are multiplied by their squares."""
    dims = input.dim() - 2
    loc = F.interpolate(stored(input.loc), size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if mode == "area":
        return getattr(F, f"adaptive_avg_pool{dims}d")(input, loc.shape[2:])
    x = settled(input, range(2, input.dim()))
    if x.within.coherent:
        v = F.interpolate(stored(x.rest), size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        result = over_positions(x, loc, v, dims)
        alike = similarity(x.loc, dims)
        if alike is not None and not mode.startswith("nearest"):
            f = ((2 + alike) / 3) ** dims
            result = scaled(result, loc, f.sqrt())
        return result
    if mode.startswith("nearest"):
        v = F.interpolate(stored(x.independent), size, scale_factor, mode, None, recompute_scale_factor)
        return over_positions(x, loc, v, dims)
    factors = [scale_factor] * dims if scale_factor is None or isinstance(scale_factor, int | float) else scale_factor
    if recompute_scale_factor:
        factors = [None] * dims
    v = stored(x.independent)
    linear = mode != "bicubic" and not antialias
    for axis, factor in enumerate(factors):
        if linear and torch.compiler.is_compiling() and not is_exporting():
            v = _squared_linear(v, axis + 2, loc.shape[axis + 2], factor, align_corners)
            continue
        weights = _weights(x, x.shape[axis + 2], loc.shape[axis + 2], factor, mode, align_corners, antialias)
        v = (v.movedim(axis + 2, -1) @ weights.square()).movedim(-1, axis + 2)
    return over_positions(x, loc, v, dims)


def _squared_linear(v: Tensor, dim: int, new_size: int, factor: float | None, align_corners: bool | None) -> Tensor:
    """Interpolate along a dimension with the squares of the two weights of each place.

    In compiled code this is a part of whatever needs the result. A matrix product would need its input and its result
    in memory, and in the order of its dimensions.
    """
    pixels = torch.arange(v.shape[dim], dtype=v.dtype, device=v.device).reshape(1, 1, -1)
    if factor is None:
        places = F.interpolate(pixels, new_size, None, "linear", align_corners)
    else:
        places = F.interpolate(pixels, None, float(factor), "linear", align_corners, False)
    places = places.reshape(-1)  # the interpolated number of a pixel is the place that a result is for
    low = places.floor()
    first = low.long()
    upper = (places - low).reshape(-1, *[1] * (v.dim() - 1 - dim))
    second = (first + 1).clamp_max(v.shape[dim] - 1)
    return (1 - upper).square() * v.index_select(dim, first) + upper.square() * v.index_select(dim, second)


def _weights(
    x: Moments, size: int, new_size: int, factor: float | None, mode: str, align_corners: bool | None, antialias: bool
) -> Tensor:
    """Return the weights of interpolation along one axis, (size, new size), by interpolating unit vectors."""
    units = torch.eye(size, dtype=x.independent.dtype, device=x.device).reshape(1, size, 1, size)
    mode = "bicubic" if mode == "bicubic" else "bilinear"
    if factor is None:
        rows = F.interpolate(units, (1, new_size), None, mode, align_corners, antialias=antialias)
    else:
        rows = F.interpolate(units, None, (1.0, float(factor)), mode, align_corners, False, antialias)
    return rows.reshape(size, new_size)


@moment_rule(F.pad)
def pad(input: Moments, pad: Any, mode: str = "constant", value: float | None = None) -> Moments:
    """Pad with constants, which have no noise, or with copies of elements.

    Common noise that is constant along a dimension is replaced by its mean Ū, and Σ_r (U - Ū)² becomes independent.
    """
    x = input.plain()
    loc = F.pad(x.loc, pad, mode, value)
    changed = [dim for dim in range(x.dim()) if _ends(pad, x.dim(), dim) != (0, 0)]
    if mode != "constant":
        x = settled(x, changed)
        return x.like(loc, F.pad(x.rest, pad, mode), x.common)
    independent = F.pad(x.rest, pad)
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
    """Return the number of elements added at both ends of a dimension; `pad` starts with the last dimension."""
    place = 2 * (dims - 1 - dim)
    return (pad[place], pad[place + 1]) if place + 1 < len(pad) else (0, 0)


@moment_rule(F.unfold)
def unfold(input: Moments, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Moments:
    """Extract windows: (batch, channels · window, windows)."""
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


@moment_rule(F.fold)
def fold(
    input: Moments, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Moments:
    """Add up windows; common noise that differs between positions then becomes independent."""
    x, window = input.plain(), (output_size, kernel_size, dilation, padding, stride)
    loc, independent = F.fold(x.loc, *window), F.fold(x.independent, *window)
    if x.common is None:
        return x.like(loc, independent)
    windows = x.common.expand(-1, *x.shape).reshape(-1, *x.shape[-2:])
    common = F.fold(windows, *window).reshape(len(x.common), *loc.shape)
    return settled(x.like(loc, independent, common), (-2, -1))


@moment_rule(F.grid_sample)
def grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Moments:
    """Sample at given places y = Σ w·x: common noise is multiplied by Σ w, and variances by the squares of the weights.

    The sums of neighboring places share pixels, and so noise. As in `interpolate`, only its common part is propagated.
    """
    if isinstance(grid, Moments):
        raise unsupported("grid_sample at random places", 'use bnn.using("sample"), or the means of the places (.loc).')
    if mode not in ("bilinear", "nearest"):
        raise unsupported(f"grid_sample with mode={mode!r}", 'use mode="bilinear", or bnn.using("sample").')
    dims = input.dim() - 2
    x = settled(input.plain(), range(2, input.dim()))
    loc = F.grid_sample(x.loc, grid, mode, padding_mode, align_corners)
    places = grid.to(x.independent.dtype)
    ones = torch.ones_like(x.independent[:, :1])
    sums = F.grid_sample(ones, places, mode, padding_mode, align_corners)
    if mode == "nearest":
        squares = F.grid_sample(x.independent, places, mode, padding_mode, align_corners)
    else:
        squares = _squared_bilinear(x.independent, places, padding_mode, bool(align_corners))
    if x.common is None:
        return x.like(loc, squares)
    scales = sums.clamp_min(torch.finfo(sums.dtype).eps)
    return scaled(over_positions(x, loc, squares / scales.square(), dims), loc, scales)


def _squared_bilinear(v: Tensor, grid: Tensor, padding_mode: str, align_corners: bool) -> Tensor:
    """Sample with the squares of the bilinear weights; `grid` has its coordinates from the last dimension of v on."""
    sizes, flat, total = v.shape[2:], v.flatten(2), v.new_zeros(())
    pixels = [
        _pixels(grid[..., -1 - axis], size, padding_mode, align_corners).flatten(1) for axis, size in enumerate(sizes)
    ]
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        place, weight = pixels[0].new_zeros((), dtype=torch.long), pixels[0].new_ones(())
        for pixel, size, upper in zip(pixels, sizes, corner, strict=True):
            low = pixel.floor()
            index = low.long() + upper
            weight = weight * (1 - (pixel - low - upper).abs()) * ((index >= 0) & (index < size))
            place = place * size + index.clamp(0, size - 1)
        found = flat.gather(2, place[:, None].expand(-1, v.shape[1], -1))
        total = total + weight.square()[:, None] * found
    return total.reshape(*v.shape[:2], *grid.shape[1:-1])


def _pixels(places: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Convert places from -1 to 1 to pixels, and move those outside of the image as `padding_mode` says."""
    ends = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    pixels = ends[0] + (places + 1) / 2 * (ends[1] - ends[0])
    if padding_mode == "zeros":
        return pixels.clamp(-2, size + 1)
    if padding_mode == "reflection":
        length = ends[1] - ends[0]
        away = (pixels - ends[0]).abs() % (2 * length) if length else torch.zeros_like(pixels)
        pixels = ends[0] + torch.minimum(away, 2 * length - away)
    return pixels.clamp(0, size - 1)
