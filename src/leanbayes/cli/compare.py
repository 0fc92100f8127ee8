"""`leanbayes compare`: methods × seeds on one data set, in one table of quality and cost, and a report."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from leanbayes import config
from leanbayes.cli.jobs import Job, do_all, do_share, do_together
from leanbayes.cli.looking import ood_names, ood_sets
from leanbayes.cli.options import Flat, Task, config_of, is_first_process, parse, with_preset
from leanbayes.cli.report import check_writable, command_of, write_report
from leanbayes.cli.runs import Prepared, default_folder, prepare
from leanbayes.cli.tables import SHOWN, comparison, show, summary_of
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError, did_you_mean
from leanbayes.evaluation import METRICS, Look
from leanbayes.evaluation.outcomes import ClassOutcome, RegressionOutcome
from leanbayes.method import Method
from leanbayes.methods import METHODS, parse_method
from leanbayes.report import AssessedRun
from leanbayes.report.columns import known_keys, table
from leanbayes.training import Recipe
from leanbayes.training.record import machine, versions, write_json

Methods = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="METHODS")]


@dataclass(frozen=True)
class CompareOptions:
    """Train several methods on one data set, look at each from all sides, and show quality and cost side by side.

    What is finished is not done again: the same command goes on where it was stopped. Under torchrun or accelerate
    launch, on one machine or several, the trainings are shared out among the processes.

    Attributes:
        methods: names, with settings if wished: mean-field:rule=flipout,prior.scale=0.05. None means all there are.
        seeds: trainings of each method. Their seeds count up from --seed.
        jobs: trainings at the same time, each in a process of its own.
        sort: column that the table is sorted by, the best first, as compare.json calls it: nll, accuracy, ood:letters.
        ood: sets of small images that the model should not be sure of, such as letters or svhn, or rotated and noisy
            for such copies of the test images. None means those that suit the data.
        look: how to look at each model.
        together: under a launcher, let all processes work on each training, rather than share the trainings out.
        report: write report.html into the comparison's folder, too.
        json: write all figures to this file, too.
    """

    methods: Methods = ()
    task: Annotated[Task, Flat] = field(default_factory=Task)
    recipe: Annotated[Recipe, Flat] = field(default_factory=Recipe)
    seeds: int = 1
    jobs: int = 1
    sort: str = "nll"
    ood: tuple[str, ...] | None = None
    look: Look = field(default_factory=Look)
    together: bool = False
    report: bool = True
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise LeanBayesError(f"--{name} {getattr(self, name)} must be 1 or more.")
        if self.together and self.jobs > 1:
            raise LeanBayesError("--together has all processes work on one training at a time: leave out --jobs.")


def compare(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    settings = config_of(words)
    names = settings.pop("methods", list(METHODS))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise LeanBayesError("`methods` in the config file must be a list such as [mean-field, ensemble].")
    default = CompareOptions(tuple(names), *with_preset(words, settings))
    options = parse(CompareOptions, words, "compare", default, settings)
    methods = {name.rstrip(":"): parse_method(name) for name in options.methods}
    if len({repr(method) for method in methods.values()}) < len(options.methods):
        raise LeanBayesError("A method is named twice: give each once, or with different settings.")
    return lambda: _compare(options, methods, command_of("compare", words))


def _compare(options: CompareOptions, methods: dict[str, Method], command: str) -> None:
    task, recipe = options.task, options.recipe
    folder = task.out or default_folder(task, "compare", recipe.seed)
    prepared = prepare(task, recipe.seed)
    _check(options, prepared.data, folder)
    runs = _runs(options, _jobs(options, methods, folder), prepared.data)
    if not is_first_process():
        return
    shown = table(runs)
    figures = _figures(command, options, prepared)
    figures["results"] = [_result(run, methods[run.method]) for run in runs]
    figures["summary"] = summary_of(shown)
    for path in _figure_files(options, folder):
        write_json(path, figures)
    seeds = f", {options.seeds} seeds" if options.seeds > 1 else ""
    title = f"{prepared.data.name}, {task.model}: {runs[0].scores['examples']} test examples{seeds}"
    show(title, comparison(shown, options.sort))
    if options.sort not in {column.key for column in shown.columns}:
        print(f"No run has {options.sort}: the methods stand in the order that they were given in.")
    for line in filter(None, (shown.note, *dict.fromkeys(note for run in runs for note in run.assessment["notes"]))):
        print(line)
    if options.report:
        write_report(runs, folder / "report.html", command=command)
    print(f"Runs and figures are in {folder}.")


def _check(options: CompareOptions, data: Data, folder: Path) -> None:
    """Find out before the work, not after it, what would be in its way at the end."""
    if data.test is None:
        raise LeanBayesError(f"{data.name} has no test data to compare on: add some.")
    if options.ood is not None:
        ood_sets(options.ood, data, options.task.root, options.look)
    _check_sort(options, data)
    for path in (*_figure_files(options, folder), *([folder / "report.html"] if options.report else [])):
        with contextlib.suppress(OSError):  # what is wrong with the folder is told when the file is opened
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)


def _check_sort(options: CompareOptions, data: Data) -> None:
    kind = RegressionOutcome if data.task == "regression" else ClassOutcome
    foreign = {metric.name for of in METRICS.values() for metric in of} - {metric.name for metric in METRICS[kind]}
    if data.task != "segmentation":
        foreign.add("miou")
    keys = [key for key in known_keys() if key.rpartition(":")[2] not in foreign]
    keys += [f"ood:{name}" for name in ood_names(options.ood, data)]
    if options.sort not in keys:
        usual = ", ".join(key for key in keys if key in SHOWN and ":" not in key)
        hint = did_you_mean(options.sort, keys, f"use {usual}, or another name in compare.json.")
        raise LeanBayesError(f"There is no column {options.sort!r} to --sort by: {hint}")


def _jobs(options: CompareOptions, methods: dict[str, Method], folder: Path) -> list[Job]:
    seeds = range(options.recipe.seed, options.recipe.seed + options.seeds)
    return [
        Job(name, method, replace(options.recipe, seed=seed), options.task, folder, options.look, options.ood)
        for seed in seeds
        for name, method in methods.items()
    ]


def _runs(options: CompareOptions, jobs: Sequence[Job], data: Data) -> list[AssessedRun]:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return do_all(jobs, data, options.jobs)
    return do_together(jobs, data) if options.together else do_share(jobs, options.jobs)


def _figure_files(options: CompareOptions, folder: Path) -> list[Path]:
    return [folder / "compare.json", *([options.json] if options.json else [])]


def _figures(command: str, options: CompareOptions, prepared: Prepared) -> dict[str, Any]:
    """Begin the record of a comparison with what is needed to get its figures again, but no folder of this machine."""
    source = {**prepared.notes["source"], "name": Path(prepared.notes["source"]["name"]).name}
    return {
        "command": command,
        "seed": options.recipe.seed,
        "seeds": options.seeds,
        "recipe": config.encode(options.recipe),
        "look": config.encode(options.look),
        **prepared.notes,
        "source": source,
        "versions": versions(),
        "machine": machine(),
    }


def _result(run: AssessedRun, method: Method) -> dict[str, Any]:
    """Take the figures of a run, and leave out what is only there to be drawn."""
    found = run.assessment
    return {
        "name": run.method,
        "seed": run.seed,
        "method": config.encode(method),
        "scores": {**run.scores, "predict_ms_per_1000": found["costs"]["ours"]["predict_ms_per_1000"]},
        "shifts": found["shifts"],
        "ood": {name: {"examples": one["examples"], "by": one["by"]} for name, one in found["ood"].items()},
        "pruning": found["pruning"],
        "explanation": found["explanation"],
        "costs": {**run.record["costs"], **found["costs"]},
    }
