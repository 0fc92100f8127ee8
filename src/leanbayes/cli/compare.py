"""`leanbayes compare`: several methods on one data set, in one table of quality and cost."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from leanbayes import config
from leanbayes.cli.evaluate import score
from leanbayes.cli.options import Flat, Task, config_of, is_first_process, parse, with_preset
from leanbayes.cli.runs import Prepared, as_file_name, default_folder, prepare, train
from leanbayes.cli.tables import comparison, flat, show
from leanbayes.errors import LeanBayesError
from leanbayes.method import Method
from leanbayes.methods import METHODS, parse_method
from leanbayes.training import Recipe, read_record
from leanbayes.training.record import machine, versions, without_places, write_json

Methods = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="METHODS")]


@dataclass(frozen=True)
class CompareOptions:
    """Train several methods on one data set, score each on the test data, and show quality and cost side by side.

    Attributes:
        methods: names, with settings if wished: mean-field:rule=flipout,prior.scale=0.05. None means all there are.
        json: write all figures to this file, too.
    """

    methods: Methods = ()
    task: Annotated[Task, Flat] = field(default_factory=Task)
    recipe: Annotated[Recipe, Flat] = field(default_factory=Recipe)
    json: Path | None = None


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
    figures = _figures(command, recipe, prepared)
    for path in _files(options, folder):
        write_json(path, figures)  # a place that cannot be written to is found out before the work, not after it
    rows: dict[str, dict[str, float]] = {}
    for name, method in methods.items():
        place = folder / as_file_name(name)
        bnn = train(prepared, method, recipe, task, place)
        scores, costs = score(bnn, prepared.data, "test", workers=recipe.workers), read_record(place)["costs"]
        rows[name] = flat(scores, costs)
        figures["results"].append({"name": name, "method": config.encode(method), "scores": scores, "costs": costs})
    if not is_first_process():
        return
    for path in _files(options, folder):
        write_json(path, figures)
    examples = figures["results"][0]["scores"]["examples"]
    view, winners = comparison(rows)
    show(f"{prepared.data.name}, {task.model}: {examples} test examples", view)
    print(winners)
    print(f"{_footnote(rows, examples)} Runs and figures are in {folder}.")


def _files(options: CompareOptions, folder: Path) -> list[Path]:
    return [folder / "compare.json", *([options.json] if options.json else [])]


def _figures(command: str, recipe: Recipe, prepared: Prepared) -> dict[str, Any]:
    """Begin the record of a comparison with all that is needed to get its figures again."""
    return {
        "command": command,
        "seed": recipe.seed,
        "recipe": config.encode(recipe),
        **prepared.notes,
        "results": [],
        "versions": versions(),
        "machine": machine(),
    }


def _footnote(rows: dict[str, dict[str, float]], examples: int) -> str:
    """Say how far one run on so many examples can tell methods apart."""
    text = "The figures are those of one run"
    accuracies = [row["accuracy"] for row in rows.values() if "accuracy" in row]
    if accuracies:
        mean = sum(accuracies) / len(accuracies)
        error = math.sqrt(mean * (1 - mean) / examples)
        text += f"; on {examples} examples an accuracy has a standard error of {error:.2%}"
    return text + "."
