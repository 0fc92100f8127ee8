"""The record of a run: `run.json`, with its settings, versions, machine, history, scores and costs."""

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import leanbayes
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.files import written_whole
from leanbayes.plain import json_text, with_nan

_PARTS = {
    "status": str,
    "config": dict,
    "versions": dict,
    "machine": dict,
    "history": list,
    "scores": dict,
    "costs": dict,
}
_NUMBERS = ("history", "scores", "costs")  # parts in which null is a number that is not defined
# Settings of a recipe that may differ when a run is resumed: none of them changes the result.
FREE = (
    "accumulate",
    "checkpoint_minutes",
    "checkpoint_steps",
    "device",
    "evaluate_every",
    "keep",
    "log_every",
    "precision",  # what came of it is compared
    "unused_parameters",
    "workers",
)


class Record:
    """What is known of a run; `write` puts it into `run.json` in the run's folder."""

    def __init__(self, folder: Path | None, config: dict[str, Any]) -> None:
        self.folder = folder
        self.values: dict[str, Any] = {
            "status": "running",
            "config": _as_json(config),
            "command": _command(),
            "versions": versions(),
            "machine": machine(),
            "history": [],
            "scores": {},
            "costs": {},
        }

    def write(self) -> None:
        """Replace `run.json`, atomically."""
        if self.folder is not None:
            write_json(self.folder / "run.json", self.values)

    def check_same(self, old: dict[str, Any]) -> None:
        """Refuse to go on with a run that has other settings; how a finished one was cut does not matter any more."""
        new = dict(self.values["config"])
        if old["status"] == "finished":
            new["parts_of_a_batch"] = old["config"].get("parts_of_a_batch")
        difference = _difference(old["config"], new)
        if difference:
            name, before, now = difference
            raise LeanBayesError(
                f"{self.folder} holds a run with {name}={before!r}, and this one has {now!r}: "
                "choose another folder, or overwrite that run (--overwrite)."
            )


def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the `run.json` of a run's folder."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        inside = sorted(Path(folder).glob("*/run.json"))
        hint = f"give one of the runs in it, such as {inside[0].parent}" if inside else "check the path"
        raise LeanBayesError(f"There is no run in {folder} (it has no run.json): {hint}.")
    try:
        values = json.loads(path.read_text(), parse_constant=lambda name: None)  # as earlier versions wrote nan
        for name, kind in _PARTS.items():
            if not isinstance(values[name], kind):
                raise TypeError(f"{name} is of another type")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise FileFormatError(f"{path} is damaged ({reason}): remove the run's folder and train again.") from None
    return values | {name: with_nan(values[name]) for name in _NUMBERS}


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file that appears whole or not at all, with null for nan and infinity."""
    with contextlib.suppress(OSError):  # what is wrong with the folder is told when the file is opened
        path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        temporary.write_text(json_text(values) + "\n")


def _as_json(config: dict[str, Any]) -> Any:
    """Bring settings to what will be read again: a tuple is a list, and infinity is None."""
    try:
        return json.loads(json_text(config))
    except (TypeError, ValueError) as error:
        raise LeanBayesError(f"The notes cannot be written as JSON ({error}): give numbers, texts and lists.") from None


def _command() -> str:
    """Return the command of this process, without the folders of its machine."""
    program = Path(sys.argv[0])
    name = "leanbayes" if program.stem in ("leanbayes", "__main__") else program.name
    return shlex.join([name, *without_places(sys.argv[1:])])


def without_places(words: Sequence[str]) -> list[str]:
    """Leave out flags that only say where things lie, and of other words the folders of one's own machine."""
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        place = name in ("--root", "--out", "--json")
        if not skip and not place:
            kept.append(re.sub(r"(?<![^=:])[/~][^=:]*/(?=[^/])", "", word))
        skip = place and not equals
    return kept


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    return {
        "leanbayes": leanbayes.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def machine() -> dict[str, Any]:
    """Describe the machine, without names that would tell whose it is."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def _difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Find the first setting in which two configurations differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        free = set(FREE) if name == "recipe" else set()
        for key in sorted({*old, *new} - free, key=lambda key: (key != "type", key)):
            found = _difference(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
            if found:
                return found
        return None
    return None if old == new else (name, old, new)
