"""`leanbayes report RUNS`: one HTML file about runs of one data set, which needs no other files."""

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from leanbayes.cli.console import line
from leanbayes.cli.evaluations import evaluation_of
from leanbayes.cli.options import parse
from leanbayes.cli.runs import open_run
from leanbayes.core import config
from leanbayes.core.files import written_whole
from leanbayes.core.json_values import json_text
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import EvaluationSettings
from leanbayes.methods import describe_method
from leanbayes.report import EvaluatedRun, document_of, write
from leanbayes.report.collect import check_same_task as check_same_task
from leanbayes.training.recipe import FREE_ON_RESUME
from leanbayes.training.record import without_places

Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS", help_behavior_hint="(required)")]


@dataclass(frozen=True)
class ReportOptions:
    """Write a report about trained runs: one HTML file, which needs no network connection.

    Runs of one method with several seeds are one line of the report. The evaluation of a run is stored in its folder,
    and not repeated unless --ood or --evaluation.* ask for another one.

    Attributes:
        runs: folders of runs, or folders that contain runs, such as that of a comparison.
        out: file to write.
        title: heading of the report. None means the data and the network.
        ood: out-of-distribution sets of small images, such as letters or svhn; rotated and noisy are made from the
            test images. None means the usual ones for the data.
        evaluation: how to evaluate each model.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        device: where to predict. None means the GPU, if there is one.
        quiet: show no progress.
        json: print JSON instead of a sentence.
    """

    runs: Runs = ()
    out: Path = Path("report.html")
    title: str | None = None
    ood: tuple[str, ...] | None = None
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    quiet: bool = False
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(ReportOptions, words, "report")
    if not options.runs:
        raise LeanBayesError("The run is missing: give the folder of at least one run, or of a comparison.")
    return lambda: _report(options, command_of("report", words))


def _report(options: ReportOptions, command: str) -> None:
    check_writable(options.out)
    folders = list(dict.fromkeys(folder for given in options.runs for folder in _runs_in(given)))
    names = _checked(folders)
    data: dict[str, Data] = {}
    runs = []
    for folder in folders:
        run = open_run(folder, options.device)
        source = str(run.record["config"]["source"])
        if source not in data:
            data[source] = run.data(options.root)
        default = options.evaluation == EvaluationSettings() and options.ood is None
        settings, name, shown = None if default else options.evaluation, names[folder], not options.quiet
        runs.append(evaluation_of(run, data[source], settings, options.ood, options.root, name=name, shown=shown))
    write_report(runs, options.out, options.title or "", command, shown=not options.json)
    if options.json:
        scores = [{"run": str(folder), "scores": run.scores} for folder, run in zip(folders, runs, strict=True)]
        print(json_text({"report": str(options.out), "runs": scores}))


def write_report(
    runs: Sequence[EvaluatedRun], path: Path, title: str = "", command: str = "", *, shown: bool = True
) -> None:
    """Write the report of evaluated runs, and print where it is."""
    write(document_of(runs, title, command), path)
    if shown:
        line(f"The report is in {path}: open it in a browser.")


def check_writable(path: Path) -> None:
    """Raise an error if a file cannot be written, before the work for it is done; an older file stays intact."""
    if path.is_dir():
        raise LeanBayesError(f"{path} is a folder: give the name of a file, such as {path / 'report.html'}.")
    with contextlib.suppress(_NotYet), written_whole(path):
        raise _NotYet


class _NotYet(Exception):
    """Leaves the block before anything is written."""


def command_of(name: str, words: Sequence[str]) -> str:
    """Return a command without the folders of this machine, so that it can be shown to others."""
    return shlex.join(["leanbayes", name, *without_places(words)])


# -- runs and their names ---------------------------------------------------------------------------------------------


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, and otherwise the runs that it contains."""
    if (folder / "run.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    if not found:
        raise LeanBayesError(f"There is no run in {folder} (it has no run.json): check the path.")
    return found


def _checked(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each run, or raise an error before any evaluation if the runs do not belong together."""
    records = {folder: open_run(folder, "cpu").record for folder in folders}
    names = _names(records)
    not_yet = {"scores": {"examples": 0}}
    check_same_task(
        [EvaluatedRun(names[folder], of["config"]["recipe"]["seed"], of, not_yet) for folder, of in records.items()]
    )
    return names


def _names(records: Mapping[Path, dict[str, Any]]) -> dict[Path, str]:
    """Name the runs after their methods, and if those of one method differ in recipe or network, also after that."""
    names = {folder: describe_method(config.decode(record["config"]["method"])) for folder, record in records.items()}
    for name in set(names.values()):
        alike = [folder for folder in names if names[folder] == name]
        settings = {folder: _settings(records[folder]["config"]) for folder in alike}
        keys = dict.fromkeys(key for folder in alike for key in settings[folder])
        differ = [key for key in keys if len({str(settings[folder].get(key)) for folder in alike}) > 1]
        for folder in alike if differ else ():
            names[folder] += f" ({', '.join(f'{key}={settings[folder].get(key)}' for key in differ)})"
    return names


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which runs of one method may differ, other than the seed."""
    recipe = {key: value for key, value in config["recipe"].items() if key not in ("seed", "type", *FREE_ON_RESUME)}
    return {**recipe, "precision": config["precision"], "model": config["model"]["name"], **config["model"]["options"]}
