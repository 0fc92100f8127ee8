"""Small files that ask for much memory are refused in one sentence, before the memory is allocated."""

import gzip
import os
import pickle
import struct
import subprocess
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import expect, random_bytes, write_svhn
from PIL import Image
from scipy.io import savemat

import leanbayes as lb
from leanbayes.data import load, read_corrupted, read_image, read_images, read_table
from leanbayes.data.cifar import cifar100_classes
from leanbayes.data.idx import read_idx
from leanbayes.data.unpickling import read_arrays

MIB = 1 << 20
HUGE = 96 * MIB  # of a decompressed file


def expect_within(most: int, call: Callable[[], Any], *words: object) -> None:
    """Check that a call raises a FileFormatError of one sentence, with a limited peak of memory."""
    tracemalloc.start()
    try:
        expect(call, *words, kind=lb.FileFormatError)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def write_zeros(path: Path, start: bytes, unit: bytes = b"\0") -> Path:
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(start)
        for _ in range(HUGE // MIB):
            file.write(unit * (MIB // len(unit)))
    assert path.stat().st_size < MIB
    return path


def test_an_idx_file_that_announces_more_than_it_can_hold_is_refused(tmp_path: Path) -> None:
    sizes = struct.pack(">3I", HUGE // 1024, 32, 32)
    path = write_zeros(tmp_path / "images.gz", bytes([0, 0, 8, 3]) + sizes)
    expect_within(16 * MIB, lambda: read_idx(path, 3), path, f"announces {HUGE} bytes")
    plain = tmp_path / "images"
    plain.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1))
    expect_within(MIB, lambda: read_idx(plain, 3), plain, "at most 0 follow")


def test_an_idx_file_is_not_decompressed_beyond_its_header(tmp_path: Path) -> None:
    path = write_zeros(tmp_path / "labels.gz", bytes([0, 0, 8, 1]) + struct.pack(">I", 10))
    expect_within(4 * MIB, lambda: read_idx(path, 1), path, "announces 10 bytes, but more than 10 follow")


def test_a_table_is_not_decompressed_without_limit(tmp_path: Path) -> None:
    path = write_zeros(tmp_path / "table.csv.gz", b"", b"1,2\n")
    expect_within(32 * MIB, lambda: read_table(path), path, "64 times its size")


def test_short_lines_of_a_table_need_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"1,22\n" * 40_000)
    tracemalloc.start()
    try:
        assert read_table(path).shape == (40_000, 2)
        assert tracemalloc.get_traced_memory()[1] < 8 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_a_cell_that_is_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"1,2\n3,{'4' * 200_000}\n")
    expect(lambda: read_table(path), path, "line 2", kind=lb.FileFormatError)


def test_pipes_are_not_read(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs named pipes")
    (tmp_path / "cifar-10-batches-py").mkdir()
    os.mkfifo(tmp_path / "cifar-10-batches-py" / "test_batch")
    expect(lambda: read_images("cifar10", "test", tmp_path), "regular file", kind=lb.FileFormatError)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


ENCODE = b"c_codecs\nencode\nq\0" + text("a" * 100_000) + b"q\1X\6\0\0\0latin1q\2\x86q\3"
ARRAY = pickle.dumps(random_bytes(100_000), 2)[2:-1]
REPEATED = b"".join(text(f"{number:04}") + b"h\xff" for number in range(2000))
PICKLES: dict[str, bytes] = {
    "bytes of 4 GB": b"\x80\4\x8e" + struct.pack("<Q", 2**32) + b".",
    "text of 4 GB": b"\x80\4\x8d" + struct.pack("<Q", 2**32) + b".",
    "frame of 4 GB": b"\x80\4\x95" + struct.pack("<Q", 2**32) + b"}.",
    "array of bytes of 4 GB": b"\x80\5\x96" + struct.pack("<Q", 2**32) + b".",
    "integer of 2 GB": b"\x80\2\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "memo of 4 GB": b"\x80\2}r" + struct.pack("<I", 2**27) + b"0.",
    "sets": b"\x80\4(" + b"\x8f" * 300_000 + b"l.",
    "lists": b"\x80\4(" + b"]" * 300_000 + b"l.",
    "dicts": b"\x80\4(" + b"}" * 300_000 + b"l.",
    "marks": b"\x80\4" + b"(" * 3_000_000 + b"l.",
    "copies of the top": b"\x80\4(N" + b"2" * 3_000_000 + b"l.",
    "repeated encoding": b"\x80\2(" + ENCODE + b"h\0h\3R" * 2000 + b"l.",
    "repeated array": b"\x80\2}(" + text("a") + ARRAY + b"q\xff" + REPEATED + b"u.",
    "array of 1 TB": b"\x80\2}" + text("data") + ARRAY.replace(b"J\xa0\x86\1\0", b"\x8a\6\0\0\0\0\0\1") + b"s.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_ask_for_much_memory_are_refused(tmp_path: Path, case: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(PICKLES[case])
    expect_within(10 * len(PICKLES[case]) + 4 * MIB, lambda: read_arrays(path), path, "damaged")


def test_one_array_and_one_encoding_are_read(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\2}(" + text("a") + ARRAY + b"u.")
    assert read_arrays(path)["a"].shape == (100_000,)
    path.write_bytes(b"\x80\2}(" + text("b") + ENCODE + b"R" + b"u.")
    assert read_arrays(path)["b"] == b"a" * 100_000


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_batches_of_the_published_form_are_within_the_limits(tmp_path: Path, protocol: int) -> None:
    images = 6000  # so many that the spare memory for small files does not matter
    names = [b"name_of_an_image_s_%06d.png" % number for number in range(images)]
    batch: dict[bytes, Any] = {
        b"data": random_bytes(images, 3072),
        b"labels": [number % 10 for number in range(images)],
    }
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({**batch, b"filenames": names}, protocol))
    read = read_arrays(path)
    assert np.array_equal(read["data"], batch[b"data"])
    assert read["labels"] == batch[b"labels"]
    assert read["filenames"] == names


def shared(depth: int) -> Any:
    """Nest lists that hold the one below twice: a few bytes of pickle, 2**depth elements."""
    value: Any = 1
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize("labels", [shared(23), ["a", *["b"] * 100, "x" * 100_000], [(1, 2)] * 2])
def test_labels_are_not_expanded(tmp_path: Path, labels: Any) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    count = len(labels)
    (folder / "test_batch").write_bytes(pickle.dumps({"data": np.zeros((count, 3072), np.uint8), "labels": labels}, 4))
    expect_within(8 * MIB, lambda: read_images("cifar10", "test", tmp_path), "integers from 0 to 9")


def test_keys_and_names_of_classes_are_not_expanded(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    key: Any = (1,)
    for _ in range(23):
        key = (key, key)
    once = pickle.dumps(key, 4)[2:-1]
    (folder / "meta").write_bytes(b"\x80\4}" + once[9:] + b"Ns.")  # without its frame
    expect_within(2 * MIB, lambda: cifar100_classes(tmp_path), folder / "meta", "instead of a name")
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [shared(20)] * 100}))
    expect_within(2 * MIB, lambda: cifar100_classes(tmp_path), folder / "meta", "100 fine_label_names")


