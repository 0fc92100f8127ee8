"""Helpers of the data tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import leanbayes as lb
from leanbayes.data import Data

RANDOM = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def expect(call: Callable[[], Any], *words: object, kind: type[Exception] = lb.LeanBayesError) -> None:
    """Check that a call raises an error whose message is one line, is a sentence and has all of these words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, lb.LeanBayesError)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert message.endswith((".", "?"))
    assert "\n" not in message
    for word in words:
        assert str(word) in message


def random_bytes(*shape: int) -> Array:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def same_rows(data: Data, x: Array, y: Array) -> None:
    """Check that training and validation data together are the written rows, each once."""
    parts: list[Any] = [data.train, data.validation]
    found = sorted((bytes(a.numpy().tobytes()), int(b)) for part in parts for a, b in part)
    assert found == sorted((row.tobytes(), int(label)) for row, label in zip(x, y, strict=True))


def write_image(path: Path, values: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def write_folder(
    root: Path, splits: tuple[str, ...], classes: tuple[str, ...] = ("cat", "dog"), count: int = 4
) -> None:
    for split in splits:
        for name in classes:
            for number in range(count):
                write_image(root / split / name / f"{number}.png", random_bytes(8, 8, 3))


def write_svhn(path: Path, size: int = 6, **changes: Any) -> tuple[Array, Array]:
    x, y = random_bytes(size, 3, 32, 32), np.arange(size) % 10 + 1
    content = {"X": x.transpose(2, 3, 1, 0), "y": y[:, None].astype(np.uint8)} | changes
    savemat(path, {key: value for key, value in content.items() if value is not None}, do_compression=True)
    return x, np.where(y == 10, 0, y)
