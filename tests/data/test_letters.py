"""Letters differ from digits, but have as much ink and as many pixels."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import expect
from PIL import ImageFont

from leanbayes.data import ArrayDataset, load, read_images, task_of
from leanbayes.data.letters import LETTERS


@pytest.fixture(scope="module")
def letters() -> dict[str, ArrayDataset]:
    return {split: read_images("letters", split) for split in ("train", "test")}


def test_letters_have_the_format_of_digits(letters: dict[str, ArrayDataset]) -> None:
    for split, count in (("train", 1200), ("test", 600)):
        x, y = letters[split].x, letters[split].y
        assert x.shape == (count, 1, 8, 8)
        assert x.dtype == torch.uint8
        assert y.dtype == torch.long
        assert y.bincount().tolist() == [count // len(LETTERS)] * len(LETTERS)
        levels = set(np.rint(np.arange(17) * 255 / 16).astype(int).tolist())
        assert set(x.unique().tolist()) == levels  # counts from 0 to 16, scaled


def test_letters_can_be_loaded(letters: dict[str, ArrayDataset]) -> None:
    data = load("letters")
    assert isinstance(data.train, ArrayDataset)
    assert isinstance(data.validation, ArrayDataset)
    assert isinstance(data.test, ArrayDataset)
    assert (len(data.train), len(data.validation), len(data.test)) == (1080, 120, 600)
    assert (data.task, data.input_shape, data.outputs) == ("classification", (1, 8, 8), 12)
    assert data.classes == LETTERS
    assert data.normalize == load("digits").normalize
    assert torch.equal(data.test.x, letters["test"].x)  # the same in every run
    assert torch.equal(data.test.y, letters["test"].y)
    assert task_of("letters") == "classification"


def test_the_splits_have_no_image_in_common(letters: dict[str, ArrayDataset]) -> None:
    images = [{x.numpy().tobytes() for x in part.x} for part in letters.values()]
    assert [len(part) for part in images] == [1200, 600]
    assert not images[0] & images[1]


def test_letters_have_as_much_ink_as_digits_in_the_same_place(letters: dict[str, ArrayDataset]) -> None:
    digits, other = (read.x.double()[:, 0] / 255 for read in (read_images("digits", "train"), letters["train"]))
    assert other.mean() == pytest.approx(float(digits.mean()), rel=0.1)
    assert other.std() == pytest.approx(float(digits.std()), rel=0.1)
    assert other.mean((1, 2)).std() == pytest.approx(float(digits.mean((1, 2)).std()), rel=0.25)
    axis = torch.arange(8, dtype=torch.float64)
    for direction in (1, 2):
        ours, theirs = (x.sum(direction).mean(0) for x in (other, digits))
        assert abs((ours * axis).sum() / ours.sum() - (theirs * axis).sum() / theirs.sum()) < 0.4  # pixels
        assert np.corrcoef(ours, theirs)[0, 1] > (0.9 if direction == 1 else -1)  # over columns; letters use all rows


def test_letters_can_be_distinguished_from_each_other_and_from_digits(letters: dict[str, ArrayDataset]) -> None:
    """Nearest-neighbor classification over the training data of both sets finds the right letter."""
    digits = read_images("digits", "train")
    known = torch.cat([digits.x, letters["train"].x]).flatten(1).float()
    labels = torch.cat([digits.y - 10, letters["train"].y])
    nearest = labels[torch.cdist(letters["test"].x.flatten(1).float(), known).argmin(1)]
    assert (nearest == letters["test"].y).double().mean() > 0.95
    assert (nearest < 0).double().mean() < 0.01


def test_images_of_one_letter_differ(letters: dict[str, ArrayDataset]) -> None:
    for label in range(len(LETTERS)):
        x = letters["train"].x[letters["train"].y == label].double().flatten(1) / 255
        assert x.std(0).mean() > 0.08


def raising(error: type[Exception]) -> Callable[..., Any]:
    def load_default(size: float | None = None) -> Any:
        raise error("no FreeType")

    return load_default


def test_errors_name_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ImportError, OSError, TypeError):
        with monkeypatch.context() as patch:
            patch.setattr(ImageFont, "load_default", raising(error))
            expect(lambda: load("letters"), "Pillow 10.1", "FreeType", "pip install")
    monkeypatch.setitem(sys.modules, "PIL.ImageFont", None)
    expect(lambda: load("letters"), "pip install '.[data]'")
