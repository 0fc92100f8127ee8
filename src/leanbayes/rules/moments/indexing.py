"""Moments through indexing, slicing and splitting."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.rules.moments.registry import moment_rule, named
from leanbayes.rules.moments.shape import along, expand
from leanbayes.rules.moments.value import Moments

_ALL = slice(None)


def _entries(key: Any, dims: int) -> list[Any]:
    """Expand an index to one entry per dimension, and None for each new dimension; masks become indices."""
    key = list(key) if isinstance(key, tuple) else [key]
    entries: list[Any] = []
    for entry in key:
        if entry is None or entry is Ellipsis or (isinstance(entry, int | slice) and not isinstance(entry, bool)):
            entries.append(entry)
            continue
        index = torch.as_tensor(entry)
        entries += index.nonzero(as_tuple=True) if index.dtype == torch.bool else [index]
    missing = dims - sum([entry is not None and entry is not Ellipsis for entry in entries])
    place = [number for number, entry in enumerate(entries) if entry is Ellipsis]
    if place:
        return entries[: place[0]] + [_ALL] * missing + entries[place[0] + 1 :]
    return entries + [_ALL] * missing


@moment_rule(*named("__getitem__"))
def getitem(input: Moments, key: Any) -> Moments:
    """Index a value; a common part that is constant along a dimension is not indexed there."""
    loc = input.loc[key]
    if input.common is None:
        return input.like(loc, input.rest[key])
    entries = _entries(key, input.dim())
    if any([isinstance(entry, Tensor) for entry in entries]):
        return _indexed(input.plain(), loc, key, entries)
    x = input
    for dim, entry in enumerate([entry for entry in entries if entry is not None]):
        if entry != _ALL:
            part = entry if isinstance(entry, slice) else slice(entry, entry + 1 or None)
            x = along(x, dim, lambda tensor, place, part=part: tensor[(_ALL,) * place + (part,)])  # type: ignore[misc]
    return x.reshaped(loc)


def _indexed(x: Moments, loc: Tensor, key: Any, entries: list[Any]) -> Moments:
    """Index by tensors; where the common part is constant, it is indexed by 0."""
    assert x.common is not None
    sizes = list(x.common.shape[1:])
    small: list[Any] = [_ALL]
    for entry in entries:
        if entry is None:
            small.append(None)
            continue
        constant = sizes.pop(0) == 1
        if constant and isinstance(entry, Tensor):
            entry = entry.new_zeros([1] * entry.dim())
        elif constant:
            entry = _ALL if isinstance(entry, slice) else 0
        small.append(entry)
    common = x.common[tuple(small)]
    if _leads(entries):  # then torch puts the dimensions of the tensor indices first, before the probes
        count = max([entry.dim() for entry in entries if isinstance(entry, Tensor)])
        common = common.movedim(count, 0)
    return x.like(loc, x.rest[key], common)


def _leads(entries: Sequence[Any]) -> bool:
    """Whether tensor indices are separated by slices, so that their dimensions come first in the result."""
    kept = [entry for entry in entries if not isinstance(entry, int)]  # torch applies integer indices first
    places = [number for number, entry in enumerate(kept) if isinstance(entry, Tensor)]
    return places[-1] - places[0] + 1 != len(places)


@moment_rule(*named("select"))
def select(input: Moments, dim: int, index: int) -> Moments:
    """Select one entry along a dimension."""
    return getitem(input, (_ALL,) * (dim % input.dim()) + (index,))


@moment_rule(*named("narrow"))
def narrow(input: Moments, dim: int, start: int, length: int) -> Moments:
    """Select a range along a dimension."""
    return along(input, dim, lambda tensor, place: tensor.narrow(place, start, length))


@moment_rule(*named("index_select"))
def index_select(input: Moments, dim: int, index: Tensor) -> Moments:
    """Select entries along a dimension."""
    return along(input, dim, lambda tensor, place: tensor.index_select(place, index))


@moment_rule(*named("unbind"))
def unbind(input: Moments, dim: int = 0) -> tuple[Moments, ...]:
    """Split into single entries along a dimension."""
    return tuple([select(input, dim, index) for index in range(input.shape[dim])])


def _pieces(x: Moments, dim: int, locs: Sequence[Tensor]) -> tuple[Moments, ...]:
    start, pieces = 0, []
    for loc in locs:
        length = loc.shape[dim]
        piece = narrow(x, dim, start, length)
        pieces.append(piece.like(loc, piece.rest, piece.common, piece.grid))
        start += length
    return tuple(pieces)


@moment_rule(*named("split", "split_with_sizes", "unsafe_split"))
def split(input: Moments, split_size: Any, dim: int = 0) -> tuple[Moments, ...]:
    """Split into pieces of given sizes."""
    return _pieces(input, dim, input.loc.split(split_size, dim))


@moment_rule(*named("chunk", "unsafe_chunk"))
def chunk(input: Moments, chunks: int, dim: int = 0) -> tuple[Moments, ...]:
    """Split into a number of pieces."""
    return _pieces(input, dim, input.loc.chunk(chunks, dim))


@moment_rule(*named("tensor_split"))
def tensor_split(input: Moments, indices_or_sections: Any, dim: int = 0) -> tuple[Moments, ...]:
    """Split at given positions, or into a number of pieces of nearly equal size."""
    return _pieces(input, dim, input.loc.tensor_split(indices_or_sections, dim))


@moment_rule(*named("gather"))
def gather(input: Moments, dim: int, index: Tensor) -> Moments:
    """Select elements along a dimension, by one index per element of the result."""
    x = input.plain()
    dim %= x.dim()
    loc, independent = x.loc.gather(dim, index), x.independent.gather(dim, index)
    if x.common is None:
        return x.like(loc, independent)
    common, small = x.common, index
    for other in [place for place in range(x.dim()) if place != dim]:
        if common.shape[other + 1] != 1:
            common = common.narrow(other + 1, 0, index.shape[other])
        elif index.stride(other) == 0:  # the same index at all positions, as a result of `expand`
            small = small.narrow(other, 0, 1)
    if common.shape[dim + 1] != 1:
        sizes = [common.shape[place + 1] if place == dim else size for place, size in enumerate(small.shape)]
        common = common.expand(-1, *sizes).gather(dim + 1, small.expand(len(common), *small.shape))
    return x.like(loc, independent, common)


@moment_rule(*named("take_along_dim"))
def take_along_dim(input: Moments, indices: Tensor, dim: int | None = None) -> Moments:
    """Select elements along a dimension, by indices that broadcast."""
    if dim is None:
        return gather(input.ravel(), 0, indices.ravel())
    dim %= input.dim()
    sizes = [1 if place == dim else size for place, size in enumerate(input.shape)]
    shape = torch.broadcast_shapes(sizes, [1 if p == dim else n for p, n in enumerate(indices.shape)])
    whole, wanted = list(shape), list(shape)
    whole[dim], wanted[dim] = input.shape[dim], indices.shape[dim]
    return gather(expand(input, whole), dim, indices.expand(wanted))
