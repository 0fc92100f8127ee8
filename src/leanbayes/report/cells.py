"""The layout of the summary table: each value as text, and as a bar on the scale of its column."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from leanbayes.report.document import Cell, Column, Form, Row, Table

NONE = "–"
_SHORTEST = 4.0  # percent of the full length: the bar of the lowest value is still visible
_FORMATS: dict[Form, str] = {"percent": "{:.2%}", "decimal": "{:.4f}", "count": "{:,.0f}", "times": "{:.2f}×"}


@dataclass(frozen=True)
class Shown:
    """One cell. order: its sort key. bar, low and high: percent of the range of the column, None if unknown."""

    text: str
    interval: str
    tip: str
    runs: tuple[str, ...]
    order: str
    best: bool
    bar: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    row: Row
    cells: tuple[Shown, ...]


def lines(table: Table) -> list[Line]:
    """Lay out the table, row by row."""
    columns = [list(_column(table, column)) for column in table.columns]
    return [Line(row, tuple(column[place] for column in columns)) for place, row in enumerate(table.rows)]


def groups(columns: Iterable[Column]) -> list[tuple[str, int]]:
    """Return the name and the number of columns of each group of adjacent columns."""
    return [(name, len(list(some))) for name, some in itertools.groupby(columns, lambda column: column.group)]


def writer(form: Form, values: Iterable[float]) -> Callable[[float], str]:
    """Return the formatter of one column, which uses as many decimals as its smallest and largest values need."""
    pattern = _FORMATS.get(form)
    if pattern is None:
        powers = [math.floor(math.log10(abs(value))) for value in values if math.isfinite(value) and value]
        places = min(max(0, 3 - max(powers, default=0), 1 - min(powers, default=0)), 6)
        pattern = f"{{:,.{places}f}}" if max(powers, default=0) < 9 else "{:.3e}"

    def write(value: float) -> str:
        if math.isnan(value):
            return NONE
        return ("∞" if value > 0 else "−∞") if math.isinf(value) else pattern.format(value).replace("-", "−")

    return write


def _column(table: Table, column: Column) -> Iterator[Shown]:
    cells = [row.cells.get(column.key, Cell(math.nan)) for row in table.rows]
    write = writer(column.form, (cell.mean for cell in cells))
    known = [value for cell in cells for value in (cell.mean, cell.low, cell.high) if math.isfinite(value)]
    bottom, top = min(known, default=0.0), max(known, default=0.0)

    def place(value: float) -> float | None:
        if not math.isfinite(value):
            return None
        share = (value - bottom) / (top - bottom) if top > bottom else 1.0
        return round(_SHORTEST + (100 - _SHORTEST) * share, 1)

    for row, cell in zip(table.rows, cells, strict=True):
        has_interval = math.isfinite(cell.high - cell.low)
        tips = [f"{row.name}, {' '.join(column.title.split())}: {write(cell.mean)}"]
        if has_interval:
            tips.append(f"{table.interval}: {write(cell.low)} to {write(cell.high)}")
        if len(cell.values) > 1:
            tips.append(f"{len(cell.values)} runs: {', '.join(map(write, cell.values))}")
        yield Shown(
            text=write(cell.mean),
            interval=f"±{write((cell.high - cell.low) / 2).rstrip('%×')}" if cell.high > cell.low else "",
            tip="\n".join(tips),
            runs=tuple(map(write, cell.values)),
            order="" if math.isnan(cell.mean) else str(cell.mean).replace("inf", "Infinity"),
            best=row.name in table.winners.get(column.key, ()),
            bar=place(cell.mean),
            low=place(cell.low) if has_interval else None,
            high=place(cell.high) if has_interval else None,
        )
