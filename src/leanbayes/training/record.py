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

from leanbayes.core.arguments import checked
from leanbayes.core.config import current_settings
from leanbayes.core.files import reason_of, written_whole
from leanbayes.core.json_values import check_shape, json_text, read_untrusted, with_nan
from leanbayes.core.version import __version__
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.methods import METHODS
from leanbayes.training.recipe import Recipe

_NUMBER = (float, None)
_SHAPE = {
    "status": str,
    "config": {"recipe": {str: Any}, "data?": str, "method?": {str: Any}},
    "command?": str,
    "versions": {str: (str, None)},
    "machine": {"system?": str, "processor?": str, "cores?": (int, None), "gpus?": [str]},
    "history": [{"step?": int, "epoch?": _NUMBER, "validation?": {str: _NUMBER}}],
    "scores": {str: {str: Any}},
    "costs": {"trainable?": float, "stored?": float, "file_bytes?": float, "epoch_seconds?": [float]},
}
_NUMBERS = ("history", "scores", "costs")  # parts in which null is a number that is not defined
_FORMER_NAMES = {"normalise": "normalize"}  # of notes in the files of version 0.1


class Record:
    """The content of `run.json`, to be filled while a run is trained.

    Args:
        folder: The folder of the run, or None if nothing is to be written.
        config: The settings of the run, as JSON values.

    Attributes:
        status: "starting", "running", "stopped", "finished" or "failed: " with the reason.
        history: The log entries.
        scores: The scores of the trained model, by the name of the split.
        costs: Seconds, bytes and counts.
    """

    def __init__(self, folder: Path | None, config: dict[str, Any]) -> None:
        self.folder, self.config = folder, _as_json(config)
        self._origin = {"command": _command(), "versions": versions(), "machine": machine()}
        self.status = "starting"
        self.history: list[dict[str, Any]] = []
        self.scores: dict[str, dict[str, float]] = {}
        self.costs: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Record(folder={self.folder}, status={self.status!r}, {len(self.history)} log entries)"

    def write(self) -> None:
        """Replace `run.json`, atomically."""
        if self.folder is None:
            return
        values = {
            "status": self.status,
            "config": self.config,
            **self._origin,
            "history": self.history,
            "scores": self.scores,
            "costs": self.costs,
        }
        write_json(self.folder / "run.json", values)


@checked()
def read_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the record of a run, `run.json` in its folder.

    Args:
        folder: The folder of the run, as given to `fit` as `out`.

    Returns:
        A dict with the keys "status", "config" (the settings), "command", "versions", "machine", "history" (the log
        entries), "scores" and "costs". Numbers that are not defined are nan. Settings that an earlier version of
        leanbayes wrote under other names have their current names.

    Raises:
        LeanBayesError: The folder holds no run.
        FileFormatError: The file is damaged.

    Example:
        >>> record = read_record("runs/first")
        >>> record["scores"]["validation"]["accuracy"]
        >>> [entry["loss"] for entry in record["history"]]
    """
    path = Path(folder) / "run.json"
    if not os.path.isfile(path):
        inside = sorted(Path(folder).glob("*/run.json"))
        hint = f"give one of the runs in it, such as {inside[0].parent}" if inside else "check the path"
        raise LeanBayesError(f"There is no run in {folder} (it has no run.json): {hint}.")
    try:
        values = read_untrusted(path)
        check_shape(values, _SHAPE)
    except OSError as error:
        raise LeanBayesError(f"Cannot read {path} ({reason_of(error)}): check its permissions.") from None
    except ValueError as error:
        raise FileFormatError(f"{path} is damaged ({error}): remove the run's folder and train again.") from None
    config = {_FORMER_NAMES.get(name, name): value for name, value in values["config"].items()}
    numbers = {name: with_nan(values[name]) for name in _NUMBERS}
    return values | {"config": _under_current_names(config)} | numbers


def _under_current_names(value: Any) -> Any:
    """Return encoded settings with the recipes and methods in them under their current names."""
    if isinstance(value, list):
        return [_under_current_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    types = {cls.__name__: cls for cls in (Recipe, *map(type, METHODS.values()))}
    settings = {name: _under_current_names(item) for name, item in value.items()}
    cls = types.get(settings["type"]) if isinstance(settings.get("type"), str) else None
    return settings if cls is None else current_settings(cls, settings)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file that appears complete or not at all, with null for nan and infinity."""
    with contextlib.suppress(OSError):  # opening the file reports what is wrong with the folder
        path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        temporary.write_text(json_text(values) + "\n")


def _as_json(config: dict[str, Any]) -> Any:
    """Return settings as they will be read: a tuple becomes a list, and infinity None."""
    try:
        return json.loads(json_text(config))
    except (TypeError, ValueError) as error:
        raise LeanBayesError(
            f"The notes cannot be written as JSON ({error}): use numbers, strings, lists and dicts."
        ) from None


def _command() -> str:
    """Return the command line of this process, without the folders of its machine."""
    program = Path(sys.argv[0])
    name = "leanbayes" if program.stem in ("leanbayes", "__main__") else program.name
    return shlex.join([name, *without_places(sys.argv[1:])])


def without_places(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without flags for folders, and without the folders in the other words."""
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        place = name in ("--root", "--out")
        if not skip and not place:
            kept.append(re.sub(r"(?<![^=:])[/~][^=:]*/(?=[^/])", "", word))
        skip = place and not equals
    return kept


def versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on."""
    return {
        "leanbayes": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def machine() -> dict[str, Any]:
    """Describe the machine, without names of its user or host."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }
