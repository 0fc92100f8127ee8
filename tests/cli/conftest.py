"""Fixtures of the tests of the command line: an empty folder, and finished runs."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from cli_cases import RANDOM, TOY, Cli, Output, write_image
from PIL import Image

from leanbayes.cli import main


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """Import what a training needs before the first garbage collection, so that later ones are fast."""
    for name in ("torch._dynamo", "torch.utils.tensorboard"):
        importlib.import_module(name)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, without a data folder, and without a terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("LEANBAYES_DATA", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command and checks its exit code, 0 by default."""

    def run(*words: object, code: int = 0) -> Output:
        capsys.readouterr()
        found = main([str(word) for word in words])
        output = Output(found, *capsys.readouterr())
        assert found == code, output.err
        return output

    return run


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on images."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    assert main(["fit", "mean-field", "--epochs", "2", "--quiet", "--method.samples", "3", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a table."""
    folder = tmp_path_factory.mktemp("toy") / "run"
    assert main([str(word) for word in ("fit", "mean-field", *TOY, "--out", folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in one folder per class."""
    folder = tmp_path_factory.mktemp("pets") / "pets"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            for number in range(4):
                write_image(folder / split / name / f"{number}.png", 12, 14, 3)
    return folder


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with a label for each pixel, twice as wide as high."""
    folder = tmp_path_factory.mktemp("scenes") / "scenes"
    for split in ("train", "val", "test"):
        (folder / f"{split}annot").mkdir(parents=True)
        for number in range(4):
            write_image(folder / split / f"{number}.png", 20, 40, 3)
            labels = RANDOM.integers(0, 12, (20, 40), dtype=np.uint8)
            Image.fromarray(labels).save(folder / f"{split}annot" / f"{number}.png")
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A csv file of a linear function."""
    x = RANDOM.normal(size=(80, 3))
    y = 50 * (x @ [1, 2, 3]) + RANDOM.normal(size=80)
    np.savetxt(tmp_path / "table.csv", np.c_[x, y], delimiter=",", header="a,b,c,y", comments="")
    return tmp_path / "table.csv"
