"""Tables of numbers for regression: text files with the target in the last column, and a toy function."""

import csv
import math
from array import array
from pathlib import Path

import numpy as np
import torch

from leanbayes.data.base import ArrayDataset, Data, held_out
from leanbayes.data.files import Array, Root, find, read_bytes
from leanbayes.errors import FileFormatError

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
    """Make 1000 points of y = x³ + N(0, 3²) with x uniform in [-4, 4], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, device="cpu", dtype=torch.float64, generator=generator) * 8 - 4
    y = x**3 + 3 * torch.randn(1000, device="cpu", dtype=torch.float64, generator=generator)
    return table_data("toy", torch.stack([x, y], dim=1).numpy(), validation_share, seed)


def load_uci(name: str, root: Root, validation_share: float, seed: int) -> Data:
    """Load ROOT/uci/NAME.txt (or .csv, .data, also .gz)."""
    path = find(name, root, [f"uci/{UCI_FILES.get(name, name)}{ending}" for ending in TABLE_ENDINGS])
    return table_data(name, read_table(path), validation_share, seed)


def load_table(path: Path, validation_share: float, seed: int) -> Data:
    """Load a table from a text file."""
    return table_data(path.name, read_table(path), validation_share, seed)


def read_table(path: Path, least_columns: int = 2) -> Array:
    """Read numbers separated by commas, semicolons or white space; a first line without any number is a header."""
    content = read_bytes(path)
    if b"\0" in content:
        raise FileFormatError(f"{path} is no text file: give a table of numbers.")
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        lines = content.decode("latin-1").splitlines()  # then a header has letters of an older encoding
    numbers, columns, separator = array("d"), 0, _separator(lines)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        cells = next(csv.reader([line], delimiter=separator)) if separator else line.split()
        values = [_number(cell) for cell in cells]
        if not columns:
            columns = len(cells)
            if all(map(math.isnan, values)) and not all(cell.strip().lower() in _MISSING for cell in cells):
                continue
        if len(cells) != columns:
            raise FileFormatError(
                f"{path}, line {number}, has {len(cells)} columns, and the first line has {columns}: mend it."
            )
        if not all(map(math.isfinite, values)):
            column = next(i for i, value in enumerate(values) if not math.isfinite(value))
            raise FileFormatError(
                f"{path}, line {number}, column {column + 1}: {cells[column].strip()!r} is no finite number; mend or "
                "remove it."
            )
        numbers.extend(values)
    if columns < least_columns or not numbers:
        raise FileFormatError(
            f"{path} should have rows of {least_columns} or more numbers, the target in the last: check the file."
        )
    return np.frombuffer(numbers).reshape(-1, columns)


def _separator(lines: list[str]) -> str | None:
    """Find what separates the cells: what the second line has, since a header may have anything."""
    first = [line for line in lines if line.strip()][:2]
    return next((mark for mark in ";,\t" if first and mark in first[-1]), None)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def table_data(name: str, table: Array, validation_share: float, seed: int) -> Data:
    """Split a table, whose test rows are the same for every seed, and standardise it by its training rows."""
    rest, test = held_out(len(table), _TEST_SHARE, 0)
    kept, held = held_out(len(rest), validation_share, seed)
    train, validation = (np.asarray(rest)[rows] for rows in (kept, held))
    mean, std = table[train].mean(0), table[train].std(0)
    if not np.isfinite(std).all():
        raise FileFormatError(f"{name} has numbers that are too large to standardise: scale its columns.")
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
