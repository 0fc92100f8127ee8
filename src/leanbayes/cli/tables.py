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
    """One figure: its key in the scores or costs, how it is shown, and which value is best."""

    key: str
    title: str
    form: str
    best: str | None = None  # "high", "low", or None where neither is

    def text(self, value: float) -> str:
        """Write a value."""
        return "–" if math.isnan(value) else self.form.format(value)


QUALITY = (
    Column("accuracy", "accuracy", "{:.2%}", "high"),
    Column("miou", "mIoU", "{:.2%}", "high"),
    Column("rmse", "RMSE", "{:.4g}", "low"),
    Column("nll", "NLL", "{:.4f}", "low"),
    Column("ece", "ECE", "{:.4f}", "low"),
    Column("brier", "Brier", "{:.4f}"),
    Column("entropy_right", "entropy\nif right", "{:.3f}"),
    Column("entropy_wrong", "entropy\nif wrong", "{:.3f}", "high"),
    Column("mutual_information", "mutual\ninformation", "{:.4f}"),
    Column("std", "std", "{:.4g}"),
    Column("epistemic_std", "epistemic\nstd", "{:.4g}"),
)
COST = (
    Column("kilo_trained", "numbers\n×1000", "{:.1f}", "low"),
    Column("file_kb", "file\nkB", "{:.0f}", "low"),
    Column("epoch_ms", "train\nms/epoch", "{:.0f}", "low"),
    Column("predict_ms_per_1000", "predict\nms/1000", "{:.0f}", "low"),
)


def flat(scores: Mapping[str, Any], costs: Mapping[str, Any]) -> dict[str, float]:
    """Bring scores and costs together under the keys of the columns."""
    values = {**costs, **scores}
    values["kilo_trained"] = costs["trainable"] / 1e3
    if "file_bytes" in costs:
        values["file_kb"] = costs["file_bytes"] / 1e3
    if costs.get("epoch_seconds"):
        values["epoch_ms"] = 1e3 * statistics.median(costs["epoch_seconds"])
    return values


def scores_table(scores: Mapping[str, Any], costs: Mapping[str, Any]) -> Table:
    """Lay out the scores and costs of one run, one a line."""
    view = Table(box=None, show_header=False)
    values = flat(scores, costs)
    for column in (*QUALITY, *COST):
        if column.key in values:
            view.add_row(column.title.replace("\n", " "), column.text(values[column.key]))
    view.add_row("examples", f"{scores['examples']:,}")
    return view


def comparison(rows: Mapping[str, Mapping[str, float]]) -> tuple[Table, str]:
    """Lay out several methods, with a star at the best value of a column, and name the winner of each below."""
    columns = [c for c in (*QUALITY, *COST) if c.best and all(c.key in values for values in rows.values())]
    winners = {column.key: best_of(column, rows) if len(rows) > 1 else [] for column in columns}
    view = Table(box=None, padding=(0, 1, 0, 0))
    view.add_column("method", no_wrap=True)
    for column in columns:
        view.add_column(column.title, justify="right", no_wrap=True)
    for name, values in rows.items():
        cells = []
        for column in columns:
            text = column.text(values[column.key])
            cells.append(f"[bold green]{text}*[/]" if name in winners[column.key] else f"{text} ")
        view.add_row(name, *cells)
    if len(rows) < 2:
        return view, ""
    lines = [f"  {c.title.replace(chr(10), ' ') + ':':<18} {', '.join(winners[c.key]) or '–'}" for c in columns]
    return view, "\n".join(["* Best in its column:", *lines])


def best_of(column: Column, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Name the methods with the best value, as far as it is shown: two that look alike both win."""
    values = {name: row[column.key] for name, row in rows.items() if not math.isnan(row[column.key])}
    if not values:
        return []
    best = (max if column.best == "high" else min)(values.values())
    return [name for name, value in values.items() if column.text(value) == column.text(best)]


def show(title: str, view: Table) -> None:
    """Print a table under its title, at its own width: no cell is ever cut or folded."""
    wide = Console(width=10_000)
    width = wide.measure(view).maximum
    if title:
        print(title)
    Console(width=width).print(view)
