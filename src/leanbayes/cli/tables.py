"""Tables for the terminal: the scores of one run, and several methods side by side."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leanbayes import report
from leanbayes.report.cells import lines, writer
from leanbayes.report.columns import columns

# What fits into a terminal; the report has all.
_SHOWN = (
    *("accuracy", "miou", "rmse", "nll", "ece", "crps", "coverage_95"),
    *("corruptions:accuracy", "corruptions:nll", "kilo_trained", "file_kb", "epoch_ms", "predict_ms_per_1000"),
    "predict_time_ratio",
)


def scores_table(values: Mapping[str, float]) -> Table:
    """Lay out the scores and costs of one run, one a line."""
    view = Table(box=None, show_header=False)
    for column in columns([values]):
        view.add_row(column.title, writer(column.form, [values[column.key]])(values[column.key]))
    view.add_row("examples", f"{values['examples']:,}")
    return view


def comparison(table: report.Table, sort: str) -> Table:
    """Lay out several methods, the best of the column `sort` first, with a star at the winners of each column."""
    view = Table(box=None, padding=(0, 1, 0, 0))
    view.add_column("method", no_wrap=True)
    shown = [place for place, column in enumerate(table.columns) if _is_shown(column.key, sort)]
    for place in shown:
        view.add_column("\n".join(table.columns[place].title.split()), justify="right", no_wrap=True)
    best = next(column.best for column in table.columns if column.key == sort)
    for line in sorted(lines(table), key=lambda line: _order(line.row.cells[sort].mean, best)):
        cells = []
        for place in shown:
            cell = line.cells[place]
            text = f"{cell.text}{cell.spread}"
            cells.append(f"[bold green]{text}*[/]" if cell.best else f"{text} ")
        view.add_row(escape(line.row.name), *cells)
    return view


def _is_shown(key: str, sort: str) -> bool:
    return key in _SHOWN or key == sort or key.startswith("ood:")


def _order(value: float, best: str | None) -> tuple[bool, float]:
    return math.isnan(value), -value if best == "high" else value


def summary_of(table: report.Table) -> dict[str, Any]:
    """Write the table as plain values: of each method the mean and interval of each figure, and the winners."""
    methods = {
        row.name: {key: {"mean": cell.mean, "low": cell.low, "high": cell.high} for key, cell in row.cells.items()}
        for row in table.rows
    }
    return {"methods": methods, "winners": {key: list(names) for key, names in table.winners.items()}}


def show(title: str, view: Table) -> None:
    """Print a table under its title, at its own width: no cell is ever cut or folded."""
    wide = Console(width=10_000)
    width = wide.measure(view).maximum
    if title:
        print(title)
    Console(width=width).print(view)
