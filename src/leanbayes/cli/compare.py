"""`leanbayes compare METHODS`: several methods and seeds on one data set, in one table and a report."""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from leanbayes.cli.console import line
from leanbayes.cli.evaluations import ood_names, ood_sets
from leanbayes.cli.jobs import Job, do_all, do_share, do_together
from leanbayes.cli.options import Flat, Task, config_of, engine_chosen, is_first_process, parse, with_preset
from leanbayes.cli.report import check_writable, command_of, write_report
from leanbayes.cli.runs import Prepared, default_folder, prepare
from leanbayes.cli.text_tables import SHOWN, comparison, show, summary_of
from leanbayes.core import config
from leanbayes.core.json_values import json_text
from leanbayes.core.names import suggestion
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import METRICS, EvaluationSettings
from leanbayes.evaluation.outcomes import ClassOutcome, RegressionOutcome
from leanbayes.methods import METHODS, parse_method
from leanbayes.model.method import Method
from leanbayes.report import EvaluatedRun
from leanbayes.report.columns import known_keys, table
from leanbayes.report.summary import summary_sentences
from leanbayes.training import Recipe
from leanbayes.training.record import machine, versions, write_json

RECORD, REPORT = "compare.json", "report.html"
FIRST = ("deterministic", "mean-field", "vdp")  # what a new user should see first
Methods = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[METHODS]")]


@dataclass(frozen=True)
class CompareOptions:
    """Train and evaluate several methods on one data set, and compare their quality and cost in one table.

    Finished runs are not repeated: the same command continues where it was stopped. Under torchrun or accelerate
    launch, on one machine or several, the trainings are distributed over the processes.

    Attributes:
        methods: names, optionally with settings, such as mean-field:rule=flipout,prior.scale=0.05. By default
            deterministic, mean-field and vdp.
        all: compare all methods, unless some are given, in a table of all columns.
        seeds: number of trainings per method. Their seeds count up from --seed.
        jobs: number of trainings at the same time, each in its own process.
        sort: column of compare.json that the table is sorted by, the best first, such as nll, accuracy or ood:letters.
        ood: out-of-distribution sets of small images, such as letters or svhn; rotated and noisy are made from the
            test images. None means the usual ones for the data.
        evaluation: how to evaluate each model.
        together: under a launcher, train each run with all processes, instead of distributing the runs.
        report: write report.html into the folder of the comparison.
        json: print JSON instead of a table; compare.json in the folder of the comparison has the same content.
    """

    methods: Methods = ()
    all: bool = False
    task: Annotated[Task, Flat] = field(default_factory=Task)
    recipe: Annotated[Recipe, Flat] = field(default_factory=Recipe)
    seeds: int = 1
    jobs: int = 1
    sort: str = "nll"
    ood: tuple[str, ...] | None = None
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    together: bool = False
    report: bool = True
    json: bool = False

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs"):
            if getattr(self, name) < 1:
                raise LeanBayesError(f"--{name} {getattr(self, name)} must be 1 or more.")
        if self.together and self.jobs > 1:
            raise LeanBayesError("--together uses all processes for one training at a time: leave out --jobs.")


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    settings = config_of(words)
    names = settings.pop("methods", list(METHODS if "--all" in words or settings.get("all") else FIRST))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise LeanBayesError("`methods` in the config file must be a list such as [mean-field, ensemble].")

    @functools.cache
    def parsed(*preset: Any) -> CompareOptions:
        return parse(CompareOptions, words, "compare", CompareOptions(tuple(names), False, *preset), settings)

    options = parsed(*with_preset(words, settings))
    methods = {name.rstrip(":"): _method(name, words, settings) for name in options.methods}
    recipes = {name: parsed(*with_preset(words, settings, method)).recipe for name, method in methods.items()}
    if len({repr(method) for method in methods.values()}) < len(options.methods):
        raise LeanBayesError("A method is given twice: give each one once, or with different settings.")
    return lambda: _compare(options, recipes, methods, command_of("compare", words))


def _method(text: str, words: list[str], settings: Mapping[str, Any]) -> Method:
    """Parse a method. Unless the text names an engine, it has that of the data set."""
    method = parse_method(text)
    return engine_chosen(method, words, settings, method.engine if "engine=" in text else None)


