"""`leanbayes compare`: several methods on one data set, in one table of quality and cost."""

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from leanbayes import config
from leanbayes.cli.evaluate import score
from leanbayes.cli.options import Flat, Task, parse, settings_before_flags, task_and_recipe
from leanbayes.cli.runs import default_folder, prepare, train
from leanbayes.cli.tables import comparison, flat, wide_console
from leanbayes.errors import LeanBayesError
from leanbayes.methods import METHODS, parse_method
from leanbayes.training import Recipe, read_record
from leanbayes.training.record import machine, versions, write_json


@dataclass(frozen=True)
class CompareOptions:
    """Train several methods on one data set, score each on the test data, and show quality and cost side by side.

    Attributes:
        methods: names, with settings if wished: mean-field:rule=flipout,prior.scale=0.05. By default all there are.
        json: also write all figures to this file.
    """

    methods: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    task: Annotated[Task, Flat] = field(default_factory=Task)
    recipe: Annotated[Recipe, Flat] = field(default_factory=Recipe)
    json: Path | None = None


def compare(words: list[str]) -> None:
    """Run the command."""
    settings = settings_before_flags(words)
    names = settings.pop("methods", list(METHODS))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LeanBayesError("`methods` in the config file must be a list such as [mean-field, ensemble].")
    default = CompareOptions(tuple(names), *task_and_recipe(settings))
    options = parse(CompareOptions, words, "leanbayes compare", default)
    task, recipe = options.task, options.recipe
    methods = {name: parse_method(name) for name in options.methods}
    folder = task.out or default_folder(task, "compare", recipe.seed)
    prepared = prepare(task, recipe.seed)
    rows: dict[str, dict[str, float]] = {}
    results: list[dict[str, Any]] = []
    for number, (name, method) in enumerate(methods.items(), start=1):
        if not task.quiet:
            Console(stderr=True).print(f"{number} of {len(methods)}: {name}", highlight=False)
        place = folder / "".join(c if c.isalnum() or c in "-_.=" else "-" for c in name)
        bnn = train(prepared, method, recipe, task, place)
        scores, costs = score(bnn, prepared.data, "test"), read_record(place)["costs"]
        rows[name] = flat(scores, costs)
        results.append({"name": name, "method": config.encode(method), "scores": scores, "costs": costs})
    _write([folder / "compare.json", *([options.json] if options.json else [])], words, recipe, prepared.notes, results)
    examples = results[0]["scores"]["examples"]
    view, winners = comparison(f"{prepared.data.name}, {task.model}: {examples} test examples", rows)
    console = wide_console()
    console.print(view)
    console.print(winners, highlight=False)
    console.print(f"{_footnote(rows, examples)} Runs and figures are in {folder}.", highlight=False, soft_wrap=True)


def _write(
    paths: list[Path], words: list[str], recipe: Recipe, notes: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    """Write the figures, with all that is needed to get them again."""
    figures = {
        "command": shlex.join(["leanbayes", "compare", *without_places(words)]),
        "seed": recipe.seed,
        "recipe": config.encode(recipe),
        **notes,
        "results": results,
        "versions": versions(),
        "machine": machine(),
    }
    for path in paths:
        write_json(path, figures)


def without_places(words: list[str]) -> list[str]:
    """Leave out the flags that name folders and files of one's own machine."""
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        own = name in ("--root", "--out", "--json")
        if not skip and not own:
            kept.append(word)
        skip = own and not equals
    return kept


def _footnote(rows: dict[str, dict[str, float]], examples: int) -> str:
    """Say how far one run on so many examples can tell methods apart."""
    text = "The winners are those of this one run"
    accuracies = [row["accuracy"] for row in rows.values() if "accuracy" in row]
    if accuracies:
        mean = sum(accuracies) / len(accuracies)
        error = math.sqrt(mean * (1 - mean) / examples)
        text += f"; on {examples} examples an accuracy has a standard error of {error:.2%}"
    return text + "."
