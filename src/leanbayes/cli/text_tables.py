"""Tables for the terminal: the scores of one run, and several methods side by side."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from leanbayes import report
from leanbayes.cli.console import cell
from leanbayes.errors import printable
from leanbayes.report.cells import lines, writer
from leanbayes.report.columns import columns
from leanbayes.report.document import Column

# The columns that fit into a terminal. The report has all of them.
SHOWN = (
    *("accuracy", "miou", "rmse", "nll", "ece", "crps", "coverage_95"),
    *("corruptions:accuracy", "corruptions:nll", "kilo_trained", "file_kb", "epoch_ms", "predict_ms_per_1000"),
    "predict_time_ratio",
)
_TITLES = {"classwise_ece": "class-wise ECE", "excess_aurc": "excess AURC"}  # of scores that are in no other table
_NARROW = 8  # characters of a column title, if its words are not longer


def scores_table(values: Mapping[str, float]) -> Table:
    """Return a table of the scores and costs of one run, one per line."""
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
    """Return a table of several methods, sorted by a column with the best first; a star marks the winners."""
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
            of, written = line.row.cells[table.columns[place].key], line.cells[place]
            text = written.text + (written.interval if of.low < of.high else "")  # exact counts have no interval
            cells.append(f"[bold green]{text}*[/]" if written.best else f"{text} ")
        view.add_row(cell(line.row.name), *cells)
    return view


def _is_shown(key: str, sort: str) -> bool:
    return key in SHOWN or key == sort or key.startswith("ood:")


def _order(cell: report.Cell | None, best: str | None) -> tuple[bool, float]:
    if cell is None or math.isnan(cell.mean):
        return True, 0.0
    return False, -cell.mean if best == "high" else cell.mean


def summary_of(table: report.Table) -> dict[str, Any]:
    """Return the table as plain values: the mean and interval of each metric of each method, and the winners."""
    methods = {
        row.name: {key: {"mean": cell.mean, "low": cell.low, "high": cell.high} for key, cell in row.cells.items()}
        for row in table.rows
    }
    return {
        "methods": methods,
        "winners": {key: list(names) for key, names in table.winners.items()},
        "better_than_plain": {key: list(names) for key, names in table.better_than_plain.items()},
        "better_than_scaled": {key: list(names) for key, names in table.better_than_scaled.items()},
        "better_than_all": dict(table.better_than_all),
    }


def show(title: str, view: Table, wrap: bool = False) -> None:
    """Print a table under its title, as wide as it is: no cell is cut, or wrapped unless `wrap` is set.

    A table that is not printed to a terminal has no width: its lines stay whole for other programs.
    """
    wide = Console(width=10_000)
    width = wide.measure(view).maximum
    if title:
        print(printable(title))
    terminal = Console()
    Console(width=min(width, terminal.width) if wrap and terminal.is_terminal else width).print(view)
