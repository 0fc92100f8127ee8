"""The container of a compact file: named parts behind a JSON header, and one checksum of everything.

    8 bytes   magic
    2, 2, 4   version, nothing, and the length of the packed header
    header    JSON, deflated: settings, and of each part its name, dtype, shape, coder, offset and length
    parts     one after the other, without gaps
    32 bytes  SHA-256 of all before

Sizes are checked before anything is made of that size. Nothing in it is ever executed.
"""

import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.errors import FileFormatError
from leanbayes.files import written_whole

MAGIC = b"\x93LEANBYC"
VERSION = 1
_START = struct.Struct("<8sHHI")
_DIGEST = hashlib.sha256().digest_size
_MOST_HEADER, _MOST_RATIO, _MOST_NUMBERS = 1 << 24, 100, 1 << 40
DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")


@dataclass(frozen=True)
class Part:
    """Bytes that hold numbers of a type and shape, coded in some way; raw ones are the numbers themselves."""

    dtype: str
    shape: tuple[int, ...]
    coder: str
    data: bytes

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def needed(parts: Mapping[str, Part], name: str, coder: str, shape: tuple[int, ...]) -> Part:
    """Return a part, which must be one that is coded in this way and has this shape."""
    part = parts.get(name)
    if part is None or part.coder != coder or part.shape != shape:
        raise ValueError(f"{name} is not what the network needs")
    return part


def is_compact(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as such a container does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def write(path: str | os.PathLike[str], settings: Mapping[str, Any], parts: Mapping[str, Part]) -> dict[str, int]:
    """Write a container, whole or not at all; returns the bytes of each part, and of what is around them."""
    rows, offset = [], 0
    for name, part in parts.items():
        rows.append([name, part.dtype, list(part.shape), part.coder, offset, len(part.data)])
        offset += len(part.data)
    text = json.dumps({"settings": settings, "parts": rows}, separators=(",", ":"))
    header = zlib.compress(text.encode(), 9)
    start = _START.pack(MAGIC, VERSION, 0, len(header))
    whole = b"".join([start, header, *(part.data for part in parts.values())])
    with written_whole(path) as temporary:
        temporary.write_bytes(whole + hashlib.sha256(whole).digest())
    around = _START.size + len(header) + _DIGEST
    return {"header": around, **{name: len(part.data) for name, part in parts.items()}}


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Part]]:
    """Read the settings and the parts of a container, all of whose bytes are as they were written."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileFormatError(f"Cannot read {path} ({error.strerror or error}): check the path.") from None
    try:
        return _parsed(data)
    except ValueError as error:
        if isinstance(error, FileFormatError):
            raise FileFormatError(f"{path} {error}") from None
        raise FileFormatError(f"{path} is damaged ({error}): compress the model again.") from None


def _parsed(data: bytes) -> tuple[dict[str, Any], dict[str, Part]]:
    if len(data) < _START.size + _DIGEST:
        raise ValueError("it is truncated")
    magic, version, _, length = _START.unpack_from(data)
    if magic != MAGIC:
        raise FileFormatError("is no compact file of leanbayes: check the path.")
    body, end = memoryview(data), len(data) - _DIGEST
    if hashlib.sha256(body[:end]).digest() != body[end:]:
        raise ValueError("its checksum is not that of its bytes")
    if version != VERSION:
        raise FileFormatError(f"has the format version {version}, and this leanbayes reads {VERSION}: update it.")
    first = _START.size + length
    if first > end:
        raise ValueError("its header is longer than the file")
    header = _header(body[_START.size : first])
    parts, offset = {}, 0
    for row in header["parts"]:
        name, part = _part(row, offset, body[first:end])
        if name in parts:
            raise ValueError(f"it has {name} twice")
        parts[name] = part
        offset += len(part.data)
    if first + offset != end:
        raise ValueError("it holds more than its parts")
    return header["settings"], parts


def _header(packed: memoryview) -> dict[str, Any]:
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(packed, min(_MOST_HEADER, _MOST_RATIO * len(packed)) or 1)
        if not inflate.eof or inflate.unused_data:
            raise ValueError("its header is too long, or cut")
        header = json.loads(text)
    except (zlib.error, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("its header cannot be read") from None
    if not (
        isinstance(header, dict)
        and isinstance(header.get("settings"), dict)
        and isinstance(header.get("parts"), list)
        and all(isinstance(row, list) and len(row) == 6 for row in header["parts"])
    ):
        raise ValueError("its header lacks settings or parts")
    return header


def _part(row: Sequence[Any], offset: int, body: memoryview) -> tuple[str, Part]:
    """Check what a header says of a part, and take its bytes."""
    name, dtype, shape, coder, start, length = row
    named = isinstance(name, str) and isinstance(coder, str) and dtype in DTYPES
    if not named or not isinstance(shape, list) or not all(map(_is_count, [*shape, start, length])):
        raise ValueError(f"its header says {str(row)[:80]} of a part")
    if start != offset or start + length > len(body):
        raise ValueError(f"{name} lies outside the file")
    numbers = math.prod(shape)
    if numbers > _MOST_NUMBERS or (coder == "raw" and numbers * np.dtype(dtype).itemsize != length):
        raise ValueError(f"{name} has not the size that its header says")
    return name, Part(dtype, tuple(shape), coder, bytes(body[start : start + length]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
