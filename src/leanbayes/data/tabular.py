"""Regression tables: text files with the target in the last column, and a toy function."""

import csv
import io
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanbayes.data.base import ArrayDataset, Data, held_out
from leanbayes.data.reading import Array, Root, find_file, read_bytes
from leanbayes.errors import FileFormatError

PRESET: Mapping[str, Any] = {
    "model": "mlp",
    "epochs": 200,
    "batch_size": 32,
    "lr": 1e-2,
    "weight_decay": 0.0,
}
UCI_FILES = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "power-plant": "power-plant",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
TABLE_ENDINGS = (".txt", ".csv", ".data", ".txt.gz", ".csv.gz", ".data.gz")
_TEST_SHARE = 0.1
_MISSING = ("", "?", "na", "nan", "n/a", "null", "none")


def load_toy(validation_share: float, seed: int) -> Data:
    """Return 1000 examples of y = x³ + N(0, 3²) with x uniform in [-4, 4], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, device="cpu", dtype=torch.float64, generator=generator) * 8 - 4
    y = x**3 + 3 * torch.randn(1000, device="cpu", dtype=torch.float64, generator=generator)
    return table_data("toy", torch.stack([x, y], dim=1).numpy(), validation_share, seed)


def load_gap(validation_share: float, seed: int) -> Data:
    """Return y = x·sin(2x) + N(0, 0.1²): 240 examples with 1 < |x| < 3 to train on, and 300 in the gap between to test.

    They are the same in every run. The test data show what a model believes where it has seen nothing.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device="cpu", dtype=torch.float64, generator=generator)

    x = torch.cat([(1 + 2 * draw(240)) * torch.where(draw(240) < 0.5, -1, 1), 2 * draw(300) - 1])
    y = x * torch.sin(2 * x) + 0.1 * torch.randn(len(x), device="cpu", dtype=torch.float64, generator=generator)
    table = torch.stack([x, y], dim=1).numpy()
    return table_data("gap", table, validation_share, seed, test=range(240, 540))


def load_uci(name: str, root: Root, validation_share: float, seed: int) -> Data:
    """Load ROOT/uci/NAME.txt (or .csv, .data, also .gz)."""
    path = find_file(name, root, [f"uci/{UCI_FILES.get(name, name)}{ending}" for ending in TABLE_ENDINGS])
    return table_data(name, read_table(path), validation_share, seed)


def load_table(path: Path, validation_share: float, seed: int) -> Data:
    """Load a table from a text file."""
    return table_data(path.name, read_table(path), validation_share, seed)


def read_table(path: Path, least_columns: int = 2) -> Array:
    """Read a table of numbers from a text file.

    Cells are separated by commas, semicolons or white space. A first line without any number is a header.

    Args:
        path: text file, gzipped if its name ends in .gz.
        least_columns: number of columns that the table must have at least.

    Returns:
        Array of float64 of shape (rows, columns).

    Raises:
        FileFormatError: The file is not text or has too few columns, rows of different lengths, or a cell that is not
            a finite number. The message names the line and the column.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from leanbayes.data import read_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "table.csv")
        ...     _ = path.write_text("width,height\\n1,2\\n3,4\\n")
        ...     read_table(path).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    content = read_bytes(path)
    if b"\0" in content:
        raise FileFormatError(f"{path} is not a text file: pass a table of numbers.")
    numbers, columns, separator = array("d"), 0, _separator(_lines(content))
    for number, line in enumerate(_lines(content), start=1):
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line], delimiter=separator)) if separator else line.split()
        except csv.Error as error:
            raise FileFormatError(f"{path}, line {number}, cannot be read ({error}): fix the line.") from None
        values = [_number(cell) for cell in cells]
        if not columns:
            columns = len(cells)
            if all(map(math.isnan, values)) and not all(cell.strip().lower() in _MISSING for cell in cells):
                continue
        if len(cells) != columns:
            raise FileFormatError(
                f"{path}, line {number}, has {len(cells)} columns, but the first line has {columns}: fix the line."
            )
        if not all(map(math.isfinite, values)):
            column = next(i for i, value in enumerate(values) if not math.isfinite(value))
            raise FileFormatError(
                f"{path}, line {number}, column {column + 1}: {cells[column].strip()!r} is not a finite number; fix or "
                "remove the line."
            )
        numbers.extend(values)
    if columns < least_columns or not numbers:
        target = ", the target in the last column" if least_columns > 1 else ""
        raise FileFormatError(f"{path} must have rows of {least_columns} or more numbers{target}: check the file.")
    return np.frombuffer(numbers).reshape(-1, columns)


def _lines(content: bytes) -> Iterator[str]:
    """Yield the lines one by one, because a list of short lines needs many times the memory of the text."""
    try:
        content.decode("utf-8")
        encoding = "utf-8-sig"
    except UnicodeDecodeError:
        encoding = "latin-1"  # a header in an older encoding
    return (line.rstrip("\n") for line in io.TextIOWrapper(io.BytesIO(content), encoding))


def _separator(lines: Iterable[str]) -> str | None:
    """Return the separator of the cells. It is found in the second line, because a header may contain anything."""
    first = list(itertools.islice((line for line in lines if line.strip()), 2))
    return next((mark for mark in ";,\t" if first and mark in first[-1]), None)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def table_data(name: str, table: Array, validation_share: float, seed: int, test: Sequence[int] | None = None) -> Data:
    """Split a table, with the same test rows for every seed, and standardize it by its training rows.

    Args:
        name: name of the data set.
        table: rows of inputs, with the target in the last column.
        validation_share: share of the other rows that is held out.
        seed: seed of that split.
        test: rows of the test data. None means a random tenth.
    """
    if test is None:
        rest, test = held_out(len(table), _TEST_SHARE, 0)
    else:
        rest = sorted(set(range(len(table))) - set(test))
    kept, held = held_out(len(rest), validation_share, seed)
    train, validation = (np.asarray(rest)[rows] for rows in (kept, held))
    mean, std = table[train].mean(0), table[train].std(0)
    if not np.isfinite(std).all():
        raise FileFormatError(f"{name} has numbers that are too large to standardize: scale its columns.")
    std[std <= 1e-12 * np.abs(mean)] = 1.0  # a constant column becomes zero
    splits = []
    for rows in (train, validation, test):
        scaled = ((table[rows] - mean) / std).astype(np.float32)
        splits.append(ArrayDataset(scaled[:, :-1].copy(), scaled[:, -1:].copy()))
    return Data(
        name=name,
        task="regression",
        train=splits[0],
        validation=splits[1],
        test=splits[2],
        input_shape=(table.shape[1] - 1,),
        outputs=1,
        input_mean=tuple(mean[:-1].tolist()),
        input_std=tuple(std[:-1].tolist()),
        target_mean=(float(mean[-1]),),
        target_std=(float(std[-1]),),
    )
