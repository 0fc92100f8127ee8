"""`leanbayes compare`: methods × seeds on one data set, in one table of quality and cost, and a report."""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from leanbayes import config
from leanbayes.cli.jobs import Job, do_all, do_share
from leanbayes.cli.options import Flat, Task, config_of, is_first_process, parse, with_preset
from leanbayes.cli.report import write_report
from leanbayes.cli.runs import Prepared, default_folder, prepare
from leanbayes.cli.tables import comparison, show, summary_of
from leanbayes.errors import LeanBayesError, did_you_mean
from leanbayes.evaluation import Look
from leanbayes.method import Method
from leanbayes.methods import METHODS, parse_method
from leanbayes.report import AssessedRun
from leanbayes.report.columns import table
from leanbayes.training import Recipe
from leanbayes.training.progress import in_words, say
from leanbayes.training.record import machine, versions, without_places, write_json

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
        sort: column that the table is sorted by, the best first.
        ood: data sets of another kind that the model should not be sure of. None means those that suit the data.
        look: how to look at each model.
        together: under a launcher, let all processes work on each training, rather than share the trainings out.
        report: write report.html, too.
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


def compare(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    settings = config_of(words)
    names = settings.pop("methods", list(METHODS))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise LeanBayesError("`methods` in the config file must be a list such as [mean-field, ensemble].")
    default = CompareOptions(tuple(names), *with_preset(words, settings))
    options = parse(CompareOptions, words, "compare", default, settings)
    methods = {name.rstrip(":"): parse_method(name) for name in options.methods}
    if len(methods) < len(options.methods):
        raise LeanBayesError("A method is named twice: give each once, or with different settings.")
    command = shlex.join(["leanbayes", "compare", *without_places(words)])
    return lambda: _compare(options, methods, command)


def _compare(options: CompareOptions, methods: dict[str, Method], command: str) -> None:
    task, recipe = options.task, options.recipe
    folder = task.out or default_folder(task, "compare", recipe.seed)
    prepared = prepare(task, recipe.seed)
    if prepared.data.test is None:
        raise LeanBayesError(f"{prepared.data.name} has no test data to compare on: add some.")
    figures = _figures(command, options, prepared)
    for path in _files(options, folder):
        write_json(path, figures)  # a place that cannot be written to is found out before the work, not after it
    runs = _trained(options, _jobs(options, methods, folder), prepared)
    if not is_first_process():
        return
    shown = table(runs)
    keys = [column.key for column in shown.columns]
    if options.sort not in keys:
        hint = did_you_mean(options.sort, keys, f"there are {', '.join(keys)}.")
        raise LeanBayesError(f"The table has no column {options.sort!r}: {hint}")
    figures["results"] = [_result(run, methods[run.method]) for run in runs]
    figures["summary"] = summary_of(shown)
    for path in _files(options, folder):
        write_json(path, figures)
    show(
        f"{prepared.data.name}, {task.model}: {runs[0].scores['examples']} test examples",
        comparison(shown, options.sort),
    )
    for line in filter(None, (shown.note, *dict.fromkeys(note for run in runs for note in run.assessment["notes"]))):
        print(line)
    if options.report:
        write_report(runs, folder / "report.html", command=command)
        print(f"Report: {folder / 'report.html'}")
    print(f"Runs and figures are in {folder}.")


def _jobs(options: CompareOptions, methods: dict[str, Method], folder: Path) -> list[Job]:
    seeds = range(options.recipe.seed, options.recipe.seed + options.seeds)
    return [
        Job(name, method, replace(options.recipe, seed=seed), options.task, folder, options.look, options.ood)
        for seed in seeds
        for name, method in methods.items()
    ]


def _trained(options: CompareOptions, jobs: Sequence[Job], prepared: Prepared) -> list[AssessedRun]:
    count = 0

    def done(run: AssessedRun) -> None:
        nonlocal count
        count += 1
        if options.jobs > 1 or spread:
            text = f"{run.method}, seed {run.seed}: {in_words(run.scores)} ({count} of {len(jobs)})"
            say(not options.task.quiet, text)

    spread = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not options.together
    return do_share(jobs, options.jobs, done) if spread else do_all(jobs, prepared.data, options.jobs, done)


def _files(options: CompareOptions, folder: Path) -> list[Path]:
    return [folder / "compare.json", *([options.json] if options.json else [])]


def _figures(command: str, options: CompareOptions, prepared: Prepared) -> dict[str, Any]:
    """Begin the record of a comparison with all that is needed to get its figures again."""
    return {
        "command": command,
        "seed": options.recipe.seed,
        "seeds": options.seeds,
        "recipe": config.encode(options.recipe),
        "look": config.encode(options.look),
        **prepared.notes,
        "results": [],
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
        "costs": {**run.record["costs"], **found["costs"]},
    }
