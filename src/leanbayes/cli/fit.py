"""`leanbayes fit METHOD`: train a network."""

from typing import Any

from leanbayes.cli.options import options_class, parse, settings_before_flags, task_and_recipe, with_numbers
from leanbayes.cli.runs import default_folder, method_name, prepare, summary, train
from leanbayes.errors import LeanBayesError
from leanbayes.method import Method
from leanbayes.methods import METHODS, get_method

_METHODS = "\n".join(f"  {name:<14} {summary(method)}" for name, method in METHODS.items())
_HELP = f"""usage: leanbayes fit METHOD [flags]      (or the method in a file: leanbayes fit --config FILE.yaml)

Train a network. METHOD is one of
{_METHODS}

leanbayes fit METHOD --help tells all flags, which depend on the method.
"""


def fit_method(words: list[str]) -> None:
    """Run the command."""
    named = bool(words) and not words[0].startswith("-")
    if not words or (not named and words[0] in ("-h", "--help")):
        print(_HELP, end="")
        raise SystemExit(0 if words else 2)
    name, flags = (words[0], words[1:]) if named else (None, words)
    settings = settings_before_flags(flags)
    method = _method(name, settings.pop("method", None))
    task, recipe = task_and_recipe(settings)
    kind = options_class(method, f"Train a network: {summary(method)}")
    options = parse(kind, flags, f"leanbayes fit {method_name(method)}", kind(task, method, recipe))
    task, method, recipe = options.task, options.method, options.recipe
    folder = task.out or default_folder(task, method_name(method), recipe.seed)
    train(prepare(task, recipe.seed), method, recipe, task, folder)
    print(f"The run is in {folder}. Score it on the test data: leanbayes evaluate {folder}")


def _method(name: str | None, setting: Any) -> Method:
    """Bring together the method of the command line and that of the config file."""
    if setting is None or isinstance(setting, str):
        named, changes = setting, {}
    elif isinstance(setting, dict) and isinstance(setting.get("name"), str):
        named, changes = setting["name"], {key: value for key, value in setting.items() if key != "name"}
    else:
        raise LeanBayesError("`method` in the config file must be a name, or a mapping with a `name` and settings.")
    if name is None and named is None:
        raise LeanBayesError(f"No method was given: use one of {', '.join(METHODS)}.")
    method = get_method(name or named or "", {})
    if named is not None and type(get_method(named)) is not type(method):
        raise LeanBayesError(f"The config file is for the method {named!r}, not {name!r}: leave one of them out.")
    return get_method(name or named or "", with_numbers(changes))
