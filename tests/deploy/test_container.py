"""The container: round trips are exact, and damaged files are refused before memory of a claimed size is allocated."""

import json
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from compact_cases import START, rewritten, signed
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import leanbayes as lb
from leanbayes.deploy.compact import container
from leanbayes.deploy.compact.container import Part
from leanbayes.deploy.loading import describe

PARTS = {
    "a": Part("float32", (2, 3), "raw", bytes(range(24))),
    "none": Part("int8", (0,), "raw", b""),
    "coded": Part("int32", (1000,), "symbols", b"abc"),
}
SETTINGS = {"name": "μ", "numbers": [1, 2.5, None]}
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    container.write(tmp_path / "file", SETTINGS, PARTS)
    return tmp_path / "file"


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Check that the block allocates fewer than `size` bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def refused(path: Path, data: bytes, message: str = ".") -> None:
    path.write_bytes(data)
    with at_most(1 << 20), pytest.raises(lb.FileFormatError, match=message) as caught:
        container.read(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_round_trip_is_exact(path: Path) -> None:
    assert container.read(path) == (SETTINGS, PARTS)


def test_the_sizes_of_the_parts_sum_to_the_size_of_the_file(tmp_path: Path) -> None:
    sizes = container.write(tmp_path / "file", SETTINGS, PARTS)
    assert sum(sizes.values()) == (tmp_path / "file").stat().st_size
    assert sizes.keys() == {"header", *PARTS}


def test_other_files_are_not_compact(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"PK")
    with pytest.raises(lb.FileFormatError, match="not a safetensors file"):
        describe(tmp_path / "other")
    with pytest.raises(lb.FileFormatError, match="There is no file"):
        describe(tmp_path / "nowhere")
    with pytest.raises(lb.FileFormatError, match="check the path"):
        container.read(tmp_path / "nowhere")
    refused(tmp_path / "other", bytes(1000), "not a compact file")


def test_any_changed_byte_is_detected(path: Path) -> None:
    data = path.read_bytes()
    for place in range(len(data)):
        for flip in (1, 128):
            changed = bytearray(data)
            changed[place] ^= flip
            refused(path, bytes(changed))


def test_missing_and_additional_bytes_are_detected(path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        refused(path, data[:length], "truncated|checksum")
    for more in (b"\0", data, bytes(100)):
        refused(path, data + more, "checksum")


def test_a_newer_version_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes()[:-32])
    data[8] += 1
    refused(path, signed(bytes(data)), "version 2, but this leanbayes reads version 1: update")


# -- with a valid checksum --------------------------------------------------------------------------------------------


@same_folder
@given(st.integers(0, 2**32 - 1))
@example(2**32 - 1)
def test_a_header_of_any_length(path: Path, length: int) -> None:
    data = path.read_bytes()
    if length != START.unpack_from(data)[-1]:
        refused(path, signed(data[: START.size - 4] + struct.pack("<I", length) + data[START.size : -32]))
    path.write_bytes(data)


def test_a_decompression_bomb_in_the_header(path: Path) -> None:
    packed = zlib.compress(b" " * (1 << 28), 9)
    body = START.pack(container.MAGIC, container.VERSION, 0, len(packed)) + packed
    path.write_bytes(signed(body))
    with at_most(1 << 26), pytest.raises(lb.FileFormatError, match="too long"):
        container.read(path)


COUNTS: st.SearchStrategy[Any] = st.one_of(
    st.integers(0, 2**62), st.integers(-5, 5), st.sampled_from([True, None, 1.0, "1", [], 2**70])
)


@same_folder
@given(st.sampled_from([0, 1, 2]), st.sampled_from([2, 4, 5]), COUNTS, COUNTS)
@example(0, 2, 2**31, 2**31)
@example(2, 2, 2**62, 2**62)
def test_parts_of_any_size(path: Path, row: int, field: int, first: Any, second: Any) -> None:
    container.write(path, SETTINGS, PARTS)
    value = [first, second] if field == 2 else first
    before = list(PARTS.values())[row]
    rewritten(path, lambda header: header["parts"][row].__setitem__(field, value))
    with at_most(1 << 20):
        try:
            parts = container.read(path)[1]
        except lb.FileFormatError:
            return
    found = list(parts.values())[row]
    assert found.data == before.data
    assert found.coder != "raw" or len(found.data) == found.numel * (4 if found.dtype == "float32" else 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@same_folder
@given(JSON | st.fixed_dictionaries({"settings": JSON, "parts": st.lists(JSON | st.lists(JSON, max_size=6))}))
def test_any_header(path: Path, header: Any) -> None:
    packed = zlib.compress(json.dumps(header).encode())
    body = START.pack(container.MAGIC, container.VERSION, 0, len(packed)) + packed
    path.write_bytes(signed(body))
    try:
        found = container.read(path)
    except lb.FileFormatError:
        return
    assert found == (header["settings"], {}) or all(part.data == b"" for part in found[1].values())


def test_headers_that_are_not_json(path: Path) -> None:
    for text in (b"", b"{", b"\xff", b"[" * 100_000):
        packed = zlib.compress(text)
        start = START.pack(container.MAGIC, container.VERSION, 0, len(packed))
        refused(path, signed(start + packed), "header")
    start = START.pack(container.MAGIC, container.VERSION, 0, 3)
    refused(path, signed(start + b"abc"), "header")


def test_parts_that_overlap_or_leave_gaps(path: Path) -> None:
    def twice(header: dict[str, Any]) -> None:
        header["parts"][1][0] = "a"

    changes = (lambda header: header["parts"].pop(), lambda header: header["parts"][2].__setitem__(4, 0), twice)
    for change in changes:
        container.write(path, SETTINGS, PARTS)
        rewritten(path, change)
        refused(path, path.read_bytes(), "longer than its parts|outside|twice")


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(lb.LeanBayesError, match="choose a folder that exists"):
        container.write(tmp_path / "no" / "file", SETTINGS, PARTS)
