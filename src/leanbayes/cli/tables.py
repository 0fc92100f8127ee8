"""Tables for the terminal: the scores of one run, and several methods side by side."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leanbayes import report
from leanbayes.report.cells import lines, writer
from leanbayes.report.columns import columns
from leanbayes.report.document import Column

# What fits into a terminal; the report has all.
SHOWN = (
    *("accuracy", "miou", "rmse", "nll", "ece", "crps", "coverage_95"),
    *("corruptions:accuracy", "corruptions:nll", "kilo_trained", "file_kb", "epoch_ms", "predict_ms_per_1000"),
    "predict_time_ratio",
)
_TITLES = {"classwise_ece": "class-wise ECE", "excess_aurc": "excess AURC"}  # of scores that no other table has
_NARROW = 8  # letters of a column's head, where its words allow


def scores_table(values: Mapping[str, float]) -> Table:
    """Lay out the scores and costs of one run, one a line."""
    view = Table(box=None, show_header=False)
    known = columns([dict.fromkeys(values, 0.0)])
    keys = {"examples", *(column.key for column in known)}
    others = [Column(key, _TITLES.get(key, key.replace("_", " ")), form="decimal") for key in values if key not in keys]
    scores = [column for column in known if column.group in ("quality", "uncertainty")]
    for column in (*scores, *others, *(column for column in known if column not in scores)):
        view.add_row(column.title, writer(column.form, [values[column.key]])(values[column.key]))
    view.add_row("examples", f"{values['examples']:,}")
    return view


def comparison(table: report.Table, sort: str) -> Table:
    """Lay out several methods, the best of the column `sort` first, with a star at the winners of each column."""
    view = Table(box=None, padding=(0, 1, 0, 0))
    view.add_column("method", no_wrap=True)
    shown = [place for place, column in enumerate(table.columns) if _is_shown(column.key, sort)]
    for place in shown:
        title = textwrap.wrap(table.columns[place].title, _NARROW, break_long_words=False, break_on_hyphens=False)
        view.add_column("\n".join(title), justify="right", no_wrap=True, vertical="bottom")
    best = next((column.best for column in table.columns if column.key == sort), None)
    for line in sorted(lines(table), key=lambda line: _order(line.row.cells.get(sort), best)):
        cells = []
        for place in shown:
            of, cell = line.row.cells[table.columns[place].key], line.cells[place]
            text = cell.text + (cell.spread if of.low < of.high else "")  # what is counted has no spread
            cells.append(f"[bold green]{text}*[/]" if cell.best else f"{text} ")
        view.add_row(escape(line.row.name), *cells)
    return view


def _is_shown(key: str, sort: str) -> bool:
    return key in SHOWN or key == sort or key.startswith("ood:")


def _order(cell: report.Cell | None, best: str | None) -> tuple[bool, float]:
    if cell is None or math.isnan(cell.mean):
        return True, 0.0
    return False, -cell.mean if best == "high" else cell.mean


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
