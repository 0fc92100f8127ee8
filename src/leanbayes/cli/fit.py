"""`leanbayes fit METHOD`: train a network."""

import dataclasses
import shlex
import textwrap
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from leanbayes.cli.console import line
from leanbayes.cli.decide import add_alarms
from leanbayes.cli.options import Flat, Task, config_of, engine_chosen, flag_of, is_first_process, parse, with_preset
from leanbayes.cli.runs import MODEL, TrainedRun, default_folder, method_name, prepare, summary, train
from leanbayes.core.json_values import json_text
from leanbayes.deploy.loading import load
from leanbayes.errors import LeanBayesError
from leanbayes.methods import BASELINES, METHODS, get_method
from leanbayes.model.method import Method
from leanbayes.training import Recipe, read_record


def _help() -> str:
    width = max(map(len, METHODS))
    lines = {
        name: textwrap.fill(
            summary(method),
            80,
            initial_indent=f"  {name:<{width}} ",
            subsequent_indent=" " * (width + 3),
            break_on_hyphens=False,
        )
        for name, method in METHODS.items()
    }
    methods = "\n".join(line for name, line in lines.items() if name not in BASELINES)
    baselines = "\n".join(lines[name] for name in BASELINES)
    return f"""usage: leanbayes fit METHOD [options]
       leanbayes fit --config FILE.yaml     (with the method in the file)

Train a network. METHOD is one of
{methods}
or a baseline:
{baselines}

The options depend on the method: leanbayes fit METHOD --help lists them.
"""


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    named = bool(words) and not words[0].startswith("-")
    if not words or (not named and words[0] in ("-h", "--help")):
        print(_help(), end="")
        raise SystemExit(0 if words else 2)
    name, flags = (words[0], words[1:]) if named else (None, words)
    settings = config_of(flags)
    method, changes = _method(name, settings.pop("method", None))
    method = engine_chosen(method, flags, settings, flag_of(flags, "method.engine") or changes.get("engine"))
    kind = _options_class(method)
    default = kind(*with_preset(flags, settings, method), method)
    options = parse(kind, flags, f"fit {method_name(method)}", default, {**settings, "method": changes})
    return lambda: _train(options.task, options.method, options.recipe, options.json)


def _train(task: Task, method: Method, recipe: Recipe, as_json: bool) -> None:
    folder = task.out or default_folder(task, method_name(method), recipe.seed)
    prepared = prepare(task, recipe.seed)
    bnn = train(prepared, method, recipe, task, folder)
    if not is_first_process():
        return
    if recipe.shard:  # the first process goes on alone, with the whole model
        bnn = load(folder / MODEL, prepared.network)
    add_alarms(TrainedRun(folder, bnn, read_record(folder)), prepared.data)
    if as_json:
        record = read_record(folder)
        print(json_text({"run": str(folder), "scores": record["scores"], "costs": record["costs"]}))
        return
    line(f"The run is in {folder}. To score it on the test data: leanbayes evaluate {shlex.quote(str(folder))}")


def _options_class(method: Method) -> Any:
    """Make the dataclass of the options, which depend on the method."""
    parts: list[Any] = [("task", Annotated[Task, Flat]), ("recipe", Annotated[Recipe, Flat]), ("method", type(method))]
    printed = tyro.conf.arg(help="print JSON instead of a sentence at the end.")
    parts.append(("json", Annotated[bool, printed], dataclasses.field(default=False)))
    made = dataclasses.make_dataclass("Options", parts, frozen=True)
    made.__doc__ = summary(method)
    return made


def _method(name: str | None, setting: Any) -> tuple[Method, dict[str, Any]]:
    """Return the method that the command line or the config file names, and its settings in the config file."""
    if setting is None or isinstance(setting, str):
        named, changes = setting, {}
    elif isinstance(setting, dict) and isinstance(setting.get("name"), str):
        named, changes = setting["name"], {key: value for key, value in setting.items() if key != "name"}
    else:
        raise LeanBayesError("`method` in the config file must be a name, or a mapping with a `name` and settings.")
    if name is None and named is None:
        raise LeanBayesError(f"The method is missing: give it as the first argument, one of {', '.join(METHODS)}.")
    method = get_method(name or named or "")
    if named is not None and get_method(named) != method:
        raise LeanBayesError(f"The config file is for the method {named!r}, not {name!r}: leave one of them out.")
    return method, changes
