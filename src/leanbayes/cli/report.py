"""`leanbayes report RUN...`: one HTML file on runs of one data set, that needs nothing else to be looked at."""

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
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
from leanbayes.files import written_whole
from leanbayes.methods import describe_method
from leanbayes.report import AssessedRun, document_of, write
from leanbayes.report.collect import check_same_task as check_same_task
from leanbayes.training.record import FREE, without_places

Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS")]


@dataclass(frozen=True)
class ReportOptions:
    """Write a report on trained runs: one HTML file that can be sent, and opened without a network.

    Runs of one method with several seeds are one line of it. What a look at a run has found is kept in its folder, and
    it is not looked at again unless --ood or --look.* ask for another look.

    Attributes:
        runs: folders of runs, or folders that hold some, such as that of a comparison.
        out: file to write.
        title: heading of the report. None means the data and the network.
        ood: sets of small images that the model should not be sure of, such as letters or svhn, or rotated and noisy
            for such copies of the test images. None means those that suit the data.
        look: how to look at each model.
        root: folder that holds the data sets. None means what the environment variable LEANBAYES_DATA says.
        device: where to predict. None means the GPU, if there is one.
        quiet: show no progress.
    """

    runs: Runs = ()
    out: Path = Path("report.html")
    title: str | None = None
    ood: tuple[str, ...] | None = None
    look: Look = field(default_factory=Look)
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    quiet: bool = False


def report(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(ReportOptions, words, "report")
    if not options.runs:
        raise LeanBayesError("No run was given: name the folder of at least one, or of a comparison.")
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
        usual = options.look == Look() and options.ood is None
        look, name, shown = None if usual else options.look, names[folder], not options.quiet
        runs.append(look_at(run, data[source], look, options.ood, options.root, name=name, shown=shown))
    write_report(runs, options.out, options.title or "", command)


def write_report(runs: Sequence[AssessedRun], path: Path, title: str = "", command: str = "") -> None:
    """Write the report of assessed runs, and tell where it is."""
    write(document_of(runs, title, command), path)
    print(f"The report is in {path}: open it in a browser.")


def check_writable(path: Path) -> None:
    """Find out that a file cannot be written before the work for it is done; an older one stays as it is."""
    if path.is_dir():
        raise LeanBayesError(f"{path} is a folder: give the name of a file, such as {path / 'report.html'}.")
    with contextlib.suppress(_NotYet), written_whole(path):
        raise _NotYet


class _NotYet(Exception):
    """There is nothing to write yet."""


def command_of(name: str, words: Sequence[str]) -> str:
    """Return a command as it can be shown to others: without folders of this machine."""
    return shlex.join(["leanbayes", name, *without_places(words)])


# -- runs, and what they are called -----------------------------------------------------------------------------------


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, or else the runs right in it."""
    if (folder / "run.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    if not found:
        raise LeanBayesError(f"There is no run in {folder} (it has no run.json): check the path.")
    return found


def _checked(folders: Sequence[Path]) -> dict[Path, str]:
    """Give each run its name, if all can be brought together: it is told now, not when some have been looked at."""
    records = {folder: open_run(folder, "cpu").record for folder in folders}
    names = _names(records)
    not_yet = {"scores": {"examples": 0}}
    check_same_task(
        [AssessedRun(names[folder], of["config"]["recipe"]["seed"], of, not_yet) for folder, of in records.items()]
    )
    return names


def _names(records: Mapping[Path, dict[str, Any]]) -> dict[Path, str]:
    """Name the runs after their methods; where those of one method differ in the recipe or network, by that, too."""
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
    """Return what runs of one method may differ in, other than their seeds."""
    recipe = {key: value for key, value in config["recipe"].items() if key not in ("seed", "type", *FREE)}
    return {**recipe, "precision": config["precision"], "model": config["model"]["name"], **config["model"]["options"]}
