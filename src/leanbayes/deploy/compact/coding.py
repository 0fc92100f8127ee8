"""Entropy coding of integers with the range coder of `constriction`; decoding is exact on every machine.

A model of symbols is one level per symbol: 0 if it never occurs, otherwise its frequency is 2^(level/8), computed in
integer arithmetic. Files store the levels. The models of the coder are ratios of these frequencies, which are exact.
Every `unpack` raises ValueError for bytes that its `pack` cannot have written, and allocates no array larger than
requested.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from leanbayes.errors import LeanBayesError, missing_package

Array = npt.NDArray[Any]
STEPS = 8  # levels per factor of 2: rounding to them costs 0.0005 bits per symbol
_RAW, _CODED = 0, 1
_LENGTH = struct.Struct("<I")
MOST_SYMBOLS = 1 << 20  # in an alphabet: the probabilities of the coder are multiples of 2^-24


def power(eighths: int, shift: int) -> int:
    """⌊2^(eighths/8 + shift)⌋, in integer arithmetic."""
    root = 1 << (eighths + STEPS * shift)
    for _ in range(3):
        root = math.isqrt(root)
    return root


_FREQUENCIES = np.array([0, *(power(level - 1, 8) for level in range(1, 256))], dtype=np.float64)


def levels_of(counts: Array) -> Array:
    """Round the counts of symbols to levels."""
    found = np.zeros(len(counts), np.uint8)
    some = counts > 0
    found[some] = np.minimum(1 + np.rint(STEPS * np.log2(counts[some])), 255)
    return found


def bits_for(counts: Array, levels: Array) -> float:
    """Return the bits of symbols with these counts under a model; infinite if the model lacks one of them."""
    frequencies, some = _FREQUENCIES[levels], counts > 0
    if not frequencies[some].all():
        return math.inf
    return float(counts[some] @ (math.log2(max(frequencies.sum(), 1)) - np.log2(frequencies[some])))


def _streams() -> Any:
    try:
        from constriction import stream
    except ModuleNotFoundError:
        raise missing_package("Compact files need constriction", "compress") from None
    return stream


class Writer:
    """Writes symbols and bits to one stream."""

    def __init__(self) -> None:
        self._models = _streams().model
        self._encoder = _streams().queue.RangeEncoder()

    def symbols(self, values: Array, levels: Array) -> None:
        """Write symbols with one model."""
        used = np.flatnonzero(levels)
        if len(used) < 2 or not len(values):  # there is no information
            return
        numbers = np.zeros(len(levels), np.int32)
        numbers[used] = np.arange(len(used), dtype=np.int32)
        self._encoder.encode(numbers[values], self._models.Categorical(_FREQUENCIES[levels[used]], perfect=False))

    def bits(self, values: Array, probability: Array | float) -> None:
        """Write bits with the probability of a one, a common one or one per bit."""
        values = values.astype(np.int32)
        if isinstance(probability, float):
            self._encoder.encode(values, self._models.Bernoulli(probability, perfect=False))
        else:
            self._encoder.encode(values, self._models.Bernoulli(perfect=False), probability)

    def finish(self) -> bytes:
        """Return the whole stream."""
        return self._encoder.get_compressed().astype("<u4").tobytes()


class Reader:
    """Reads what a `Writer` wrote, in the same order."""

    def __init__(self, data: bytes) -> None:
        if len(data) % 4:
            raise ValueError("a coded stream is truncated")
        self._models = _streams().model
        self._decoder = _streams().queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))

    def symbols(self, count: int, levels: Array) -> Array:
        """Read `count` symbols."""
        used = np.flatnonzero(levels).astype(np.int32)
        if not count or len(used) == 1:
            return np.full(count, used[0] if count else 0, np.int32)
        if not len(used):
            raise ValueError("a model has no symbols")
        return used[self._decode(self._models.Categorical(_FREQUENCIES[levels[used]], perfect=False), count)]

    def bits(self, count: int, probability: Array | float) -> Array:
        """Read `count` bits."""
        if isinstance(probability, float):
            return self._decode(self._models.Bernoulli(probability, perfect=False), count).astype(bool)
        return self._decode(self._models.Bernoulli(perfect=False), probability).astype(bool)

    def _decode(self, *how: Any) -> Array:
        try:
            return self._decoder.decode(*how)
        except AssertionError:  # constriction raises it for an invalid stream
            raise ValueError("a coded stream is damaged") from None


# -- bytes ------------------------------------------------------------------------------------------------------------


class Cursor:
    """A position in bytes, which advances as they are read."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        end = self._place + count
        if end > len(self._data):
            raise ValueError("a part is too short")
        found, self._place = self._data[self._place : end], end
        return found

    def block(self) -> bytes:
        """Return the next bytes that `block` wrote."""
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        return self.take(length)

    def rest(self) -> bytes:
        """Return all remaining bytes."""
        return self.take(len(self._data) - self._place)

    def done(self) -> None:
        """Raise an error if bytes remain."""
        if self._place != len(self._data):
            raise ValueError("a part is too long")


