"""`leanbayes info PATH`: describe a saved model, or the folder of a run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from leanbayes.cli.console import cell
from leanbayes.cli.options import parse
from leanbayes.cli.runs import MODEL
from leanbayes.cli.text_tables import show
from leanbayes.core import config
from leanbayes.core.json_values import json_text
from leanbayes.deploy.loading import describe
from leanbayes.errors import LeanBayesError
from leanbayes.report.cells import writer
from leanbayes.report.columns import columns
from leanbayes.report.evaluated_run import in_columns
from leanbayes.training import Recipe, read_record

_SPLITS = {"validation": "held-out"}  # the names of splits that differ from those in run.json


@dataclass(frozen=True)
class InfoOptions:
    """Describe a saved model, or the folder of a run.

    Attributes:
        path: a model.safetensors file, a compact file, or the folder of a run.
        json: print JSON instead of a table.
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(InfoOptions, words, "info")
    return lambda: _info(options.path, options.json)


def _info(path: Path, as_json: bool) -> None:
    found: dict[str, Any] = {}
    if not os.path.exists(path):
        raise LeanBayesError(f"There is no file or folder {path}: check the path.")
    if path.is_dir():
        record = read_record(path)
        found["run"] = {key: record[key] for key in ("status", "config", "scores", "costs", "versions", "machine")}
        path = path / MODEL
    if path.is_file():
        found["file"] = describe(path)
    if as_json:
        print(json_text(found))
        return
    run = found.get("run", {})
    groups = {"run": _run_lines(run), "model": _file_lines(path, found.get("file", {}), run)}
    for split, scores in run.get("scores", {}).items():
        groups[f"{_SPLITS.get(split, split)} scores"] = _values(scores)
    groups["cost"] = _values(in_columns(run["costs"])) if {"trainable", "stored"} <= run.get("costs", {}).keys() else []
    view = Table(box=None, show_header=False)
    view.add_column(no_wrap=True)
    view.add_column(overflow="fold")
    for group, lines in groups.items():
        if lines:
            view.add_row(f"[bold]{cell(group)}[/]")
        for name, text in lines:
            view.add_row(f"  {cell(name)}", cell(text))
    show("", view, wrap=True)
    if "file" in found:
        parts = Table(box=None)
        for name, side in (("part of the file", "left"), ("numbers", "right"), ("bytes", "right")):
            parts.add_column(name, justify=side)  # type: ignore[arg-type]
        for name, part in found["file"]["parts"].items():
            parts.add_row(f"  {cell(name)}", f"{part['numbers']:,}", f"{part['bytes']:,}")
        show("", parts)


def _values(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the scores or costs that have a column in tables, as texts."""
    known = {key: float(value) for key, value in scores.items() if isinstance(value, (int, float))}
    found = [(one.title, writer(one.form, [known[one.key]])(known[one.key])) for one in columns([known])]
    return [*found, *([("examples", f"{known['examples']:,.0f}")] if "examples" in known else [])]


def _run_lines(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe a run; of its recipe, only the settings that differ from the defaults."""
    if not run:
        return []
    default = config.encode(Recipe())
    changed = {key: value for key, value in run["config"]["recipe"].items() if default.get(key) != value}
    model = run["config"].get("model")
    model = model if isinstance(model, dict) else {}
    machine = run["machine"]
    processor = ", ".join(machine.get("gpus") or [str(machine.get("processor", "unknown processor"))])
    return [
        ("status", run["status"]),
        ("data", run["config"].get("data", "unknown")),
        ("network", " ".join([str(model.get("name", "custom")), _settings(model.get("options", {}))]).strip()),
        ("recipe", _settings(changed) or "default"),
        ("versions", ", ".join(f"{name} {version}" for name, version in run["versions"].items())),
        ("machine", f"{machine.get('system', 'unknown system')}, {processor}, {machine.get('cores')} cores"),
    ]


def _file_lines(path: Path, file: dict[str, Any], run: dict[str, Any]) -> list[tuple[str, str]]:
    if not file:
        return []
    weights = f"{file['bayesian_weights']:,} of {file['weights']:,}"
    mean, std = file["moment_scale"]
    layers = f"corrected in {len(file['moment_layers'])} layers" if file["moment_layers"] else ""
    factors = "" if mean == std == 1 else f"mean × {mean:.4g}, std × {std:.4g}"
    fits = file["moment_margins"]  # the first is for one margin
    margin = "".join([f"adjoint: weight {weight:.4g}, std × {factor:.4g}" for weight, factor, *_ in fits[:1]])
    calibration = ", ".join(filter(None, [layers, factors, margin])) or "not calibrated"
    scales = run.get("config", {}).get("scales")
    standardized = isinstance(scales, dict) and scales.get("target_std")
    unit = " Errors and stds are in units of the target's std." if standardized else ""
    return [
        ("file", f"{path}, {file['bytes']:,} bytes"),
        ("method", _settings(file["method"])),
        ("likelihood", _settings(file["likelihood"])),
        ("rule", f"{_settings(file['rule'])}, trained with {file['trained_rule'] or 'none yet'}"),
        *([("one pass", calibration)] if file["bayesian_weights"] else []),
        *([("policy", f"{file['policy']}{unit}")] if file.get("policy") else []),
        ("Bayesian weights", f"{weights} in {len(file['layers'])} parameters"),
    ]


def _settings(values: Any) -> str:
    """Write settings in one line."""
    if not isinstance(values, dict):
        return f"{values:.4g}" if isinstance(values, float) else str(values)
    inside = ", ".join(f"{key}={_settings(value)}" for key, value in values.items() if key != "type")
    return f"{values['type']}({inside})" if "type" in values else inside
