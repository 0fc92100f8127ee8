"""Find and read the files of data sets; errors name files that are missing or damaged."""

import gzip
import importlib
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from leanbayes.errors import FileFormatError, LeanBayesError, missing_package

Array = np.ndarray[Any, Any]
Root = str | Path | None
ROOT_VARIABLE = "LEANBAYES_DATA"
_MOST_RATIO, _SPARE_BYTES = 64, 1 << 20  # of decompressed to compressed bytes; published data sets have at most 10
_CHUNK = 1 << 20
_LONGEST_REASON = 300


def data_root(root: Root) -> Path | None:
    """Return the folder of all data sets: `root`, or the value of the environment variable."""
    chosen = root if root is not None else os.environ.get(ROOT_VARIABLE)
    return Path(chosen).expanduser() if chosen else None


def find_file(name: str, root: Root, candidates: Iterable[str]) -> Path:
    """Return the first of some paths below the root that exists; raise an error if none does."""
    names = list(candidates)
    folder = data_root(root)
    if folder is None:
        raise LeanBayesError(
            f"{name} is read from files: set root (--root) or the environment variable {ROOT_VARIABLE} to the folder "
            f"that holds {names[0].removesuffix('.gz')}."
        )
    for candidate in names:
        if (folder / candidate).exists():
            return folder / candidate
    plain = " or ".join(dict.fromkeys(candidate.removesuffix(".gz") for candidate in names))
    packed = ", with or without .gz" if any(candidate.endswith(".gz") for candidate in names) else ""
    raise LeanBayesError(f"{name} was not found in {folder}: put {plain} there{packed}, or use another root (--root).")


def damaged(path: Path, what: object) -> FileFormatError:
    """Return the error for a file that cannot be read."""
    reason = " ".join(str(what).split())
    reason = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
    return FileFormatError(f"{path} is damaged or of another format ({reason}): download or create it again.")


def most_decompressed(size: int) -> int:
    """Return the number of bytes that `size` compressed bytes may decompress to."""
    return _MOST_RATIO * size + _SPARE_BYTES


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes] | gzip.GzipFile, int]]:
    """Open a file, decompressed if its name ends in .gz, and yield the most bytes that it may have."""
    try:
        if not path.is_file():  # a pipe or a device could be endless
            raise damaged(path, "it is not a regular file")
        size = path.stat().st_size
        if path.suffix != ".gz":
            with path.open("rb") as file:
                yield file, size
        else:
            with gzip.open(path) as unzipped:
                yield unzipped, most_decompressed(size)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from None


def read_bytes(path: Path) -> bytes:
    """Read a file; decompress it if its name ends in .gz."""
    with opened(path) as (file, most):
        if path.suffix != ".gz":
            return file.read(most)
        content = bytearray()
        while chunk := file.read(_CHUNK):
            content += chunk
            if len(content) > most:
                raise FileFormatError(
                    f"{path} decompresses to more than {_MOST_RATIO} times its size: decompress it yourself if you "
                    "trust it."
                )
        return bytes(content)


def read_exactly(file: IO[bytes] | gzip.GzipFile, count: int) -> tuple[Array, bool]:
    """Read at most `count` bytes as an array, and return whether more follow."""
    values = np.empty(count, np.uint8)
    done = 0
    while done < count and (chunk := file.read(min(_CHUNK, count - done))):
        values[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
        done += len(chunk)
    return values[:done], bool(file.read(1))


def check_images(path: Path, x: Array, y: Array, classes: int) -> None:
    """Raise an error unless a file has images, and one label in the range of the classes for each."""
    if not len(x) or y.shape != (len(x),):
        raise damaged(path, f"it has {len(x)} images and labels of shape {y.shape}")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= classes:
        raise damaged(path, f"labels should be integers from 0 to {classes - 1}")


def needed(module: str, package: str) -> Any:
    """Import an optional package; raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_package(f"This data set needs {package}", "data") from None
