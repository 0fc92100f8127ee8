"""Coding of the mask of nonzero weights: the log-odds of a weight are a sum of levels, one per coordinate.

Each layer uses the shortest of three models: one level for all weights; one per row (output); or the sum of one level
per row, per column (input) and per position in the kernel. Levels are eighths of a factor of 2, or quarters in layers
with many levels, where rounding saves more bits in the levels than it costs in the mask.
"""

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

from leanbayes.deploy.compact.coding import (
    STEPS,
    Array,
    Cursor,
    Reader,
    Writer,
    block,
    pack_bytes,
    power,
    unpack_bytes,
)

_NONE, _ALL, _LAYER, _ROWS, _AXES = range(5)
_MOST = 20 * STEPS  # log-odds, in levels
_ODDS = [(power(level, 40), power(0, 40)) for level in range(-_MOST, _MOST + 1)]
_PROBABILITY = np.array([one / (one + other) for one, other in _ODDS])  # a ratio of integers is rounded exactly
_UNIT = {_LAYER: 1, _ROWS: STEPS // 4, _AXES: STEPS // 4}
_BIAS = 128
_SWEEPS, _RIDGE = 4, 0.5
Shape = tuple[int, ...]


def pack_masks(mask: Array, shapes: Sequence[Shape]) -> bytes:
    """Encode the mask of all weights, with the shapes of the layers."""
    kinds, levels, writer = [], [np.zeros(0, np.int16)], Writer()
    for part, shape in zip(_parts(mask, shapes), shapes, strict=True):
        layer = part.reshape(_axes(shape))
        if layer.all() or not layer.any():
            kinds.append(_ALL if layer.all() else _NONE)
            continue
        choices = {kind: _levels(kind, layer) for kind in (_LAYER, _ROWS, _AXES)}
        kind = min(choices, key=lambda kind: _bits(kind, layer, choices[kind]))
        writer.bits(part, _probabilities(kind, choices[kind], layer.shape))
        kinds.append(kind)
        levels += [axis.ravel() for axis in choices[kind]]
    numbers = (np.concatenate(levels) + _BIAS).astype(np.uint8)
    return bytes(kinds) + block(pack_bytes(numbers)) + writer.finish()


def unpack_masks(data: bytes, shapes: Sequence[Shape]) -> Array:
    """Decode the mask of all weights; raise ValueError for bytes that `pack_masks` cannot have written."""
    cursor = Cursor(data)
    kinds = list(cursor.take(len(shapes)))
    if max(kinds, default=0) > _AXES:
        raise ValueError("a mask is coded in an unknown way")
    axes = [_shapes_of_levels(kind, _axes(shape)) for kind, shape in zip(kinds, shapes, strict=True)]
    sizes = [math.prod(axis) for layer in axes for axis in layer]
    numbers = unpack_bytes(cursor.block(), sum(sizes)).astype(np.int16) - _BIAS
    pieces = iter(np.split(numbers, np.cumsum(sizes)[:-1]) if sizes else [])
    reader, parts = Reader(cursor.rest()), [np.zeros(0, bool)]
    for kind, shape, layer in zip(kinds, shapes, axes, strict=True):
        size = math.prod(shape)
        if kind in (_NONE, _ALL):
            parts.append(np.full(size, kind == _ALL))
            continue
        levels = [next(pieces).reshape(axis) for axis in layer]
        parts.append(reader.bits(size, _probabilities(kind, levels, _axes(shape))))
    return np.concatenate(parts)


def _parts(mask: Array, shapes: Sequence[Shape]) -> list[Array]:
    return np.split(mask, np.cumsum([math.prod(shape) for shape in shapes])[:-1]) if shapes else []


def _axes(shape: Shape) -> Shape:
    """Return the shape without dimensions of size 1."""
    return tuple(size for size in shape if size > 1) or (1,)


def _shapes_of_levels(kind: int, shape: Shape) -> list[Shape]:
    """Return the shapes of the levels of a layer, which broadcast in their sum."""
    along = {_LAYER: [-1], _ROWS: [0], _AXES: [*range(len(shape))]}.get(kind, [])
    return [tuple(size if axis == place else 1 for place, size in enumerate(shape)) for axis in along]


# -- from levels to probabilities -------------------------------------------------------------------------------------


def _index(kind: int, levels: Sequence[Array], shape: Shape) -> Array:
    """Return the index of each weight's probability in the table."""
    total = _UNIT[kind] * reduce(np.add, levels)
    return np.broadcast_to(np.clip(total, -_MOST, _MOST) + _MOST, shape)


def _probabilities(kind: int, levels: Sequence[Array], shape: Shape) -> Array | float:
    if kind == _LAYER:
        return float(_PROBABILITY[_index(kind, levels, levels[0].shape)].item())
    return _PROBABILITY[_index(kind, levels, shape).ravel()]


def _bits(kind: int, layer: Array, levels: Sequence[Array]) -> float:
    """Return the bits of a layer, including its levels."""
    index = _index(kind, levels, layer.shape)
    ones, every = (np.bincount(places.ravel(), minlength=len(_ODDS)) for places in (index[layer], index))
    coded = -(ones @ np.log2(_PROBABILITY)) - ((every - ones) @ np.log2(1 - _PROBABILITY))
    return float(coded) + _entropy(np.concatenate([axis.ravel() for axis in levels]))


def _entropy(levels: Array) -> float:
    counts = np.unique(levels, return_counts=True)[1]
    return float(counts @ np.log2(levels.size / counts))


# -- from a mask to levels --------------------------------------------------------------------------------------------


def _levels(kind: int, layer: Array) -> list[Array]:
    """Choose the levels of one kind for a layer."""
    if kind == _AXES:
        log_odds = _fit(layer)
    else:
        others = tuple(range(0 if kind == _LAYER else 1, layer.ndim))
        size = layer.size if kind == _LAYER else layer[0].size
        share = (layer.sum(others, keepdims=True) + 0.5) / (size + 1)
        log_odds = [np.log(share / (1 - share))]
    step = _UNIT[kind] * math.log(2) / STEPS
    return [np.clip(np.rint(axis / step), -_BIAS, _BIAS - 1).astype(np.int16) for axis in log_odds]


def _fit(layer: Array) -> list[Array]:
    """Fit log-odds that are a sum over the coordinates, by Newton steps for one coordinate after the other."""
    share = layer.mean()
    found = [np.zeros(shape, np.float32) for shape in _shapes_of_levels(_AXES, layer.shape)]
    found[0] += math.log(share / (1 - share))
    start = [axis.copy() for axis in found]
    for _ in range(_SWEEPS):
        for place, axis in enumerate(found):
            probability = 1 / (1 + np.exp(-reduce(np.add, found)))
            others = tuple(other for other in range(layer.ndim) if other != place)
            slope = (layer - probability).sum(others, keepdims=True) - _RIDGE * (axis - start[place])
            curvature = (probability * (1 - probability)).sum(others, keepdims=True) + _RIDGE
            found[place] = axis + np.clip(slope / curvature, -1.5, 1.5)
    return found
