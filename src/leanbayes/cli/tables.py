"""Tables for the terminal: the scores of one run, and several methods side by side with a winner a column."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Column:
    """One column: where its value lies in the scores or costs, how it is shown, and which value is best."""

    key: str
    title: str
    form: str
    best: str | None = None  # "high", "low", or None where neither is


QUALITY = (
    Column("accuracy", "accuracy", "{:.2%}", "high"),
    Column("miou", "mIoU", "{:.2%}", "high"),
    Column("rmse", "RMSE", "{:.4g}", "low"),
    Column("nll", "NLL", "{:.4f}", "low"),
    Column("ece", "ECE", "{:.4f}", "low"),
    Column("brier", "Brier", "{:.4f}", "low"),
    Column("entropy_right", "entropy\nif right", "{:.3f}"),
    Column("entropy_wrong", "entropy\nif wrong", "{:.3f}", "high"),
    Column("mutual_information", "mutual\ninformation", "{:.4f}"),
    Column("std", "std", "{:.4g}"),
    Column("epistemic_std", "epistemic\nstd", "{:.4g}"),
)
COST = (
    Column("trainable", "trained\nnumbers", "{:.3g}", "low"),
    Column("file_kb", "file\nkB", "{:.0f}", "low"),
    Column("epoch_ms", "train\nms/epoch", "{:.0f}", "low"),
    Column("predict_ms_per_1000", "predict\nms/1000", "{:.0f}", "low"),
)
_NOT_COMPARED = ("entropy_right", "mutual_information", "std", "epistemic_std")


def scores_table(title: str, scores: Mapping[str, Any], costs: Mapping[str, Any]) -> Table:
    """Lay out the scores and costs of one run, one a line."""
    view = Table(title=title, box=None, show_header=False, title_justify="left")
    values = flat(scores, costs)
    for column in (*QUALITY, *COST):
        if column.key in values:
            view.add_row(column.title.replace("\n", " "), column.form.format(values[column.key]))
    view.add_row("examples", f"{scores['examples']:,}")
    return view


def flat(scores: Mapping[str, Any], costs: Mapping[str, Any]) -> dict[str, float]:
    """Bring scores and costs together under the keys of the columns."""
    values = {**costs, **scores}
    if "file_bytes" in values:
        values["file_kb"] = values["file_bytes"] / 1e3
    if values.get("epoch_seconds"):
        values["epoch_ms"] = 1e3 * statistics.median(values["epoch_seconds"])
    return values


def comparison(title: str, rows: Mapping[str, Mapping[str, float]]) -> tuple[Table, str]:
    """Lay out several methods, with a star at the best value of a column, and name the winner of each below."""
    columns = [c for c in (*QUALITY, *COST)
               if c.key not in _NOT_COMPARED and all(c.key in values for values in rows.values())]  # fmt: skip
    view = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    view.add_column("method", no_wrap=True)
    for column in columns:
        view.add_column(column.title, justify="right", no_wrap=True)
    winners = {column.key: best_of(column, rows) for column in columns}
    for name, values in rows.items():
        cells = []
        for column in columns:
            text = column.form.format(values[column.key])
            cells.append(f"[bold green]{text}*[/]" if name in winners[column.key] else f"{text} ")
        view.add_row(name, *cells)
    lines = [f"  {c.title.replace(chr(10), ' ') + ':':<20} {', '.join(winners[c.key])}" for c in columns]
    return view, "\n".join(["* best in its column:", *lines])


def best_of(column: Column, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Name the methods with the best value, as far as it is shown: two that look alike both win."""
    values = {name: row[column.key] for name, row in rows.items() if not math.isnan(row[column.key])}
    if column.best is None or not values:
        return []
    best = (max if column.best == "high" else min)(values.values())
    return [name for name, value in values.items() if column.form.format(value) == column.form.format(best)]


def wide_console() -> Console:
    """Make a console that does not cut a table where nobody's terminal sets the width."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