def test_python_2_text_with_escapes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"(dp0\nS'a\\xffb'\np1\nI5\nsS\"it's\"\nI01\ns.")
    assert read_arrays(path) == {"a\xffb": 5, "it's": True}


def test_deflated_matlab_arrays_are_checked_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "test_32x32.mat"
    images = HUGE // 3072
    savemat(path, {"X": np.zeros((32, 32, 3, images), np.uint8), "y": np.ones((images, 1))}, do_compression=True)
    assert path.stat().st_size < MIB
    expect_within(16 * MIB, lambda: read_images("svhn", "test", tmp_path), path, "at most")


def test_other_matlab_arrays_are_not_decompressed(tmp_path: Path) -> None:
    path = tmp_path / "test_32x32.mat"
    extra = np.zeros((HUGE, 1), np.uint8)
    write_svhn(path, extra=extra, text="a", cells=np.array([[1, "a"]], object))
    tracemalloc.start()
    try:
        assert len(read_images("svhn", "test", tmp_path)) == 6
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_tags_that_lie_about_their_length_are_refused(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "test_32x32.mat"
    savemat(path, {"X": random_bytes(32, 32, 3, 2), "y": np.ones((2, 1), np.uint8)}, do_compression=False)
    good = path.read_bytes()
    assert len(read_images("svhn", "test", tmp_path)) == 2
    values = good.index(struct.pack("<II", 2, 2 * 3072))
    bad = bytearray(good)
    bad[values : values + 8] = struct.pack("<II", 2, 2**32 - 8)
    if compressed:
        packed = zlib.compress(bytes(bad[128:]))
        bad = bad[:128] + struct.pack("<II", 15, len(packed)) + packed
    path.write_bytes(bytes(bad))
    expect_within(2 * MIB, lambda: read_images("svhn", "test", tmp_path), path, "damaged")


@pytest.mark.parametrize("images", [2**40, 2**62, 5 * 10**9])
def test_npy_headers_beyond_the_file_are_refused(tmp_path: Path, images: int) -> None:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(5, np.uint8))
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({images}, 32, 32, 3), }}".ljust(117) + "\n"
    (folder / "fog.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + b"\0" * 99)
    expect_within(2 * MIB, lambda: read_corrupted("cifar10", "fog", 1, tmp_path), folder / "fog.npy")


def png(path: Path, width: int, height: int) -> Path:
    """Write a small PNG whose header announces another size."""
    Image.fromarray(random_bytes(4, 4)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(bytes(content))
    return path


@pytest.mark.parametrize("side", [10_000, 20_000, 100_000])
@pytest.mark.parametrize("stretch", [True, False])
def test_images_of_too_many_pixels_are_refused(tmp_path: Path, side: int, stretch: bool) -> None:
    path = png(tmp_path / "image.png", side, side)
    expect_within(4 * MIB, lambda: read_image(path, (3, 8, 8), stretch), path, "89478485 pixels")


def test_images_in_formats_that_need_other_programs_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a program was started")

    path = tmp_path / "image.eps"
    Image.fromarray(random_bytes(4, 4, 3)).save(path)
    path = path.rename(tmp_path / "image.png")
    monkeypatch.setattr(subprocess, "check_call", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    expect(lambda: read_image(path, (3, 8, 8)), path, "damaged", kind=lb.FileFormatError)


def test_published_ratios_are_read(tmp_path: Path) -> None:
    """A table that compresses well is read as long as it is small, or within the ratio."""
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress(b"0,0,0,1\n" * 100_000))
    assert len(load(str(path)).train) > 70_000  # type: ignore[arg-type]
