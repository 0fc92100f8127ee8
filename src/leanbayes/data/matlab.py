"""Read arrays of numbers from Matlab files of version 5, with memory in proportion to the size of the file.

128 bytes  header, which ends with the version and the byte order
elements   a tag (type and length), and the content: an array, often deflated
array      elements again: flags, dimensions, name and values
"""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leanbayes.data.reading import Array, damaged, most_decompressed, read_bytes

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMERIC_CLASSES = range(6, 16)  # not text, cells, structures or objects


class _Element(NamedTuple):
    kind: int
    content: memoryview


def read_matlab(path: Path, names: tuple[str, ...]) -> dict[str, Array]:
    """Read the named arrays of real numbers; others are not decompressed."""
    content = memoryview(read_bytes(path))
    try:
        order = {b"IM": "<", b"MI": ">"}.get(bytes(content[126:_HEADER]))
        if order is None:
            raise ValueError("it is not a Matlab file of version 5")
        found = {}
        for element in _elements(content[_HEADER:], order):
            start = _inflated(element.content, 1 << 10) if element.kind == _COMPRESSED else element.content
            kind, size, body = _tag(start, order) if element.kind == _COMPRESSED else (element.kind, 0, start)
            if kind != _MATRIX:
                continue
            name = _name(body, order)
            if name in names and element.kind == _COMPRESSED:
                most = most_decompressed(len(element.content))
                if size > most:
                    raise ValueError(f"{name} has {size} bytes, but at most {most} can follow")
                body = _whole(element.content, size)
            if name in names:
                found[name] = _array(body, order)
    except Exception as error:  # a damaged file can make the parser raise anything
        raise damaged(path, error) from None
    for name in names:
        if name not in found:
            raise damaged(path, f"it has no array {name}")
    return found


def _inflated(packed: memoryview, most: int) -> memoryview:
    return memoryview(zlib.decompressobj().decompress(packed, most))


def _whole(packed: memoryview, size: int) -> memoryview:
    """Decompress an array of some bytes, without its tag, and check that it ends there."""
    inflate = zlib.decompressobj()
    values = inflate.decompress(packed, 8 + size)
    if len(values) != 8 + size or inflate.decompress(inflate.unconsumed_tail, 1) or not inflate.eof:
        raise ValueError("an array does not have the length in its tag")
    return memoryview(values)[8:]


def _tag(data: memoryview, order: str) -> tuple[int, int, memoryview]:
    """Return the type and the length of an element, and what follows its tag."""
    kind, size = (int(number) for number in np.frombuffer(data[:8], f"{order}u4"))
    return kind, size, data[8:]


def _elements(data: memoryview, order: str) -> Iterator[_Element]:
    while len(data):
        kind, size, rest = _tag(data, order)
        if kind >> 16:  # a short element, with its content in the tag
            yield _Element(kind & 0xFFFF, data[4 : 4 + (kind >> 16)])
            data = rest
            continue
        if size > len(rest):
            raise ValueError("it is truncated")
        yield _Element(kind, rest[:size])
        data = rest[size if kind == _COMPRESSED else -(-size // 8) * 8 :]


def _integers(element: _Element, order: str) -> list[int]:
    return [int(number) for number in np.frombuffer(element.content, order + _TYPES[element.kind])]


def _name(body: memoryview, order: str) -> str:
    """Return the name of an array from its first bytes, which may end anywhere after it."""
    place = body
    for _ in range(2):  # flags and dimensions
        kind, size, rest = _tag(place, order)
        place = rest if kind >> 16 else rest[-(-size // 8) * 8 :]
    kind, size, rest = _tag(place, order)
    return bytes(place[4 : 4 + (kind >> 16)] if kind >> 16 else rest[:size]).decode("latin1")


def _array(body: memoryview, order: str) -> Array:
    """Return an array of real numbers."""
    flags, sizes, _, values, *more = _elements(body, order)
    shape = _integers(sizes, order)
    if more or _integers(flags, order)[0] & 0xFF not in _NUMERIC_CLASSES or min(shape) < 0:
        raise ValueError("an array is not one of real numbers")
    dtype: np.dtype[Any] = np.dtype(order + _TYPES[values.kind])
    if math.prod(shape) * dtype.itemsize != len(values.content):
        raise ValueError(f"an array of shape {tuple(shape)} has {len(values.content)} bytes")
    return np.frombuffer(values.content, dtype).reshape(shape, order="F")
