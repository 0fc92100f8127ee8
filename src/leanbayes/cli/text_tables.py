"""Tables for the terminal: the scores of one run, and several methods side by side."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from leanbayes import report
from leanbayes.cli.console import cell
from leanbayes.errors import printable
from leanbayes.report.cells import lines, writer
from leanbayes.report.columns import columns
from leanbayes.report.document import Column

# The columns of a comparison in the terminal, the most important first. The report has all columns.
SHOWN = (
    *("accuracy", "miou", "rmse", "nll", "ood:", "error_at_90", "coverage_95", "predict_time_ratio", "ece", "crps"),
    *("file_kb", "corruptions:accuracy", "epoch_ms", "corruptions:nll", "kilo_trained", "predict_ms_per_1000"),
)
WIDTH = 100  # characters of a comparison, unless all columns are asked for
_FEWEST = 4  # columns of a comparison, if the names of methods are long
_GROUPS = {"quality": "quality", "uncertainty": "uncertainty", "": "other scores"}
_COSTS = "cost"
# Scores that are in no other table: their titles and meanings.
_OTHERS = {
    "classwise_ece": ("class-wise ECE", "ECE of the probability of each class, averaged over the classes."),
    "excess_aurc": ("excess AURC", "AURC above that of the best order of the examples, all wrong ones last."),
    "entropy": ("entropy", "Mean entropy of all predictions, in nats: the total uncertainty."),
    "std": ("std", "Mean predicted std, in the unit of the target: the total uncertainty."),
}
_NARROW = 8  # characters of a column title, if its words are not longer


def scores_table(values: Mapping[str, float]) -> Table:
    """Return a table of the scores and costs of one run, in groups, one per line with its meaning."""
    view = Table(box=None, show_header=False)
    view.add_column(no_wrap=True)
    view.add_column(no_wrap=True, justify="right")
    view.add_column(style="dim")
    known = columns([dict.fromkeys(values, 0.0)])
    keys = {"examples", *(column.key for column in known)}
    meanings = {key: _OTHERS.get(key, (key.replace("_", " "), "")) for key in values if key not in keys}
    others = [Column(key, title, form="decimal", help=meaning) for key, (title, meaning) in meanings.items()]
    groups: dict[str, list[Column]] = {group: [] for group in (*_GROUPS.values(), _COSTS)}
    for column in (*known, *others):
        groups[_GROUPS.get(column.group, _COSTS)].append(column)
    for group, members in groups.items():
        if members:
            view.add_row(f"[bold]{group}[/]")
        for column in members:
            value = writer(column.form, [values[column.key]])(values[column.key])
            view.add_row(f"  {column.title}", value, cell(column.help))
    view.add_row("[bold]data[/]")
    view.add_row("  examples", f"{values['examples']:,}", "Examples that the scores are computed on.")
    return view


def comparison(table: report.Table, sort: str, everything: bool = False) -> Table:
    """Return a table of several methods, sorted by a column with the best first; a star marks the winners.

    Unless everything is asked for, it has the most important columns that fit into `WIDTH` characters.
    """
    wide, chosen = Console(width=10_000), _most_important(table, sort)
    if everything:
        return _comparison(table, sort, range(len(table.columns)))
    while len(chosen) > _FEWEST and wide.measure(_comparison(table, sort, sorted(chosen))).maximum > WIDTH:
        chosen.pop()
    return _comparison(table, sort, sorted(chosen))


def _most_important(table: report.Table, sort: str) -> list[int]:
    """Return the places of the columns that a terminal may show, the most important first."""
    ranks = {key: rank for rank, key in enumerate(SHOWN)}
    found = {}
    for place, column in enumerate(table.columns):
        key = "ood:" if column.key.startswith("ood:") else column.key
        if column.key == sort or key in ranks:
            found[place] = -1 if column.key == sort else ranks[key]
    return sorted(found, key=lambda place: found[place])


def _comparison(table: report.Table, sort: str, shown: Sequence[int]) -> Table:
    view = Table(box=None, padding=(0, 1, 0, 0))
    view.add_column("method", no_wrap=True)
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
