"""Data sets come back as written in their original formats; damaged or missing files get one clear sentence."""

import contextlib
import gzip
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import leanbayes as lb
from leanbayes.data import (
    NAMES,
    ArrayDataset,
    Augment,
    Data,
    Normalise,
    fingerprint,
    from_datasets,
    load,
    read_image,
    read_images,
    read_table,
    task_of,
)

RANDOM = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEANBAYES_DATA", raising=False)


def expect(call: Callable[[], Any], *words: object, kind: type[Exception] = lb.LeanBayesError) -> None:
    """The call raises one sentence with all of these words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, lb.LeanBayesError)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert message.endswith(".")
    assert "\n" not in message
    for word in words:
        assert str(word) in message


def random_bytes(*shape: int) -> Array:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def same_rows(data: Data, x: Array, y: Array) -> None:
    """Training and validation together are the written rows, each once."""
    parts: list[Any] = [data.train, data.validation]
    found = sorted((bytes(a.numpy().tobytes()), int(b)) for part in parts for a, b in part)
    assert found == sorted((row.tobytes(), int(label)) for row, label in zip(x, y, strict=True))


# -- idx --------------------------------------------------------------------------------------------------------------


def idx(values: Array) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, packed: bool = True, size: int = 20) -> dict[str, Array]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for prefix in ("train", "t10k"):
        arrays[f"{prefix}-images-idx3-ubyte"] = random_bytes(size, 28, 28)
        arrays[f"{prefix}-labels-idx1-ubyte"] = RANDOM.integers(0, 10, size)
    for name, values in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))
    return arrays


@pytest.mark.parametrize("packed", [True, False])
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
def test_idx_files_come_back(tmp_path: Path, name: str, folder: str, packed: bool) -> None:
    written = write_mnist(tmp_path / folder, packed)
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


def test_a_bare_folder_is_mnist_unless_its_name_says_fashion(tmp_path: Path) -> None:
    write_mnist(tmp_path / "fashion")
    expect(lambda: load("mnist", tmp_path / "fashion"), "mnist", "MNIST/raw/train-images-idx3-ubyte")
    assert load("fashion-mnist", tmp_path / "fashion").name == "fashion-mnist"
    write_mnist(tmp_path / "plain")
    expect(lambda: load("fashion-mnist", tmp_path / "plain"), "FashionMNIST/raw/train-images-idx3-ubyte", "root")


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
GOOD = idx(np.zeros((20, 28, 28)))
IDX_DAMAGE: dict[str, tuple[str, bytes, str]] = {
    "truncated gz": (IMAGES, gzip.compress(GOOD)[:-20], "end"),
    "no gz": (IMAGES, GOOD, "gz"),
    "broken gz": (IMAGES, gzip.compress(GOOD)[:30] + b"x" * 30 + gzip.compress(GOOD)[60:], "damaged"),
    "empty": (IMAGES, b"", "starts with"),
    "wrong magic": (IMAGES, gzip.compress(b"\0\0\x08\x01" + GOOD[4:]), "starts with"),
    "header only in part": (IMAGES, gzip.compress(GOOD[:9]), "sizes"),
    "too short": (IMAGES, gzip.compress(GOOD[:-1]), "15680 bytes"),
    "too long": (IMAGES, gzip.compress(GOOD + b"\0"), "15681"),
    "label out of range": (LABELS, gzip.compress(idx(np.full(20, 10))), "0 to 9"),
    "too few labels": (LABELS, gzip.compress(idx(np.zeros(19))), "20 images"),
}


@pytest.mark.parametrize("name", IDX_DAMAGE)
def test_damaged_idx_files_are_named(tmp_path: Path, name: str) -> None:
    file, content, words = IDX_DAMAGE[name]
    write_mnist(tmp_path)
    (tmp_path / file).write_bytes(content)
    expect(lambda: load("mnist", tmp_path), tmp_path / file, words, kind=lb.FileFormatError)


# -- pickles ----------------------------------------------------------------------------------------------------------


def python2(batch: dict[bytes, Any]) -> bytes:
    """Pickle as the authors of CIFAR did, with Python 2 and its byte strings."""

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
def test_cifar10_comes_back_whoever_pickled_it(tmp_path: Path, pickler: str) -> None:
    x, y = write_cifar10(tmp_path, PICKLERS[pickler])
    data = load("CIFAR-10", tmp_path)
    same_rows(data, x[:10], y[:10])
    assert isinstance(data.test, ArrayDataset)
    assert np.array_equal(data.test.x, x[10:])
    assert np.array_equal(data.test.y, y[10:])
    assert data.augment == Augment(4, flip=True)
    assert data.normalise is not None
    assert data.classes[3] == "cat"


def test_arrays_of_any_order_and_numbers_of_numpy_are_read(tmp_path: Path) -> None:
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
    file.write_bytes(b"c_codecs\nencode\n(V\nVzip\ntR.")  # an allowed function, which only ever makes bytes
    expect(lambda: load("cifar10", tmp_path), file, kind=lb.FileFormatError)


CIFAR_DAMAGE: dict[str, tuple[Any, str]] = {
    "no dict": ([1, 2], "not a dict"),
    "no data": ({"labels": [1]}, "3072"),
    "floats": ({"data": np.zeros((2, 3072)), "labels": [1, 2]}, "bytes"),
    "wrong width": ({"data": random_bytes(2, 1000), "labels": [1, 2]}, "3072"),
    "no labels": ({"data": random_bytes(2, 3072)}, "labels"),
    "too few labels": ({"data": random_bytes(2, 3072), "labels": [1]}, "2 images"),
    "ragged labels": ({"data": random_bytes(2, 3072), "labels": [1, [2, 3]]}, "inhomogeneous"),
    "label out of range": ({"data": random_bytes(2, 3072), "labels": [1, 10]}, "0 to 9"),
    "negative label": ({"data": random_bytes(2, 3072), "labels": [1, -1]}, "0 to 9"),
    "text labels": ({"data": random_bytes(2, 3072), "labels": ["a", "b"]}, "integers"),
}


@pytest.mark.parametrize("name", CIFAR_DAMAGE)
def test_wrong_cifar_batches_are_named(tmp_path: Path, name: str) -> None:
    content, words = CIFAR_DAMAGE[name]
    write_cifar10(tmp_path, python3)
    file = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    file.write_bytes(pickle.dumps(content))
    expect(lambda: load("cifar10", tmp_path), file, words, kind=lb.FileFormatError)


@pytest.mark.parametrize("pickler", PICKLERS)
def test_spoilt_pickles_never_break_out(tmp_path: Path, pickler: str) -> None:
    """Cut anywhere, or with bytes changed, a file is either read or refused."""
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


# -- Matlab, and what scikit-learn has --------------------------------------------------------------------------------


def write_svhn(path: Path, size: int = 6, **changes: Any) -> tuple[Array, Array]:
    x, y = random_bytes(size, 3, 32, 32), np.arange(size) % 10 + 1
    content = {"X": x.transpose(2, 3, 1, 0), "y": y[:, None].astype(np.uint8)} | changes
    savemat(path, {key: value for key, value in content.items() if value is not None}, do_compression=True)
    return x, np.where(y == 10, 0, y)


def test_svhn_comes_back_with_label_ten_as_zero(tmp_path: Path) -> None:
    x, y = write_svhn(tmp_path / "train_32x32.mat", 20)
    (tmp_path / "svhn").mkdir()
    x_test, y_test = write_svhn(tmp_path / "svhn" / "test_32x32.mat", 11)
    data = load("svhn", tmp_path)
    same_rows(data, x, y)
    test = read_images("SVHN", "test", tmp_path)
    assert np.array_equal(test.x, x_test)
    assert np.array_equal(test.y, y_test)
    assert data.augment == Augment(4, flip=False)


def test_the_test_split_can_be_read_alone(tmp_path: Path) -> None:
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
    for bad in (b"", good[:100], good[: len(good) // 2], b"no Matlab file" * 50):
        path.write_bytes(bad)
        expect(lambda: read_images("svhn", "test", tmp_path), path, kind=lb.FileFormatError)


def test_digits_need_no_files_and_no_example_is_in_two_splits() -> None:
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
    assert [len(part) for part in rows] == [1078, 120, 599]  # no two digits are alike
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


# -- tables -----------------------------------------------------------------------------------------------------------


def undone(data: Data) -> list[float]:
    """The targets of all splits, in the units of the file."""
    parts: list[Any] = [data.train, data.validation, data.test]
    return sorted(float(y * data.target_std[0] + data.target_mean[0]) for part in parts for y in part.y[:, 0])


@pytest.mark.parametrize("separator", [",", ", ", ";", " ", "\t", "  "])
@pytest.mark.parametrize("header", ["", "a{0}b{0}the_target\n"])
@pytest.mark.parametrize("ending", [".csv", ".txt", ".data", ".csv.gz"])
def test_tables_come_back_standardised(tmp_path: Path, separator: str, header: str, ending: str) -> None:
    table = RANDOM.normal(3, 5, (40, 3)).round(4)
    text = header.format(separator) + "".join(separator.join(map(str, row)) + "\n" for row in table) + "\n\n"
    path = tmp_path / f"table{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    for name in (str(path), f"csv:{path}"):
        data = load(name)
        assert (data.task, data.input_shape, data.outputs) == ("regression", (2,), 1)
        assert isinstance(data.train, ArrayDataset)
        assert (len(data.train), len(data.validation), len(data.test or ())) == (32, 4, 4)  # type: ignore[arg-type]
        assert data.train.x.dtype == data.train.y.dtype == torch.float32
        for values in (data.train.x, data.train.y):
            torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
            torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]))
        assert undone(data) == pytest.approx(sorted(table[:, -1]), abs=1e-4)


def test_constant_columns_do_not_divide_by_zero(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("".join(f"0.1,{i},0,7\n" for i in range(30)))
    data = load(str(path))
    assert isinstance(data.train, ArrayDataset)
    assert data.train.x[:, [0, 2]].abs().max() < 1e-6
    assert data.train.y.abs().max() == 0
    assert data.target_mean == (7.0,)
    assert data.target_std == (1.0,)


TABLE_DAMAGE: dict[str, tuple[bytes, str]] = {
    "text": (b"1,2,3\n4,five,6\n", "line 2, column 2: 'five'"),
    "text in the first line": (b"1,2,x\n4,5,6\n", "line 1, column 3: 'x'"),
    "nan": (b"a,b\n1,2\n\nnan,3\n", "line 4, column 1: 'nan'"),
    "infinity": (b"1 2\n3 inf\n", "line 2, column 2: 'inf'"),
    "empty cell": (b"1,2,3\n4,,6\n", "line 2, column 2: ''"),
    "short row": (b"1,2,3\n4,5\n", "line 2, has 2 columns"),
    "long row": (b"1 2\n3 4 5\n", "line 2, has 3 columns"),
    "one column": (b"1\n2\n", "2 or more numbers"),
    "only a header": (b"a,b,c\n", "rows"),
    "empty": (b"", "rows"),
    "no text": (b"\xff\xfe\0\0\x80", "no text"),
}


@pytest.mark.parametrize("name", TABLE_DAMAGE)
def test_a_wrong_cell_is_named_by_line_and_column(tmp_path: Path, name: str) -> None:
    content, words = TABLE_DAMAGE[name]
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    expect(lambda: load(str(path)), path, words, kind=lb.FileFormatError)


def test_uci_tables_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uci").mkdir()
    for file in ("bostonHousing.txt", "wine-quality-red.csv", "power-plant.data", "mine.txt.gz"):
        text = "".join(f"{i} {i * i}\n" for i in range(30)).encode()
        (tmp_path / "uci" / file).write_bytes(gzip.compress(text) if file.endswith("gz") else text)
    for name, known in [
        ("boston", "boston"),
        ("Wine", "wine"),
        ("power_plant", "power-plant"),
        ("uci:boston", "boston"),
        ("uci:mine", "mine"),
    ]:
        assert load(name, tmp_path).name == known
    expect(lambda: load("yacht", tmp_path), "yacht", "uci/yacht.txt")
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path))
    assert load("boston").input_shape == (1,)


def test_the_toy_is_a_noisy_cube() -> None:
    data, again = load("toy", seed=0), load("toy", seed=3)
    assert isinstance(data.test, ArrayDataset)
    assert isinstance(again.test, ArrayDataset)
    assert np.allclose(undone(data), undone(again), atol=1e-3)
    assert isinstance(data.train, ArrayDataset)
    x = torch.cat([data.train.x, data.test.x]).double()
    y = torch.cat([data.train.y, data.test.y]).double() * data.target_std[0] + data.target_mean[0]
    # The standardised input is a straight line of x: find it by the cube that fits, and look at what is left.
    features = torch.cat([x**power for power in range(4)], dim=1)
    rest = y - features @ torch.linalg.lstsq(features, y).solution
    assert 2.7 < rest.std() < 3.3
    assert 1.6 < x.max() < 1.85  # 4 over the std of a uniform, 8/√12
    assert -1.85 < x.min() < -1.6


# -- folders of pictures ----------------------------------------------------------------------------------------------


def write_picture(path: Path, values: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def write_folder(
    root: Path, splits: tuple[str, ...], classes: tuple[str, ...] = ("cat", "dog"), count: int = 4
) -> None:
    for split in splits:
        for name in classes:
            for number in range(count):
                write_picture(root / split / name / f"{number}.png", random_bytes(8, 8, 3))


@pytest.mark.parametrize(
    ("splits", "sizes"),
    [
        (("train",), (6, 2, None)),
        (("train", "val"), (6, 2, 8)),
        (("train", "test"), (6, 2, 8)),
        (("train", "val", "test"), (8, 8, 8)),
    ],
)
def test_a_lone_val_is_for_testing(tmp_path: Path, splits: tuple[str, ...], sizes: tuple[int | None, ...]) -> None:
    write_folder(tmp_path, splits)
    data = load(tmp_path, validation_share=0.25, resize=(8, 8))
    parts: list[Any] = [data.train, data.validation, data.test]
    assert tuple(None if part is None else len(part) for part in parts) == sizes
    assert data.classes == ("cat", "dog")
    assert (data.outputs, data.input_shape, data.augment) == (2, (3, 8, 8), Augment(1))


def test_pictures_come_back_and_are_cut_at_their_centre(tmp_path: Path) -> None:
    values = random_bytes(8, 8, 3)
    for number in range(3):
        for name in ("a", "b"):
            write_picture(tmp_path / "train" / name / f"{number}.PNG", values)
            write_picture(tmp_path / "test" / name / "deep" / f"{number}.bmp", values)
    (tmp_path / "train" / "a" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / "a" / "notes.txt").write_text("no picture")
    (tmp_path / "train" / ".cache").mkdir()
    same: Any = load(tmp_path, resize=(8, 8))
    for part, count in ((same.train, 5), (same.validation, 1), (same.test, 6)):
        assert len(part) == count
        x, y = part[0]
        assert np.array_equal(x, values.transpose(2, 0, 1))
        assert y.dtype == torch.long
    assert [int(y) for _, y in same.test] == [0, 0, 0, 1, 1, 1]
    wide = np.repeat(np.arange(40, dtype=np.uint8)[None, :, None], 20, 0).repeat(3, 2)
    write_picture(tmp_path / "test" / "a" / "deep" / "0.bmp", wide)
    cut: Any = load(str(tmp_path), resize=(20, 20)).test
    assert np.array_equal(cut[0][0][0, 0], np.arange(10, 30))
    whole: Any = load(str(tmp_path))
    assert whole.train[0][0].shape == (3, 224, 224)
    assert whole.augment == Augment(28)


def test_grey_and_transparent_pictures_become_rgb(tmp_path: Path) -> None:
    write_picture(tmp_path / "train" / "a" / "0.png", random_bytes(8, 8))
    write_picture(tmp_path / "train" / "a" / "1.png", random_bytes(8, 8, 4))
    write_picture(tmp_path / "train" / "a" / "2.jpg", random_bytes(64, 64, 3))
    write_picture(tmp_path / "train" / "a" / "3.webp", random_bytes(9, 12, 3))
    data: Any = load(tmp_path, resize=(8, 8))
    assert {tuple(x.shape) for x, _ in [*data.train, *data.validation]} == {(3, 8, 8)}


def test_wrong_folders_of_pictures_get_one_sentence(tmp_path: Path) -> None:
    expect(lambda: load(tmp_path), tmp_path, "train/CLASS/", "leftImg8bit", "trainannot")
    (tmp_path / "train").mkdir()
    expect(lambda: load(tmp_path), "train/CLASS/")
    (tmp_path / "train" / "cat").mkdir()
    expect(lambda: load(tmp_path), "no pictures", tmp_path / "train")
    write_folder(tmp_path, ("train",))
    (tmp_path / "test").mkdir()
    write_picture(tmp_path / "test" / "0.png", random_bytes(8, 8, 3))
    assert load(tmp_path).test is None  # unlabelled
    write_folder(tmp_path, ("val",), ("cat",))
    assert load(tmp_path).classes == ("cat", "dog")  # a rare class may be missing in a split
    write_folder(tmp_path, ("val",), ("cat", "cow"))
    expect(lambda: load(tmp_path), tmp_path / "val", "cow")
    expect(lambda: load(tmp_path, resize=(0, 8)), "resize=(0, 8)")
    expect(lambda: load("digits", resize=(8, 8)), "resize", "digits")


def test_damaged_pictures_are_named_when_they_are_read(tmp_path: Path) -> None:
    write_folder(tmp_path, ("train", "val"))
    data: Any = load(tmp_path, resize=(8, 8))
    for name in ("0.png", "1.png"):
        path = tmp_path / "val" / "cat" / name
        path.write_bytes(path.read_bytes()[:60] if name == "0.png" else b"no picture")
    expect(lambda: data.test[0], tmp_path / "val" / "cat" / "0.png", kind=lb.FileFormatError)
    expect(lambda: data.test[1], tmp_path / "val" / "cat" / "1.png", kind=lb.FileFormatError)
    (tmp_path / "val" / "cat" / "2.png").unlink()
    expect(lambda: data.test[2], tmp_path / "val" / "cat" / "2.png", "gone")


# -- labels for each pixel --------------------------------------------------------------------------------------------


def write_cityscapes(root: Path, split: str, labels: Array, kind: str = "labelIds") -> Array:
    values = random_bytes(*labels.shape, 3)
    for number in range(4):
        name = f"ulm_{number:06}_000019"
        write_picture(root / "leftImg8bit" / split / "ulm" / f"{name}_leftImg8bit.png", values)
        write_picture(root / "gtFine" / split / "ulm" / f"{name}_gtFine_{kind}.png", labels)
    return values


def test_cityscapes_ids_become_the_nineteen_classes(tmp_path: Path) -> None:
    ids = np.arange(34, dtype=np.uint8).reshape(2, 17)
    values = write_cityscapes(tmp_path, "train", ids)
    train_ids = np.array([[*range(16), 255], [16, 17, 18, *[255] * 14]], np.uint8)
    write_cityscapes(tmp_path, "val", train_ids, "labelTrainIds")
    write_cityscapes(tmp_path, "test", np.zeros((2, 17), np.uint8))  # void, as published
    data: Any = load(tmp_path, validation_share=0.25, resize=(2, 17))
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 4)
    assert (data.task, data.outputs, data.ignore_index, data.augment) == ("segmentation", 19, 255, Augment(0))
    assert data.likelihood().settings["ignore_index"] == 255
    x, y = data.train[0]
    assert np.array_equal(x, values.transpose(2, 0, 1))
    expected = np.full(34, 255)
    expected[[7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]] = range(19)
    assert np.array_equal(y.reshape(-1), expected)
    assert np.array_equal(data.test[0][1], train_ids)
    assert data.classes[13] == "car"
    assert load(tmp_path).input_shape == (3, 256, 512)


def test_a_labelled_test_split_is_used(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_cityscapes(tmp_path, split, np.full((4, 8), 7, np.uint8))
    data: Any = load(tmp_path, resize=(2, 4))
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 4, 4)
    x, y = data.test[0]
    assert x.shape == (3, 2, 4)
    assert y.shape == (2, 4)
    assert (y == 0).all()


def write_camvid(root: Path, split: str, labels: Array, ending: str = "png") -> Array:
    values = random_bytes(*labels.shape, 3)
    for number in range(4):
        write_picture(root / split / f"{number}.{ending}", values)
        write_picture(root / f"{split}annot" / f"{number}.png", labels)
    return values


def test_camvid_comes_back_with_void_ignored(tmp_path: Path) -> None:
    labels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    values = write_camvid(tmp_path, "train", labels)
    write_camvid(tmp_path, "val", labels, "webp")
    write_camvid(tmp_path, "test", labels)
    data: Any = load(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 4, 4)
    assert (data.input_shape, data.outputs, len(data.classes)) == ((3, 3, 4), 11, 11)
    x, y = data.train[0]
    assert np.array_equal(x, values.transpose(2, 0, 1))
    assert np.array_equal(y, np.where(labels == 11, 255, labels))
    large: Any = load(tmp_path, resize=(6, 8))
    assert np.array_equal(large.train[0][1], np.where(labels == 11, 255, labels).repeat(2, 0).repeat(2, 1))


def test_wrong_label_maps_are_named(tmp_path: Path) -> None:
    labels = np.zeros((3, 4), np.uint8)
    write_camvid(tmp_path, "train", labels)
    path = tmp_path / "trainannot" / "2.png"
    data: Any = load(tmp_path, validation_share=0.01, seed=1)
    part, index = next((p, i) for p in (data.train, data.validation) for i in range(len(p)) if p.indices[i] == 2)
    for values, words, kind in [
        (labels + 12, "range", lb.FileFormatError),
        (random_bytes(3, 4, 3), "one byte", lb.FileFormatError),
        (labels[:2], "(2, 4)", lb.LeanBayesError),
    ]:
        write_picture(path, values)
        expect(lambda: part[index], path, words, kind=kind)
    path.write_bytes(b"")
    expect(lambda: part[index], path, kind=lb.FileFormatError)
    write_picture(path, labels)
    write_picture(tmp_path / "train" / "2.png", random_bytes(5, 4, 3))
    expect(lambda: part[index], tmp_path / "train" / "2.png", "(5, 4)", "resize=")
    path.unlink()
    expect(lambda: load(tmp_path), tmp_path / "train" / "2.png", path)


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_are_found_whatever_their_case_and_hyphens() -> None:
    assert load("Digits").name == "digits"
    assert load("TOY").name == "toy"
    assert {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "toy", "boston"} <= set(NAMES)


def test_unknown_names_get_the_nearest_one(tmp_path: Path) -> None:
    expect(lambda: load("cifar-11"), "cifar-11", "Did you mean cifar10?", *NAMES, "path")
    expect(lambda: load("nothing like it"), *NAMES)
    expect(lambda: load("./not/there"), "./not/there", "path")
    expect(lambda: load("csv:none.dat", tmp_path), "none.dat")
    (tmp_path / "file.bin").write_bytes(b"")
    expect(lambda: load(tmp_path / "file.bin"), "file.bin", "csv:FILE")
    expect(lambda: load(f"csv:{tmp_path}"), str(tmp_path), "file")
    expect(lambda: load("digits", validation_share=0), "validation_share=0")
    expect(lambda: load("digits", validation_share=1.0), "validation_share=1.0")


def test_without_a_root_both_ways_to_give_it_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in set(NAMES) - {"digits", "toy"}:
        expect(partial(load, name), name, "root", "LEANBAYES_DATA", "that holds")
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path))
    expect(lambda: load("mnist"), tmp_path, "train-images-idx3-ubyte")
    write_folder(tmp_path / "pets", ("train",))
    assert load("pets").name == "pets"  # a path from the root


@pytest.mark.parametrize(
    ("module", "name"), [("sklearn.datasets", "digits"), ("scipy.io", "svhn"), ("PIL.Image", "pets")]
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str) -> None:
    write_svhn(tmp_path / "train_32x32.mat")
    write_folder(tmp_path / "pets", ("train",))
    monkeypatch.setitem(sys.modules, module, None)

    def first_example() -> Any:
        return load(name, tmp_path).train[0]

    expect(first_example, "pip install 'leanbayes[data]'")


def test_the_import_needs_no_optional_package() -> None:
    code = (
        "import sys, leanbayes.data; print([m for m in ('sklearn', 'scipy', 'PIL', 'torchvision') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- data sets of one's own -------------------------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    """A data set of anything."""

    def __init__(self, *examples: Any, **attributes: Any) -> None:
        self.examples = examples
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


X, Y = torch.randn(20, 6), torch.arange(20) % 3


def test_task_shape_and_classes_are_seen_in_the_examples() -> None:
    data = from_datasets(TensorDataset(X, Y), test=TensorDataset(X, Y), name="mine", validation_share=0.2, seed=5)
    assert (data.name, data.task, data.input_shape, data.outputs) == ("mine", "classification", (6,), 3)
    assert isinstance(data.train, Subset)
    assert isinstance(data.validation, Subset)
    assert sorted([*data.train.indices, *data.validation.indices]) == list(range(20))
    assert len(data.validation) == 4
    assert isinstance(data.likelihood(), lb.Categorical)
    same = from_datasets(TensorDataset(X, Y), validation_share=0.2, seed=5)
    assert same.validation.indices == data.validation.indices  # type: ignore[attr-defined]
    other = from_datasets(TensorDataset(X, Y), validation_share=0.2, seed=6)
    assert other.validation.indices != data.validation.indices  # type: ignore[attr-defined]

    real = from_datasets(ArrayDataset(X, X[:, :2].double()), TensorDataset(X, X[:, :2]))
    assert (real.task, real.outputs) == ("regression", 2)
    assert isinstance(real.likelihood(), lb.Gaussian)
    assert (from_datasets(Pairs((X[0], 1.5), (X[1], 2.5))).task) == "regression"

    maps = torch.randint(0, 4, (6, 5, 5))
    maps[0, 0, 0] = -100
    maps[1, 0, 0] = 3
    dense = from_datasets(ArrayDataset(torch.zeros(6, 3, 5, 5, dtype=torch.uint8), maps))
    assert (dense.task, dense.outputs, dense.input_shape) == ("segmentation", 4, (3, 5, 5))
    assert dense.normalise == Normalise((0.0,), (1.0,))


def test_classes_are_taken_from_the_data_set_or_asked_for() -> None:
    pair = (np.zeros((3, 4, 4), np.float32), 1)
    assert from_datasets(Pairs(pair, pair, targets=[0, 6])).outputs == 7
    named = from_datasets(Pairs(pair, pair, classes=["cat", "dog"]))
    assert (named.outputs, named.classes) == (2, ("cat", "dog"))
    assert from_datasets(Pairs(pair, pair), outputs=5).outputs == 5
    assert from_datasets(Pairs(pair, pair), classes=["a", "b", "c"]).outputs == 3
    expect(lambda: from_datasets(Pairs(pair, pair)), "outputs=")
    expect(lambda: from_datasets(TensorDataset(X, Y - 1)), "0 or more")
    expect(lambda: from_datasets(TensorDataset(X, Y), task="ranking"), "ranking", "regression")  # type: ignore[arg-type]


def test_inputs_may_be_dicts_and_tuples() -> None:
    for x in ({"ids": torch.arange(3)}, (X[0], X[1])):
        assert from_datasets(Pairs((x, 0), (x, 1)), outputs=2).input_shape == ()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(X[0], 1)])


def test_what_cannot_be_indexed_gets_one_sentence() -> None:
    good = TensorDataset(X, Y)
    for call, words in [
        (lambda: from_datasets(Stream()), "map-style"),
        (lambda: from_datasets(DataLoader(good)), "loader.dataset"),  # type: ignore[arg-type]
        (lambda: from_datasets(iter([])), "map-style"),  # type: ignore[arg-type]
        (lambda: from_datasets(good, Stream()), "map-style"),
        (lambda: from_datasets(good, good, TensorDataset(X[:0], Y[:0])), "empty"),
        (lambda: from_datasets(Pairs()), "empty"),
        (lambda: from_datasets(TensorDataset(X, Y, Y)), "pairs"),
        (lambda: from_datasets(Pairs({"x": 1})), "dict"),
        (lambda: from_datasets(Pairs((Image.new("RGB", (4, 4)), 1))), "Image"),
        (lambda: from_datasets(Pairs((X[0], "cat"))), "str"),
        (lambda: from_datasets(Pairs((X[0], [1, 2]))), "list"),
        (lambda: from_datasets(Pairs((X[0], 1)), outputs=2), "1 example"),
        (lambda: ArrayDataset(X, Y[:-1]), "(19,)"),
        (lambda: ArrayDataset(X, 3), "()"),
    ]:
        expect(call, words)


def test_settings_travel_through_json() -> None:
    for setting in (Normalise((0.5, 0.4, 0.3), (0.1, 0.2, 0.3)), Augment(2, flip=False)):
        assert lb.config.decode(lb.config.encode(setting)) == setting
    expect(lambda: Normalise((0.5,), (0.0,)), "positive")
    expect(lambda: Normalise((0.5, 0.5), (1.0,)), "each channel")
    expect(lambda: Augment(-1), "crop=-1")


# -- pictures for a prediction, and what a name stands for -------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stretch", [False, True])
def test_a_picture_is_read_as_a_network_wants_it(channels: int, stretch: bool, tmp_path: Path) -> None:
    values = np.zeros((8, 16, 3), dtype=np.uint8)
    values[:, :4] = values[:, 12:] = 255  # white edges, which are cut off unless the picture is stretched
    Image.fromarray(values).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", (channels, 4, 4), stretch=stretch)
    assert image.shape == (channels, 4, 4)
    assert image.dtype == torch.uint8
    assert (image.max() > 200) == stretch
    expect(lambda: read_image(tmp_path / "b.png", (channels, 4, 4)), "no picture", "b.png")
    expect(lambda: read_image(tmp_path / "a.png", (2, 4, 4)), "2 channels")


def test_a_name_tells_its_task_without_being_loaded(tmp_path: Path) -> None:
    (tmp_path / "scenes" / "trainannot").mkdir(parents=True)
    (tmp_path / "pets" / "train").mkdir(parents=True)
    assert task_of("CIFAR-10") == task_of("pets", tmp_path) == "classification"
    assert task_of("scenes", tmp_path) == "segmentation"
    assert task_of("toy") == task_of("uci:yacht") == task_of("csv:a.csv") == task_of("boston") == "regression"


def test_a_fingerprint_tells_data_sets_apart() -> None:
    x, y = torch.arange(40.0).view(20, 2), torch.arange(20)
    first = fingerprint(ArrayDataset(x, y))
    assert first == fingerprint(ArrayDataset(x.clone(), y.clone()))
    others = [ArrayDataset(x + 1, y), ArrayDataset(x, y + 1), ArrayDataset(x[:19], y[:19])]
    assert len({first, *map(fingerprint, others)}) == 4


def test_sixteen_bits_and_the_way_up_of_a_photo_are_kept(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)).save(tmp_path / "deep.png")
    assert 120 < read_image(tmp_path / "deep.png", (1, 8, 8)).float().mean() < 135
    photo = Image.fromarray(np.concatenate([np.zeros((4, 8)), np.full((4, 8), 255)]).astype(np.uint8))
    exif = photo.getexif()
    exif[0x0112] = 3  # it was taken upside down
    photo.save(tmp_path / "photo.png", exif=exif)
    assert read_image(tmp_path / "photo.png", (1, 8, 8))[0, 0, 0] == 255
    assert read_image(tmp_path / "photo.png", (1, 8, 8), stretch=True)[0, 0, 0] == 0  # as its label map is stored


@pytest.mark.parametrize(
    "text",
    [
        b'"cement (kg, m3)","strength"\n"1","2"\n"3","4"\n',
        b"a, b;c\n1;2\n3;4\n",
        b"first name\tlast name\n1\t2\n3\t4\n",
        "größe,höhe\n1,2\n3,4\n".encode("latin-1"),
    ],
)
def test_tables_as_people_have_them_are_read(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    assert read_table(tmp_path / "a.csv").tolist() == [[1, 2], [3, 4]]


def test_a_first_row_of_missing_values_is_no_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"NA,NA\n1,2\n")
    expect(lambda: read_table(tmp_path / "a.csv"), "line 1, column 1", kind=lb.FileFormatError)


def test_targets_far_from_the_usual_scale_are_told() -> None:
    x = torch.randn(50, 2)
    with pytest.warns(UserWarning, match="standardise"):
        from_datasets(TensorDataset(x, 1000 * torch.randn(50)))
    from_datasets(TensorDataset(x, torch.randn(50)))


def test_bytes_that_are_no_images_are_told() -> None:
    flat = TensorDataset(torch.zeros(9, 28, 28, dtype=torch.uint8), torch.arange(9))
    expect(lambda: from_datasets(flat), "uint8", "channel")


def test_classes_are_seen_through_a_split() -> None:
    class Own(Dataset[Any]):
        classes = ("a", "b", "c")

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(2), index % 3

    assert from_datasets(Subset(Own(), range(10))).outputs == 3
