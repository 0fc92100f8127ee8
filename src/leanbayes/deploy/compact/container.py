"""The container of a compact file: a JSON header, named parts, and a checksum of everything.

    8 bytes   magic
    2, 2, 4   version, unused, and the length of the compressed header
    header    deflated JSON: settings, and the name, dtype, shape, coder, offset and length of each part
    parts     one after the other, without gaps
    32 bytes  SHA-256 of everything before

Sizes are checked before memory of that size is allocated. Nothing in the file is ever executed.
"""

import hashlib
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.core.files import written_whole
from leanbayes.core.json_values import MOST_CHARACTERS, parse_untrusted
from leanbayes.deploy.header import damaged, header_text
from leanbayes.errors import FileFormatError

MAGIC = b"\x93LEANBYC"
VERSION = 1
_START = struct.Struct("<8sHHI")
_DIGEST = hashlib.sha256().digest_size
_MOST_RATIO, _MOST_NUMBERS, _MOST_DIMENSIONS = 100, 1 << 40, 16
DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")


@dataclass(frozen=True)
class Part:
    """Encoded numbers of one dtype and shape. The coder "raw" stores the numbers themselves."""

    dtype: str
    shape: tuple[int, ...]
    coder: str
    data: bytes

    @property
    def numel(self) -> int:
        """The number of numbers."""
        return math.prod(self.shape)


def needed(parts: Mapping[str, Part], name: str, coder: str, shape: tuple[int, ...]) -> Part:
    """Return a part, and check that it has this coder and shape."""
    part = parts.get(name)
    if part is None or part.coder != coder or part.shape != shape:
        raise ValueError(f"{name} does not fit the network")
    return part


def write(path: str | os.PathLike[str], settings: Mapping[str, Any], parts: Mapping[str, Part]) -> dict[str, int]:
    """Write a container atomically, and return the bytes of each part and of the header."""
    rows, offset = [], 0
    for name, part in parts.items():
        rows.append([name, part.dtype, list(part.shape), part.coder, offset, len(part.data)])
        offset += len(part.data)
    text = header_text({"settings": settings, "parts": rows}, separators=(",", ":"))
    header = zlib.compress(text.encode(), 9)
    start = _START.pack(MAGIC, VERSION, 0, len(header))
    whole = b"".join([start, header, *(part.data for part in parts.values())])
    with written_whole(path) as temporary:
        temporary.write_bytes(whole + hashlib.sha256(whole).digest())
    around = _START.size + len(header) + _DIGEST
    return {"header": around, **{name: len(part.data) for name, part in parts.items()}}


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Part]]:
    """Read the settings and the parts of a container, and check that no byte has changed."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileFormatError(f"Cannot read {path} ({error.strerror or error}): check the path.") from None
    try:
        return _parsed(data)
    except ValueError as error:
        if isinstance(error, FileFormatError):
            raise FileFormatError(f"{path} {error}") from None
        raise damaged(path, error, "compress the model again") from None


def _parsed(data: bytes) -> tuple[dict[str, Any], dict[str, Part]]:
    if len(data) < _START.size + _DIGEST:
        raise ValueError("it is truncated")
    magic, version, _, length = _START.unpack_from(data)
    if magic != MAGIC:
        raise FileFormatError("is not a compact file of leanbayes: check the path.")
    body, end = memoryview(data), len(data) - _DIGEST
    if hashlib.sha256(body[:end]).digest() != body[end:]:
        raise ValueError("its checksum does not match its content")
    if version != VERSION:
        raise FileFormatError(
            f"has format version {version}, but this leanbayes reads version {VERSION}: update leanbayes."
        )
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
        raise ValueError("it is longer than its parts")
    return header["settings"], parts


def _header(packed: memoryview) -> dict[str, Any]:
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(packed, min(MOST_CHARACTERS, _MOST_RATIO * len(packed)) or 1)
    except zlib.error:
        raise ValueError("its header cannot be read") from None
    if not inflate.eof or inflate.unused_data:
        raise ValueError("its header is too long or truncated")
    try:
        header = parse_untrusted(data.decode())
    except ValueError as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    if not (
        isinstance(header, dict)
        and isinstance(header.get("settings"), dict)
        and isinstance(header.get("parts"), list)
        and all(isinstance(row, list) and len(row) == 6 for row in header["parts"])
    ):
        raise ValueError("its header lacks settings or parts")
    return header


def _part(row: Sequence[Any], offset: int, body: memoryview) -> tuple[str, Part]:
    """Check the header entry of a part, and return its name and the part."""
    name, dtype, shape, coder, start, length = row
    named = isinstance(name, str) and isinstance(coder, str) and isinstance(dtype, str) and dtype in DTYPES
    shaped = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if not named or not shaped or not all(map(_is_count, [*shape, start, length])):
        raise ValueError(f"its header describes a part as {str(row)[:80]}")
    if start != offset or start + length > len(body):
        raise ValueError(f"{name} lies outside the file")
    numbers = math.prod(shape)
    if numbers > _MOST_NUMBERS or (coder == "raw" and numbers * np.dtype(dtype).itemsize != length):
        raise ValueError(f"{name} does not have the size in its header")
    return name, Part(dtype, tuple(shape), coder, bytes(body[start : start + length]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
