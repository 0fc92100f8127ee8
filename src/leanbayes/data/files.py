"""Finding and reading files of a data set: what is missing is named, and what is damaged too."""

import gzip
import importlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.errors import FileFormatError, LeanBayesError

Array = np.ndarray[Any, Any]
Root = str | Path | None
ROOT_VARIABLE = "LEANBAYES_DATA"


def data_root(root: Root) -> Path | None:
    """Return the folder of all data sets: `root`, or what the environment variable says."""
    chosen = root if root is not None else os.environ.get(ROOT_VARIABLE)
    return Path(chosen).expanduser() if chosen else None


def find(name: str, root: Root, candidates: Iterable[str]) -> Path:
    """Return the first of some paths under the root that exists, or say what was looked for."""
    names = list(candidates)
    folder = data_root(root)
    if folder is None:
        raise LeanBayesError(
            f"{name} is read from files: give the root (--root), or set the environment variable {ROOT_VARIABLE}, to "
            f"the folder that holds {names[0].removesuffix('.gz')}."
        )
    for candidate in names:
        if (folder / candidate).exists():
            return folder / candidate
    plain = " or ".join(dict.fromkeys(candidate.removesuffix(".gz") for candidate in names))
    packed = ", packed as .gz or not" if any(candidate.endswith(".gz") for candidate in names) else ""
    raise LeanBayesError(f"{name} was not found in {folder}: put {plain} there{packed}, or give another root (--root).")


def damaged(path: Path, what: object) -> FileFormatError:
    """Make the error for a file that cannot be what it should be."""
    reason = " ".join(str(what).split())
    return FileFormatError(f"{path} is damaged or of another format ({reason}): download or make it again.")


def read_bytes(path: Path) -> bytes:
    """Read a file, unpacked if its name ends in .gz."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from None


def check_images(path: Path, x: Array, y: Array, classes: int) -> None:
    """Check that a file has images, and one label for each in the range of the classes."""
    if not len(x) or y.shape != (len(x),):
        raise damaged(path, f"{len(x)} images have labels of shape {y.shape}")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= classes:
        raise damaged(path, f"labels should be integers from 0 to {classes - 1}")


def needed(module: str, package: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LeanBayesError(f"This data set needs {package}: pip install 'leanbayes[data]'.") from None
