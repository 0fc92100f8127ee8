"""Small images are read as written in their published formats; damaged files raise one sentence."""

import contextlib
import gzip
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import RANDOM, Array, expect, random_bytes, same_rows, write_svhn

import leanbayes as lb
from leanbayes.data import ArrayDataset, Augment, load, read_images

# -- idx ---------------------------------------------------------------------------------------------------------------


def idx(values: Array) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, gzipped: bool = True, size: int = 20) -> dict[str, Array]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for prefix in ("train", "t10k"):
        arrays[f"{prefix}-images-idx3-ubyte"] = random_bytes(size, 28, 28)
        arrays[f"{prefix}-labels-idx1-ubyte"] = RANDOM.integers(0, 10, size)
    for name, values in arrays.items():
        if gzipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))
    return arrays


@pytest.mark.parametrize("gzipped", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("MNIST", "mnist"),
        ("mnist", "."),
        ("Fashion_MNIST", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
    ],
)
def test_idx_files_are_read(tmp_path: Path, name: str, folder: str, gzipped: bool) -> None:
    written = write_mnist(tmp_path / folder, gzipped)
    data = load(name, tmp_path, validation_share=0.25)
    assert (data.task, data.input_shape, data.outputs, data.name) == (
        "classification",
        (1, 28, 28),
        10,
        name.lower().replace("_", "-"),
    )
    same_rows(data, written["train-images-idx3-ubyte"], written["train-labels-idx1-ubyte"])
    assert isinstance(data.test, ArrayDataset)
    assert data.test.x.dtype == torch.uint8
    assert data.test.y.dtype == torch.long
    assert np.array_equal(data.test.x[:, 0], written["t10k-images-idx3-ubyte"])
    assert np.array_equal(data.test.y, written["t10k-labels-idx1-ubyte"])
    assert len(data.classes) == 10


def test_files_in_the_root_are_mnist_unless_its_name_has_fashion(tmp_path: Path) -> None:
    write_mnist(tmp_path / "fashion")
    expect(lambda: load("mnist", tmp_path / "fashion"), "mnist", "MNIST/raw/train-images-idx3-ubyte")
    assert load("fashion-mnist", tmp_path / "fashion").name == "fashion-mnist"
    write_mnist(tmp_path / "plain")
    expect(lambda: load("fashion-mnist", tmp_path / "plain"), "FashionMNIST/raw/train-images-idx3-ubyte", "root")


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
GOOD = idx(np.zeros((20, 28, 28)))
IDX_DAMAGE: dict[str, tuple[str, bytes, str]] = {
    "truncated gz": (IMAGES, gzip.compress(GOOD)[:-20], "end"),
    "not gz": (IMAGES, GOOD, "gz"),
    "broken gz": (IMAGES, gzip.compress(GOOD)[:30] + b"x" * 30 + gzip.compress(GOOD)[60:], "damaged"),
    "empty": (IMAGES, b"", "starts with"),
    "wrong magic": (IMAGES, gzip.compress(b"\0\0\x08\x01" + GOOD[4:]), "starts with"),
    "partial header": (IMAGES, gzip.compress(GOOD[:9]), "sizes"),
    "too short": (IMAGES, gzip.compress(GOOD[:-1]), "15680 bytes"),
    "too long": (IMAGES, gzip.compress(GOOD + b"\0"), "announces 15680 bytes, but more"),
    "label out of range": (LABELS, gzip.compress(idx(np.full(20, 10))), "0 to 9"),
    "too few labels": (LABELS, gzip.compress(idx(np.zeros(19))), "20 images"),
}


@pytest.mark.parametrize("name", IDX_DAMAGE)
def test_damaged_idx_files_are_named(tmp_path: Path, name: str) -> None:
    file, content, words = IDX_DAMAGE[name]
    write_mnist(tmp_path)
    (tmp_path / file).write_bytes(content)
    expect(lambda: load("mnist", tmp_path), tmp_path / file, words, kind=lb.FileFormatError)


# -- pickles -----------------------------------------------------------------------------------------------------------


