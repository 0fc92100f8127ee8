"""`leanbayes fit METHOD`: train a network."""

import dataclasses
import shlex
from collections.abc import Callable
from typing import Annotated, Any

from leanbayes.cli.options import Flat, Task, config_of, is_first_process, parse, with_preset
from leanbayes.cli.runs import default_folder, method_name, prepare, summary, train
from leanbayes.errors import LeanBayesError
from leanbayes.method import Method
from leanbayes.methods import METHODS, get_method
from leanbayes.training import Recipe

_METHODS = "\n".join(f"  {name:<14} {summary(method)}" for name, method in METHODS.items())
_HELP = f"""usage: leanbayes fit METHOD [flags]      (or the method in a file: leanbayes fit --config FILE.yaml)

Train a network. METHOD is one of
{_METHODS}

leanbayes fit METHOD --help tells all flags, which depend on the method.
"""


def fit_method(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    named = bool(words) and not words[0].startswith("-")
    if not words or (not named and words[0] in ("-h", "--help")):
        print(_HELP, end="")
        raise SystemExit(0 if words else 2)
    name, flags = (words[0], words[1:]) if named else (None, words)
    settings = config_of(flags)
    method, changes = _method(name, settings.pop("method", None))
    kind = _options_class(method)
    prog = f"fit {method_name(method)}"
    default = kind(*with_preset(flags, settings), method)
    options = parse(kind, flags, prog, default, {**settings, "method": changes})
    return lambda: _train(options.task, options.method, options.recipe)


def _train(task: Task, method: Method, recipe: Recipe) -> None:
    folder = task.out or default_folder(task, method_name(method), recipe.seed)
    train(prepare(task, recipe.seed), method, recipe, task, folder)
    if is_first_process():
        print(f"The run is in {folder}. Score it on the test data: leanbayes evaluate {shlex.quote(str(folder))}")


def _options_class(method: Method) -> Any:
    """Make the dataclass of the flags, which depend on the method."""
    parts = [("task", Annotated[Task, Flat]), ("recipe", Annotated[Recipe, Flat]), ("method", type(method))]
    made = dataclasses.make_dataclass("Options", parts, frozen=True)
    made.__doc__ = summary(method)
    return made


def _method(name: str | None, setting: Any) -> tuple[Method, dict[str, Any]]:
    """Bring together the method of the command line and that of the config file with its settings."""
    if setting is None or isinstance(setting, str):
        named, changes = setting, {}
    elif isinstance(setting, dict) and isinstance(setting.get("name"), str):
        named, changes = setting["name"], {key: value for key, value in setting.items() if key != "name"}
    else:
        raise LeanBayesError("`method` in the config file must be a name, or a mapping with a `name` and settings.")
    if name is None and named is None:
        raise LeanBayesError(f"No method was given, which comes first: use one of {', '.join(METHODS)}.")
    method = get_method(name or named or "")
    if named is not None and get_method(named) != method:
        raise LeanBayesError(f"The config file is for the method {named!r}, not {name!r}: leave one of them out.")
    return method, changes
