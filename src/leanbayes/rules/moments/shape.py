"""Moments through functions that only move or repeat elements: views, permutations, reshapes, repetitions.

The common part stays small: if it is constant along a dimension, it remains so.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.registry import moment_rule, named, unsupported
from leanbayes.rules.moments.value import Moments


def unpacked(args: Sequence[Any]) -> list[int]:
    """Return sizes or dimensions that are given one by one or as one sequence."""
    return list(args[0]) if len(args) == 1 and not isinstance(args[0], int) else list(args)


def groups_of(x: Moments) -> list[list[int]]:
    """Return the dimensions of the grid that make up each dimension of `loc`; those of size 1 may be in any group."""
    groups: list[list[int]] = []
    start = 0
    for size in x.loc.shape:
        group: list[int] = []
        product = 1
        while start < len(x.grid) and (product != size or (size == 1 and not group and x.grid[start] == 1)):
            group.append(start)
            product *= x.grid[start]
            start += 1
        groups.append(group)
    if groups:
        groups[-1] += range(start, len(x.grid))
    return groups


def regular_along(x: Moments, dim: int) -> tuple[Moments, int]:
    """Make one dimension of `loc` a single dimension of the grid, and return its number there."""
    assert x.common is not None
    groups = groups_of(x)
    place = sum([len(group) for group in groups[:dim]])
    if len(groups[dim]) == 1:
        return x, place
    sizes = list(x.common.shape[1:])
    own = [sizes[g] for g in groups[dim]]
    if math.prod(own) != 1:
        own = [x.grid[g] for g in groups[dim]]
    end = place + len(own)
    expanded = x.common.expand(-1, *sizes[:place], *own, *sizes[end:])
    common = expanded.reshape(-1, *sizes[:place], math.prod(own), *sizes[end:])
    return x.like(x.loc, x.rest, common, (*x.grid[:place], x.shape[dim], *x.grid[end:])), place


def along(x: Moments, dim: int, move: Callable[[Tensor, int], Tensor]) -> Moments:
    """Apply a function that selects elements along one dimension; a common part that is constant there stays."""
    dim %= x.dim()
    loc, independent = move(x.loc, dim), move(x.rest, dim)
    if x.common is None:
        return x.like(loc, independent)
    x, place = regular_along(x, dim)
    assert x.common is not None
    common = x.common if x.common.shape[place + 1] == 1 else move(x.common, place + 1)
    return x.like(loc, independent, common, (*x.grid[:place], loc.shape[dim], *x.grid[place + 1 :]))


def settled(x: Moments, dims: Iterable[int]) -> Moments:
    """Replace the common part by its mean along dimensions, like `Moments.settled` but without expanding it."""
    if x.common is None:
        return x
    groups = groups_of(x)
    over = [g + 1 for dim in dims for g in groups[dim % x.dim()] if x.common.shape[g + 1] != 1]
    if not over:
        return x
    common = x.within.mean(x.common, over, lead=1)
    lost = (x.common - common).square().sum(0).expand(x.grid).reshape(x.shape)
    return x.like(x.loc, x.rest + lost, common, x.grid)


# -- the order of dimensions ------------------------------------------------------------------------------------------


@moment_rule(*named("permute"))
def permute(input: Moments, *dims: Any) -> Moments:
    """Permute dimensions, together with the dimensions of the grid that make them up."""
    order = [dim % input.dim() for dim in unpacked(dims)]
    loc, independent = input.loc.permute(order), input.rest.permute(order)
    if input.common is None:
        return input.like(loc, independent)
    groups = groups_of(input)
    places = [place for dim in order for place in groups[dim]]
    common = input.common.permute(0, *[place + 1 for place in places])
    return input.like(loc, independent, common, tuple([input.grid[place] for place in places]))


@moment_rule(*named("transpose", "swapaxes", "swapdims"))
def transpose(input: Moments, dim0: int, dim1: int) -> Moments:
    """Swap two dimensions."""
    order = list(range(input.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(input, order)


@moment_rule(*named("t"))
def t(input: Moments) -> Moments:
    """Transpose a matrix."""
    return input if input.dim() < 2 else transpose(input, 0, 1)


@moment_rule(*named("movedim", "moveaxis"))
def movedim(input: Moments, source: Any, destination: Any) -> Moments:
    """Move dimensions; the others keep their order."""
    sources = [dim % input.dim() for dim in unpacked([source])]
    places = [dim % input.dim() for dim in unpacked([destination])]
    rest = [dim for dim in range(input.dim()) if dim not in sources]
    order = [sources[places.index(place)] if place in places else rest.pop(0) for place in range(input.dim())]
    return permute(input, order)


# -- reshapes ---------------------------------------------------------------------------------------------------------


def _reshape(name: str, in_place: bool = False) -> None:
    @moment_rule(*named(name))
    def reshape(input: Any, *args: Any, **kwargs: Any) -> Any:
        given = [loc_of(arg) for arg in args]
        if not isinstance(input, Moments):  # t.view_as(x)
            return getattr(input, name)(*given, **kwargs)
        if name == "view" and args and isinstance(args[0], torch.dtype):
            raise unsupported("torch.Tensor.view with another dtype")
        shaped = input.reshaped(getattr(input.loc, name.removesuffix("_"))(*given, **kwargs))
        return input.assign(shaped) if in_place else shaped


for _name in "reshape view flatten unflatten ravel view_as reshape_as squeeze unsqueeze".split():
    _reshape(_name)
for _name in ("squeeze_", "unsqueeze_"):
    _reshape(_name, in_place=True)


@moment_rule(*named("pixel_shuffle"))
def pixel_shuffle(input: Moments, upscale_factor: int) -> Moments:
    """Move channels to positions."""
    *rest, channels, height, width = input.shape
    r, n = upscale_factor, len(rest)
    fine = input.reshape(*rest, channels // r**2, r, r, height, width)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return permute(fine, order).reshaped(F.pixel_shuffle(input.loc, r))


@moment_rule(*named("pixel_unshuffle"))
def pixel_unshuffle(input: Moments, downscale_factor: int) -> Moments:
    """Move positions to channels."""
    *rest, channels, height, width = input.shape
    r, n = downscale_factor, len(rest)
    fine = input.reshape(*rest, channels, height // r, r, width // r, r)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return permute(fine, order).reshaped(F.pixel_unshuffle(input.loc, r))


@moment_rule(*named("channel_shuffle", "native_channel_shuffle"))
def channel_shuffle(input: Moments, groups: int) -> Moments:
    """Interleave groups of channels."""
    batch, channels, *rest = input.shape
    fine = input.reshape(batch, groups, channels // groups, *rest)
    return transpose(fine, 1, 2).reshaped(F.channel_shuffle(input.loc, groups))


# -- repetition -------------------------------------------------------------------------------------------------------


@moment_rule(*named("expand", "broadcast_to", "expand_as"))
def expand(input: Any, *sizes: Any) -> Any:
    """Repeat along dimensions of size 1; copies share their common noise, but not their independent noise."""
    shape = list(loc_of(sizes[0]).shape) if isinstance(sizes[0], Moments | Tensor) else unpacked(sizes)
    if not isinstance(input, Moments):
        return input.expand(shape)
    loc = input.loc.expand(shape)
    x = input.reshaped(input.loc.reshape([1] * (len(shape) - input.dim()) + list(input.shape)))
    independent = x.rest.expand(shape)
    if x.common is None:
        return x.like(loc, independent)
    changed = [dim for dim in range(x.dim()) if x.shape[dim] != loc.shape[dim]]
    for dim in changed:
        x, _ = regular_along(x, dim)
    groups, grid = groups_of(x), list(x.grid)
    for dim in changed:
        grid[groups[dim][0]] = loc.shape[dim]
    return x.like(loc, independent, x.common, tuple(grid))


@moment_rule(*named("repeat", "tile"))
def repeat(input: Moments, *repeats: Any, dims: Any = None) -> Moments:
    """Concatenate copies."""
    counts = unpacked(repeats or (dims,))
    counts = [1] * (input.dim() - len(counts)) + counts
    x = input.reshaped(input.loc.reshape([1] * (len(counts) - input.dim()) + list(input.shape)))
    for dim, count in enumerate(counts):
        if count != 1:
            x = along(x, dim, lambda tensor, place, count=count: torch.cat([tensor] * count, place))  # type: ignore[misc]
    return x


@moment_rule(*named("repeat_interleave"))
def repeat_interleave(
    input: Moments, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Moments:
    """Repeat each element."""
    x = input if dim is not None else input.ravel()
    return along(x, dim or 0, lambda tensor, place: tensor.repeat_interleave(repeats, place, output_size=output_size))


@moment_rule(*named("roll"))
def roll(input: Moments, shifts: Any, dims: Any = None) -> Moments:
    """Shift elements along dimensions, with wrap-around."""
    if dims is None or dims == ():
        return along(input.ravel(), 0, lambda tensor, place: tensor.roll(shifts, place)).reshape(input.shape)
    for dim, shift in zip(unpacked([dims]), unpacked([shifts]), strict=True):
        input = along(input, dim, lambda tensor, place, shift=shift: tensor.roll(shift, place))  # type: ignore[misc]
    return input


@moment_rule(*named("flip"))
def flip(input: Moments, *dims: Any) -> Moments:
    """Reverse the order of elements along dimensions."""
    for dim in unpacked(dims):
        input = along(input, dim, lambda tensor, place: tensor.flip(place))
    return input


@moment_rule(*named("diagonal"))
def diagonal(input: Moments, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Moments:
    """Return a diagonal."""
    return input.viewed(lambda tensor: tensor.diagonal(offset, dim1, dim2))


@moment_rule(torch._nested_tensor_from_mask_left_aligned)
def _left_aligned(*args: Any) -> bool:
    """Return False, so that `nn.TransformerEncoder` does not convert padded batches to nested tensors."""
    return False