def python2(batch: dict[bytes, Any]) -> bytes:
    """Pickle like the authors of CIFAR, with Python 2 and its byte strings."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def item(value: Any) -> bytes:
        if isinstance(value, list):
            return b"](" + b"".join(b"J" + struct.pack("<i", v) for v in value) + b"e"
        dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\0K\x01\x87R(K\x03" + text(b"|")
        dtype += b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\0tb"
        empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
        shape = b"".join(b"J" + struct.pack("<i", side) for side in value.shape) + b"\x86"
        return empty + b"(K\x01" + shape + dtype + b"I00\n" + text(value.tobytes()) + b"tb"

    return b"\x80\x02}(" + b"".join(text(key) + item(value) for key, value in batch.items()) + b"u."


def python3(batch: dict[bytes, Any], protocol: int = 4) -> bytes:
    return pickle.dumps({key.decode(): value for key, value in batch.items()}, protocol)


PICKLERS: dict[str, Callable[[dict[bytes, Any]], bytes]] = {
    "python 2": python2,
    "python 3": python3,
    "protocol 2": lambda batch: pickle.dumps(batch, 2),
    "old numpy": lambda batch: pickle.dumps(batch, 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"),
}


def write_cifar10(root: Path, write: Callable[[dict[bytes, Any]], bytes]) -> tuple[Array, Array]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    x, y = random_bytes(12, 3072), RANDOM.integers(0, 10, 12)
    for number in range(6):
        rows = slice(2 * number, 2 * number + 2)
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        (folder / name).write_bytes(write({b"data": x[rows], b"labels": y[rows].tolist()}))
    return x.reshape(-1, 3, 32, 32), y


@pytest.mark.parametrize("pickler", PICKLERS)
def test_cifar10_is_read_from_pickles_of_any_version(tmp_path: Path, pickler: str) -> None:
    x, y = write_cifar10(tmp_path, PICKLERS[pickler])
    data = load("CIFAR-10", tmp_path)
    same_rows(data, x[:10], y[:10])
    assert isinstance(data.test, ArrayDataset)
    assert np.array_equal(data.test.x, x[10:])
    assert np.array_equal(data.test.y, y[10:])
    assert data.augment == Augment(4, flip=True)
    assert data.normalize is not None
    assert data.classes[3] == "cat"


def test_arrays_of_any_memory_and_byte_order_and_numpy_scalars_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    x = random_bytes(3, 3072)
    for labels in (np.array([1, 2, 99]), np.array([1, 2, 99], ">i2"), [np.int64(1), np.int32(2), 99]):
        (folder / "test").write_bytes(pickle.dumps({"data": np.asfortranarray(x), "fine_labels": labels}))
        read = read_images("cifar100", "test", tmp_path)
        assert np.array_equal(read.x.reshape(3, -1), x)
        assert read.y.tolist() == [1, 2, 99]


@pytest.mark.parametrize("with_names", [True, False])
def test_cifar100_has_its_fine_labels(tmp_path: Path, with_names: bool) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    x, y = random_bytes(6, 3072), [99, 0, 5, 7, 98, 1]
    for split, rows in (("train", slice(0, 4)), ("test", slice(4, 6))):
        batch = {b"data": x[rows], b"fine_labels": y[rows], b"coarse_labels": [0, 0]}
        (folder / split).write_bytes(pickle.dumps(batch, 2))
    if with_names:
        (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"c%d" % i for i in range(100)]}))
    data = load("cifar100", tmp_path)
    same_rows(data, x[:4], np.array(y[:4]))
    assert data.outputs == 100
    assert data.classes == (tuple(f"c{i}" for i in range(100)) if with_names else ())


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    write_cifar10(tmp_path, python3)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    victim = tmp_path / "victim"
    file.write_bytes(pickle.dumps({"data": Malicious(victim)}, protocol))
    expect(lambda: load("cifar10", tmp_path), file, "not run", kind=lb.FileFormatError)
    assert not victim.exists()
    file.write_bytes(pickle.dumps({"data": np.array([Malicious(victim)]), "labels": [1]}, protocol))
    expect(lambda: load("cifar10", tmp_path), file, kind=lb.FileFormatError)
    assert not victim.exists()
    file.write_bytes(b"c_codecs\nencode\n(V\nVzip\ntR.")  # an allowed function, which only returns bytes
    expect(lambda: load("cifar10", tmp_path), file, kind=lb.FileFormatError)


CIFAR_DAMAGE: dict[str, tuple[Any, str]] = {
    "not a dict": ([1, 2], "not a dict"),
    "no data": ({"labels": [1]}, "3072"),
    "floats": ({"data": np.zeros((2, 3072)), "labels": [1, 2]}, "bytes"),
    "wrong width": ({"data": random_bytes(2, 1000), "labels": [1, 2]}, "3072"),
    "no labels": ({"data": random_bytes(2, 3072)}, "labels"),
    "too few labels": ({"data": random_bytes(2, 3072), "labels": [1]}, "2 images"),
    "ragged labels": ({"data": random_bytes(2, 3072), "labels": [1, [2, 3]]}, "integers from 0 to 9"),
    "label out of range": ({"data": random_bytes(2, 3072), "labels": [1, 10]}, "0 to 9"),
    "negative label": ({"data": random_bytes(2, 3072), "labels": [1, -1]}, "0 to 9"),
    "text labels": ({"data": random_bytes(2, 3072), "labels": ["a", "b"]}, "integers"),
}


@pytest.mark.parametrize("name", CIFAR_DAMAGE)
def test_invalid_cifar_batches_are_named(tmp_path: Path, name: str) -> None:
    content, words = CIFAR_DAMAGE[name]
    write_cifar10(tmp_path, python3)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    file.write_bytes(pickle.dumps(content))
    expect(lambda: load("cifar10", tmp_path), file, words, kind=lb.FileFormatError)


@pytest.mark.parametrize("pickler", PICKLERS)
def test_corrupted_pickles_are_read_or_refused(tmp_path: Path, pickler: str) -> None:
    """A file that is truncated or has changed bytes raises nothing but FileFormatError."""
    write_cifar10(tmp_path, PICKLERS[pickler])
    file = tmp_path / "cifar-10-batches-py" / "test_batch"
    good = file.read_bytes()
    dice = random.Random(0)
    for trial in range(120):
        bad = bytearray(good[: dice.randrange(len(good))] if trial % 2 else good)
        head = [i for i in range(len(bad)) if i < 250 or i > len(bad) - 60]
        for _ in range(dice.randrange(4)):
            bad[dice.choice(head)] = dice.randrange(256)
        file.write_bytes(bytes(bad))
        with contextlib.suppress(lb.FileFormatError):
            read_images("cifar10", "test", tmp_path)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path, python3)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    expect(lambda: load("cifar10", tmp_path), tmp_path, "cifar-10-batches-py/data_batch_4")


# -- Matlab files, and scikit-learn ------------------------------------------------------------------------------------


def test_svhn_is_read_with_label_10_as_0(tmp_path: Path) -> None:
    x, y = write_svhn(tmp_path / "train_32x32.mat", 20)
    (tmp_path / "svhn").mkdir()
    x_test, y_test = write_svhn(tmp_path / "svhn" / "test_32x32.mat", 11)
    data = load("svhn", tmp_path)
    same_rows(data, x, y)
    test = read_images("SVHN", "test", tmp_path)
    assert np.array_equal(test.x, x_test)
    assert np.array_equal(test.y, y_test)
    assert data.augment == Augment(4, flip=False)


def test_the_test_split_can_be_read_without_the_training_split(tmp_path: Path) -> None:
    write_svhn(tmp_path / "test_32x32.mat")
    assert len(read_images("svhn", "test", tmp_path)) == 6
    expect(lambda: load("svhn", tmp_path), "train_32x32.mat")
    expect(lambda: read_images("svhn", "extra", tmp_path), "extra", "train or test")
    expect(lambda: read_images("boston", "test", tmp_path), "boston", "mnist")


def test_damaged_matlab_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "test_32x32.mat"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"X": None}, "X"),
        ({"X": np.zeros((32, 32, 3, 6))}, "bytes"),
        ({"X": random_bytes(32, 32, 6)}, "(32, 32, 3, images)"),
        ({"y": np.full((6, 1), 11)}, "0 to 9"),
        ({"y": np.ones((5, 1))}, "6 images"),
    ]
    for changes, words in wrong:
        write_svhn(path, **changes)
        expect(lambda: read_images("svhn", "test", tmp_path), path, words, kind=lb.FileFormatError)
    write_svhn(path)
    good = path.read_bytes()
    for bad in (b"", good[:100], good[: len(good) // 2], b"not a Matlab file" * 50):
        path.write_bytes(bad)
        expect(lambda: read_images("svhn", "test", tmp_path), path, kind=lb.FileFormatError)


def test_digits_need_no_files_and_splits_have_no_example_in_common() -> None:
    data, other = load("digits"), load("digits", seed=1)
    assert isinstance(data.train, ArrayDataset)
    assert isinstance(data.validation, ArrayDataset)
    assert isinstance(data.test, ArrayDataset)
    assert (len(data.train), len(data.validation), len(data.test)) == (1078, 120, 599)
    assert data.input_shape == (1, 8, 8)
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.max() == 255
    assert data.augment is None
    rows = [{x.numpy().tobytes() for x in part.x} for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in rows] == [1078, 120, 599]  # no two images are equal
    assert not rows[0] & rows[1]
    assert not (rows[0] | rows[1]) & rows[2]
    assert isinstance(other.test, ArrayDataset)
    assert isinstance(other.validation, ArrayDataset)
    assert torch.equal(other.test.x, data.test.x)
    assert not torch.equal(other.validation.x, data.validation.x)
    assert data.test.y.bincount().min() > 55  # stratified
    repeated = load("digits").train
    assert isinstance(repeated, ArrayDataset)
    assert torch.equal(repeated.x, data.train.x)