def block(data: bytes) -> bytes:
    """Return bytes with their length in front."""
    return _LENGTH.pack(len(data)) + data


def pack_bytes(values: Array) -> bytes:
    """Encode numbers of one byte with their own model, or store them as they are if that is not longer."""
    plain = bytes([_RAW]) + values.tobytes()
    if not len(values):
        return plain
    low, high = int(values.min()), int(values.max())
    levels = levels_of(np.bincount(values, minlength=high + 1))
    writer = Writer()
    writer.symbols(values, levels)
    coded = bytes([_CODED, low, high]) + levels[low:].tobytes() + writer.finish()
    return min(plain, coded, key=len)


def unpack_bytes(data: bytes, count: int) -> Array:
    """Decode `count` numbers of one byte."""
    cursor = Cursor(data)
    (kind,) = cursor.take(1)
    if kind == _RAW:
        found = np.frombuffer(cursor.take(count), np.uint8)
        cursor.done()
        return found
    low, high = cursor.take(2)
    if kind != _CODED or high < low:
        raise ValueError("a part is coded in an unknown way")
    levels = np.zeros(high + 1, np.uint8)
    levels[low:] = np.frombuffer(cursor.take(high + 1 - low), np.uint8)
    return Reader(cursor.rest()).symbols(count, levels).astype(np.uint8)


def pack(values: Array) -> bytes:
    """Encode numbers of any dtype: the first bytes of all, the second bytes of all, and so on, with `pack_bytes`."""
    flat = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    planes = flat.view(np.uint8).reshape(-1, values.dtype.itemsize).T
    return b"".join(block(pack_bytes(np.ascontiguousarray(plane))) for plane in planes)


def unpack(data: bytes, dtype: npt.DTypeLike, count: int) -> Array:
    """Decode `count` numbers of a dtype."""
    cursor, size = Cursor(data), np.dtype(dtype).itemsize
    planes = [unpack_bytes(cursor.block(), count) for _ in range(size)]
    cursor.done()
    stacked = np.ascontiguousarray(np.stack(planes, 1)) if count else np.zeros((0, size), np.uint8)
    return stacked.view(np.dtype(dtype).newbyteorder("<")).reshape(-1).astype(dtype, copy=False)


# -- symbols in groups ------------------------------------------------------------------------------------------------


def pack_symbols(values: Array, sizes: Sequence[int], alphabet: int) -> bytes:
    """Encode symbols 0 … alphabet-1 in groups; a group has its own model if that is shorter."""
    if alphabet > MOST_SYMBOLS:
        raise LeanBayesError(
            f"A compact file holds at most {MOST_SYMBOLS:,} shared codes: share with fewer components."
        )
    groups = np.split(values, np.cumsum(sizes)[:-1]) if len(sizes) else []
    counts = [np.bincount(group, minlength=alphabet) for group in groups]
    common = levels_of(sum(counts, np.zeros(alphabet, np.int64)))
    own = [levels_of(count) for count in counts]
    saved = [bits_for(count, common) - bits_for(count, levels) for count, levels in zip(counts, own, strict=True)]
    packed = [pack_bytes(levels) for levels in own]
    chosen = [gain > 8 * len(block(table)) for gain, table in zip(saved, packed, strict=True)]
    together = [count for count, alone in zip(counts, chosen, strict=True) if not alone]
    common = levels_of(sum(together, np.zeros(alphabet, np.int64)))
    writer = Writer()
    for group, levels, alone in zip(groups, own, chosen, strict=True):
        writer.symbols(group, levels if alone else common)
    tables = [pack_bytes(common), *(table for table, alone in zip(packed, chosen, strict=True) if alone)]
    return b"".join([pack_flags(chosen), *map(block, tables), writer.finish()])


def unpack_symbols(data: bytes, sizes: Sequence[int], alphabet: int) -> Array:
    """Decode symbols in groups of these sizes."""
    if alphabet > MOST_SYMBOLS:
        raise ValueError("an alphabet is too large")
    cursor = Cursor(data)
    chosen = list(unpack_flags(cursor, len(sizes)))
    common, *tables = [cursor.block() for _ in range(1 + sum(chosen))]
    reader, own, shared = Reader(cursor.rest()), iter(tables), unpack_bytes(common, alphabet)
    parts = [  # one table at a time is in memory: a few bytes can encode one of the size of the alphabet
        reader.symbols(size, unpack_bytes(next(own), alphabet) if alone else shared)
        for size, alone in zip(sizes, chosen, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int32), *parts])


def pack_flags(flags: Sequence[bool]) -> bytes:
    """Encode eight flags per byte."""
    return np.packbits(np.array(flags, bool)).tobytes()


def unpack_flags(cursor: Cursor, count: int) -> Iterator[bool]:
    """Decode `count` flags."""
    found = np.frombuffer(cursor.take(-(-count // 8)), np.uint8)
    return map(bool, np.unpackbits(found, count=count))
