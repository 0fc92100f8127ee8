"""Readers of CIFAR-10-C and CIFAR-100-C: the right severity is returned, and errors say what is wrong with a file."""

import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import RANDOM, Array, expect, random_bytes

import leanbayes as lb
from leanbayes.data import corruptions_on_disk, read_corrupted

FOLDERS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}


def write(root: Path, name: str = "cifar10", count: int = 15, *corruptions: str) -> tuple[Array, Array]:
    """Write files in the published format, with few images: the same labels five times."""
    folder = root / FOLDERS[name]
    folder.mkdir()
    x = random_bytes(count, 32, 32, 3)
    y = np.tile(RANDOM.integers(0, 10 if name == "cifar10" else 100, count // 5), 5).astype(np.uint8)
    for corruption in corruptions or ("fog",):
        np.save(folder / f"{corruption}.npy", x)
    np.save(folder / "labels.npy", y)
    return x, y


@pytest.mark.parametrize("name", FOLDERS)
def test_each_severity_is_one_block_of_the_file(tmp_path: Path, name: str) -> None:
    x, y = write(tmp_path, name)
    for severity in range(1, 6):
        data = read_corrupted(name, "fog", severity, tmp_path)
        rows = slice(3 * (severity - 1), 3 * severity)
        assert data.x.dtype == torch.uint8
        assert data.y.dtype == torch.long
        assert data.x.is_contiguous()
        assert np.array_equal(data.x, x[rows].transpose(0, 3, 1, 2))
        assert np.array_equal(data.y, y[rows])


def test_case_and_separators_of_names_do_not_matter_and_the_root_can_be_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "cifar100")
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path))
    assert len(read_corrupted("CIFAR-100", "fog", 5)) == 3
    assert corruptions_on_disk("cifar_100") == ["fog"]


def test_only_one_severity_is_read_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    modes, real = [], np.load

    def recorded(path: Path, **options: Any) -> Any:
        modes.append((options["mmap_mode"], options["allow_pickle"]))
        return real(path, **options)

    monkeypatch.setattr(np, "load", recorded)
    data = read_corrupted("cifar10", "fog", 2, tmp_path)
    assert modes == [("r", False)] * 2
    data.x.zero_()
    data.y.zero_()
    assert read_corrupted("cifar10", "fog", 2, tmp_path).x.any()


def test_existing_corruptions_are_listed_in_the_published_order(tmp_path: Path) -> None:
    assert corruptions_on_disk("cifar10", tmp_path) == []
    assert corruptions_on_disk("cifar10") == []  # no root at all
    write(tmp_path, "cifar10", 5, "my_own", "jpeg_compression", "fog", "gaussian_noise", "spatter", "another")
    names = ["gaussian_noise", "fog", "jpeg_compression", "spatter", "another", "my_own"]
    assert corruptions_on_disk("cifar10", tmp_path) == names
    for name in names:
        assert len(read_corrupted("cifar10", name, 1, tmp_path)) == 1


def test_unknown_names_get_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path)
    expect(lambda: read_corrupted("cifar10", "fogg", 1, tmp_path), "'fogg'", "did you mean fog?")
    expect(lambda: read_corrupted("cifar10", "gausian_noise", 1, tmp_path), "did you mean gaussian_noise?")
    assert len(read_corrupted("cifar10", "Fog", 1, tmp_path)) == 3
    expect(lambda: read_corrupted("cifar1", "fog", 1, tmp_path), "'cifar1'", "did you mean cifar10")
    expect(lambda: corruptions_on_disk("cifar1000", tmp_path), "did you mean cifar100?")
    expect(lambda: read_corrupted("mnist", "fog", 1, tmp_path), "'mnist'", "cifar10 or cifar100")
    expect(lambda: read_corrupted("cifar10", "labels", 1, tmp_path), "'labels'", "fog", "saturate")
    expect(lambda: read_corrupted("cifar10", "../CIFAR-10-C/fog", 1, tmp_path), "use brightness, ")
    for severity in (0, 6):
        expect(partial(read_corrupted, "cifar10", "fog", severity, tmp_path), f"severity {severity}", "1 (mild)")
    part: Any = 2.5
    expect(lambda: read_corrupted("cifar10", "fog", part, tmp_path), "severity=2.5", "a whole number")


def test_missing_files_are_named(tmp_path: Path) -> None:
    expect(lambda: read_corrupted("cifar10", "fog", 1), "CIFAR-10-C", "LEANBAYES_DATA", "root")
    expect(lambda: read_corrupted("cifar10", "fog", 1, tmp_path), str(tmp_path), "CIFAR-10-C/fog.npy")
    write(tmp_path)
    expect(lambda: read_corrupted("cifar10", "snow", 1, tmp_path), "CIFAR-10-C/snow.npy")
    (tmp_path / "CIFAR-10-C" / "labels.npy").unlink()
    expect(lambda: read_corrupted("cifar10", "fog", 1, tmp_path), "CIFAR-10-C/labels.npy")


def saved(values: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=random_bytes(5, 32, 32, 3))
    return file.getvalue()


GOOD = saved(random_bytes(15, 32, 32, 3))
DAMAGE: dict[str, tuple[str, bytes, str]] = {
    "empty": ("fog", b"", "damaged"),
    "not an array": ("fog", b"<html>not found</html>", "damaged"),
    "truncated": ("fog", GOOD[:-1], "damaged"),
    "partial header": ("fog", GOOD[:40], "damaged"),
    "archive": ("fog", archive(), "archive"),
    "floats": ("fog", saved(np.zeros((15, 32, 32, 3))), "float64"),
    "channels first": ("fog", saved(random_bytes(15, 3, 32, 32)), "(15, 3, 32, 32)"),
    "other size": ("fog", saved(random_bytes(15, 64, 64, 3)), "(images, 32, 32, 3)"),
    "one image": ("fog", saved(random_bytes(32, 32, 3)), "(32, 32, 3)"),
    "not a multiple of five": ("fog", saved(random_bytes(14, 32, 32, 3)), "14 images"),
    "no images": ("fog", saved(random_bytes(0, 32, 32, 3)), "0 images"),
    "too few labels": ("labels", saved(np.zeros(14, np.uint8)), "15 images"),
    "label out of range": ("labels", saved(np.full(15, 10)), "0 to 9"),
    "float labels": ("labels", saved(np.zeros(15)), "integers"),
    "column of labels": ("labels", saved(np.zeros((15, 1), np.uint8)), "(15, 1)"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_are_named(tmp_path: Path, case: str) -> None:
    file, content, words = DAMAGE[case]
    write(tmp_path)
    path = tmp_path / "CIFAR-10-C" / f"{file}.npy"
    path.write_bytes(content)
    expect(lambda: read_corrupted("cifar10", "fog", 5, tmp_path), path, words, kind=lb.FileFormatError)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    write(tmp_path)
    path, victim = tmp_path / "CIFAR-10-C" / "fog.npy", tmp_path / "victim"
    for content in (saved(np.array([Malicious(victim)]), allow_pickle=True), pickle.dumps(Malicious(victim))):
        path.write_bytes(content)
        expect(lambda: read_corrupted("cifar10", "fog", 1, tmp_path), path, "pickle", kind=lb.FileFormatError)
        assert not victim.exists()


def test_arrays_in_column_major_order_are_read(tmp_path: Path) -> None:
    x, _ = write(tmp_path)
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", np.asfortranarray(x))
    assert np.array_equal(read_corrupted("cifar10", "fog", 4, tmp_path).x, x[9:12].transpose(0, 3, 1, 2))