def _compare(options: CompareOptions, recipes: Mapping[str, Recipe], methods: dict[str, Method], command: str) -> None:
    task, recipe = options.task, options.recipe
    folder = task.out or default_folder(task, "compare", recipe.seed)
    prepared = prepare(task, recipe.seed)
    _check(options, prepared.data, folder)
    runs = _runs(options, _jobs(options, recipes, methods, folder), prepared.data)
    if not is_first_process():
        return
    shown = table(runs)
    record = _record(command, options, prepared)
    record["results"] = [_result(run, methods[run.method], recipes[run.method], options.recipe) for run in runs]
    record["summary"] = summary_of(shown)
    write_json(folder / RECORD, record)
    if options.json:
        if options.report:
            write_report(runs, folder / REPORT, command=command, shown=False)
        print(json_text(record))
        return
    seeds = f", {options.seeds} seeds" if options.seeds > 1 else ""
    title = f"{prepared.data.name}, {task.model}: {runs[0].scores['examples']} test examples{seeds}"
    show(title, comparison(shown, options.sort, options.all))
    for sentence in summary_sentences(shown):
        line(sentence)
    if options.sort not in {column.key for column in shown.columns}:
        line(f"No run has {options.sort}: the methods are in the order in which they were given.")
    for note in filter(None, (shown.note, *dict.fromkeys(note for run in runs for note in run.evaluation["notes"]))):
        line(note)
    if not options.all:
        line("The table has the most important columns: --all prints all of them, and the report has them too.")
    if options.report:
        write_report(runs, folder / REPORT, command=command)
    line(f"Runs and results are in {folder}.")


def _check(options: CompareOptions, data: Data, folder: Path) -> None:
    """Raise errors before the work, not after it."""
    if data.test is None:
        raise LeanBayesError(f"{data.name} has no test data to compare on: add some.")
    if options.ood is not None:
        ood_sets(options.ood, data, options.task.root, options.evaluation)
    _check_sort(options, data)
    for path in (folder / RECORD, *([folder / REPORT] if options.report else [])):
        with contextlib.suppress(OSError):  # opening the file reports what is wrong with the folder
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)


def _check_sort(options: CompareOptions, data: Data) -> None:
    kind = RegressionOutcome if data.task == "regression" else ClassOutcome
    other_tasks = {metric.name for of in METRICS.values() for metric in of} - {metric.name for metric in METRICS[kind]}
    if data.task != "segmentation":
        other_tasks.add("miou")
    keys = [key for key in known_keys() if key.rpartition(":")[2] not in other_tasks]
    keys += [f"ood:{name}" for name in ood_names(options.ood, data)]
    if options.sort not in keys:
        usual = ", ".join(key for key in keys if key in SHOWN and ":" not in key)
        hint = suggestion(options.sort, keys, f"use {usual}, or another name in compare.json.")
        raise LeanBayesError(f"There is no column {options.sort!r} to --sort by: {hint}")


def _jobs(
    options: CompareOptions, recipes: Mapping[str, Recipe], methods: dict[str, Method], folder: Path
) -> list[Job]:
    seeds = range(options.recipe.seed, options.recipe.seed + options.seeds)
    rest = (options.task, folder, options.evaluation, options.ood)
    return [
        Job(name, method, replace(recipes[name], seed=seed), *rest)
        for seed in seeds
        for name, method in methods.items()
    ]


def _runs(options: CompareOptions, jobs: Sequence[Job], data: Data) -> list[EvaluatedRun]:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return do_all(jobs, data, options.jobs)
    return do_together(jobs, data) if options.together else do_share(jobs, options.jobs)


def _record(command: str, options: CompareOptions, prepared: Prepared) -> dict[str, Any]:
    """Start the record of a comparison with all that is needed to reproduce it, without folders of this machine."""
    source = {**prepared.notes["source"], "name": Path(prepared.notes["source"]["name"]).name}
    return {
        "command": command,
        "seed": options.recipe.seed,
        "seeds": options.seeds,
        "recipe": config.encode(options.recipe),
        "evaluation": config.encode(options.evaluation),
        **prepared.notes,
        "source": source,
        "versions": versions(),
        "machine": machine(),
    }


def _result(run: EvaluatedRun, method: Method, recipe: Recipe, usual: Recipe) -> dict[str, Any]:
    """Return the results of a run, without what is only for plots."""
    found = run.evaluation
    return {
        **({"recipe": config.encode(recipe)} if recipe != usual else {}),
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
