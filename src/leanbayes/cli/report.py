"""`leanbayes report RUN...`: one HTML file on runs of one data set, that needs nothing else to be looked at."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from leanbayes import config
from leanbayes.cli.looking import look_at
from leanbayes.cli.options import parse
from leanbayes.cli.runs import open_run
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import Look
from leanbayes.methods import describe_method
from leanbayes.report import AssessedRun, document_of, write
from leanbayes.training import read_record
from leanbayes.training.record import FREE, without_places

Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS")]


@dataclass(frozen=True)
class ReportOptions:
    """Write a report on trained runs: one HTML file that can be sent, and opened without a network.

    Runs of one method with several seeds are one line of it. What a look at a run has found is kept in its folder.

    Attributes:
        runs: folders of runs, or folders that hold some, such as that of a comparison.
        out: file to write.
        title: heading of the report.
        ood: data sets of another kind that the model should not be sure of. None means those that suit the data.
        look: how to look at each model.
        root: folder that holds the data sets. None means what the environment variable LEANBAYES_DATA says.
        device: where to predict. None means the GPU, if there is one.
        quiet: show no progress.
    """

    runs: Runs = ()
    out: Path = Path("report.html")
    title: str = ""
    ood: tuple[str, ...] | None = None
    look: Look = field(default_factory=Look)
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    quiet: bool = False


def report(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(ReportOptions, words, "report")
    if not options.runs:
        raise LeanBayesError("No run was given: name the folder of at least one.")
    command = shlex.join(["leanbayes", "report", *without_places(words)])
    return lambda: _report(options, command)


def _report(options: ReportOptions, command: str) -> None:
    folders = [folder for given in options.runs for folder in _runs_in(given)]
    records = {folder: read_record(folder) for folder in folders}
    names = _names(records)
    data: dict[str, Data] = {}
    runs = []
    for folder in folders:
        run = open_run(folder, options.device)
        source = str(run.record["config"]["source"])
        if source not in data:
            data[source] = run.data(options.root)
        shown = not options.quiet
        runs.append(look_at(run, data[source], options.look, options.ood, options.root, names[folder], shown))
    write_report(runs, options.out, options.title, command)
    print(f"Report: {options.out}")


def write_report(runs: Sequence[AssessedRun], path: Path, title: str = "", command: str = "") -> None:
    """Write the report of assessed runs."""
    write(document_of(runs, title, command), path)


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, or else the runs right in it."""
    if (folder / "run.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    if not found:
        raise LeanBayesError(f"There is no run in {folder} (it has no run.json): check the path.")
    return found


def _names(records: dict[Path, dict[str, Any]]) -> dict[Path, str]:
    """Name the runs after their methods; where those of one method differ in the recipe or network, by that, too."""
    names = {folder: describe_method(config.decode(record["config"]["method"])) for folder, record in records.items()}
    for name in set(names.values()):
        alike = [folder for folder in names if names[folder] == name]
        settings = {folder: _settings(records[folder]) for folder in alike}
        keys = [k for k in settings[alike[0]] if len({str(settings[folder].get(k)) for folder in alike}) > 1]
        for folder in alike if keys else ():
            names[folder] += f" ({', '.join(f'{key}={settings[folder].get(key)}' for key in keys)})"
    return names


def _settings(record: dict[str, Any]) -> dict[str, Any]:
    recipe = {key: value for key, value in record["config"]["recipe"].items() if key not in ("seed", "type", *FREE)}
    return {**recipe, "model": (record["config"].get("model") or {}).get("name")}
