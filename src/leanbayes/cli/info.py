"""`leanbayes info`: what is in a saved model, or in a run's folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from leanbayes.cli.options import parse
from leanbayes.errors import LeanBayesError
from leanbayes.saving import describe
from leanbayes.training import read_record


@dataclass(frozen=True)
class InfoOptions:
    """Tell what is in a saved model, or in a run's folder.

    Attributes:
        path: a model.safetensors file, or the folder of a run.
        json: print JSON.
    """

    path: tyro.conf.Positional[Path]
    json: bool = False


def info(words: list[str]) -> None:
    """Run the command."""
    options = parse(InfoOptions, words, "leanbayes info")
    found: dict[str, Any] = {}
    path = options.path
    if not path.exists():
        raise LeanBayesError(f"There is no {path}: check the path.")
    if path.is_dir():
        record = read_record(path)
        found["run"] = {key: record[key] for key in ("status", "config", "scores", "costs", "versions", "machine")}
        path = path / "model.safetensors"
    if path.is_file():
        found["file"] = describe(path)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found, path)


def _show(found: dict[str, Any], path: Path) -> None:
    console = Console()
    view = Table(box=None, show_header=False)
    run = found.get("run")
    if run:
        view.add_row("status", run["status"])
        for name in ("data", "model", "recipe"):
            if name in run["config"]:
                view.add_row(name, _settings(run["config"][name]))
        for split, scores in run["scores"].items():
            view.add_row(f"{split} scores", _settings(scores))
        view.add_row("costs", _settings({k: v for k, v in run["costs"].items() if not isinstance(v, list)}))
    file = found.get("file")
    if file:
        view.add_row("file", f"{path}, {file['bytes']:,} bytes")
        view.add_row("method", _settings(file["method"]))
        view.add_row("likelihood", _settings(file["likelihood"]))
        view.add_row("rule", f"{file['rule']}, trained with {file['trained_rule'] or 'none yet'}")
        view.add_row("Bayesian weights", f"{file['bayesian_weights']:,} in {len(file['layers'])} parameters")
    console.print(view)
    if file:
        parts = Table("part", "numbers", "bytes", box=None)
        for name, part in file["parts"].items():
            parts.add_row(name, f"{part['numbers']:,}", f"{part['bytes']:,}")
        console.print(parts)


def _settings(values: Any) -> str:
    """Write settings in one line."""
    if not isinstance(values, dict):
        return f"{values:.4g}" if isinstance(values, float) else str(values)
    inside = ", ".join(f"{key}={_settings(value)}" for key, value in values.items() if key != "type")
    return f"{values['type']}({inside})" if "type" in values else inside
