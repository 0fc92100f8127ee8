"""`leanbayes info`: what is in a saved model, or in a run's folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.table import Table

from leanbayes import config
from leanbayes.cli.options import parse
from leanbayes.cli.runs import MODEL
from leanbayes.cli.tables import show
from leanbayes.errors import LeanBayesError
from leanbayes.plain import json_text
from leanbayes.saving import describe
from leanbayes.training import Recipe, read_record


@dataclass(frozen=True)
class InfoOptions:
    """Tell what is in a saved model, or in a run's folder.

    Attributes:
        path: a model.safetensors file, a compact file, or the folder of a run.
        json: print JSON, not a table.
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    json: bool = False


def info(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(InfoOptions, words, "info")
    return lambda: _info(options.path, options.json)


def _info(path: Path, as_json: bool) -> None:
    found: dict[str, Any] = {}
    if not path.exists():
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
    view = Table(box=None, show_header=False)
    lines = [*_run_lines(found.get("run", {})), *_file_lines(path, found.get("file", {}))]
    for name, text in lines:
        view.add_row(name, escape(text))
    show("", view)
    if "file" in found:
        parts = Table("part of the file", "numbers", "bytes", box=None)
        for name, part in found["file"]["parts"].items():
            parts.add_row(name, f"{part['numbers']:,}", f"{part['bytes']:,}")
        print()
        show("", parts)


def _run_lines(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Tell what was trained, on what and how: of the settings, those that are not the usual ones."""
    if not run:
        return []
    usual = config.encode(Recipe())
    changed = {key: value for key, value in run["config"]["recipe"].items() if usual.get(key) != value}
    model = run["config"].get("model", {})
    lines = [
        ("status", run["status"]),
        ("data", run["config"]["data"]),
        ("network", " ".join([model.get("name", "one's own"), _settings(model.get("options", {}))]).strip()),
        ("recipe", _settings(changed) or "the usual one"),
        ("versions", _settings(run["versions"])),
        ("machine", _settings(run["machine"])),
    ]
    lines += [(f"{split} scores", _settings(scores)) for split, scores in run["scores"].items()]
    costs = {key: value for key, value in run["costs"].items() if not isinstance(value, list)}
    return [*lines, ("costs", _settings(costs))]


def _file_lines(path: Path, file: dict[str, Any]) -> list[tuple[str, str]]:
    if not file:
        return []
    weights = f"{file['bayesian_weights']:,} of {file['weights']:,}"
    mean, std = file["moment_scale"]
    factors = "not calibrated" if mean == std == 1 else f"mean × {mean:.4g}, std × {std:.4g}"
    return [
        ("file", f"{path}, {file['bytes']:,} bytes"),
        ("method", _settings(file["method"])),
        ("likelihood", _settings(file["likelihood"])),
        ("rule", f"{file['rule']}, trained with {file['trained_rule'] or 'none yet'}"),
        *([("one pass", factors)] if file["bayesian_weights"] else []),
        ("Bayesian weights", f"{weights} in {len(file['layers'])} parameters"),
    ]


def _settings(values: Any) -> str:
    """Write settings in one line."""
    if not isinstance(values, dict):
        return f"{values:.4g}" if isinstance(values, float) else str(values)
    inside = ", ".join(f"{key}={_settings(value)}" for key, value in values.items() if key != "type")
    return f"{values['type']}({inside})" if "type" in values else inside
