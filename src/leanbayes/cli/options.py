"""Reading flags, and the settings that they change: those of the data set's preset, then those of a config file."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from leanbayes import config
from leanbayes.cli.presets import preset
from leanbayes.errors import LeanBayesError
from leanbayes.method import Method
from leanbayes.priors import Prior
from leanbayes.training import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """What to train, on what, and where to put it.

    Attributes:
        data: name of a data set (digits, mnist, fashion-mnist, cifar10, cifar100, svhn, toy, uci:NAME), or the path of
            a csv table or of a folder of pictures.
        model: name of a network, such as mlp, lenet-5, resnet-18, vit-tiny, unet, timm:NAME or torchvision:NAME. By
            default one that suits the data.
        model_options: the network's own settings, as NAME=VALUE.
        root: the folder that holds the data sets. By default the environment variable LEANBAYES_DATA.
        resize: height and width that pictures of a folder are brought to.
        validation_share: share of the training data that is held out. Choices are made on it, never on the test data.
        out: folder of the run. By default runs/DATA-MODEL-METHOD-SEED.
        overwrite: start anew where that folder holds a run. Otherwise it is resumed.
        quiet: show no progress.
        config: a yaml file with any of these settings. Flags go before it.
    """

    data: str = "digits"
    model: str | None = None
    model_options: tuple[str, ...] = ()
    root: Path | None = None
    resize: tuple[int, int] | None = None
    validation_share: float = 0.1
    out: Path | None = None
    overwrite: bool = False
    quiet: bool = False
    config: Path | None = None


REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.struct_rule
def _prior(info: Any) -> Any:
    """Let the flags of a prior be those of the default one."""
    if info.type is not Prior:
        return None
    default = info.default
    hints = typing.get_type_hints(type(default))
    fields = [
        tyro.constructors.StructFieldSpec(f.name, hints[f.name], getattr(default, f.name), tyro_help(default, f.name))
        for f in dataclasses.fields(default)
    ]
    return tyro.constructors.StructConstructorSpec(instantiate=type(default), fields=tuple(fields))


def tyro_help(value: Any, name: str) -> str | None:
    """Find the line on a setting in the docstring of its class."""
    lines = (line.strip() for line in (type(value).__doc__ or "").splitlines())
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), None)


def parse(kind: type[T], words: list[str], prog: str, default: T | None = None) -> T:
    """Read flags into a dataclass."""
    read: Any = tyro.cli(kind, args=words, prog=prog, default=default, registry=REGISTRY)
    return read


Flat = tyro.conf.arg(name="")  # the flags of a part, without its name before them


def settings_before_flags(words: list[str]) -> dict[str, Any]:
    """Collect what holds where no flag says otherwise: the preset of the data set, changed by the config file."""
    path = _flag(words, "config")
    file = read_config(Path(path)) if path else {}
    data = _flag(words, "data") or file.get("data") or Task.data
    return {**preset(str(data), _flag(words, "root") or file.get("root")), **file}


def _flag(words: list[str], name: str) -> str | None:
    """Return the value of a flag, of which the last counts."""
    found = None
    for place, word in enumerate(words):
        if word == f"--{name}" and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Read a yaml file of settings."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise LeanBayesError(f"Cannot read {path}: {error.strerror}; check the path.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LeanBayesError(f"{path} is not valid yaml: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise LeanBayesError(f"{path} must hold settings as `name: value`, not a {type(values).__name__}.")
    return values


def task_and_recipe(settings: Mapping[str, Any]) -> tuple[Task, Recipe]:
    """Sort settings into those of the task and those of the training."""
    own = {field.name for field in dataclasses.fields(Task)}
    task = {name: _as_field(name, value) for name, value in settings.items() if name in own}
    recipe = {name: _number(name, value) for name, value in settings.items() if name not in own}
    return config.change(Task(), task), Recipe().changed(recipe)


def _as_field(name: str, value: Any) -> Any:
    """Bring a value from yaml to the type of the setting."""
    if value is None:
        return None
    if name in ("root", "out", "config"):
        return Path(str(value))
    if name == "model_options":
        return tuple(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else tuple(value)
    return tuple(value) if name == "resize" else value


def _number(name: str, value: Any) -> Any:
    """Read 1e-3, which yaml takes for a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def with_numbers(settings: Any) -> Any:
    """Read 1e-3 as a number wherever it stands."""
    if isinstance(settings, dict):
        return {name: with_numbers(value) for name, value in settings.items()}
    return _number("", settings)


def options_class(method: Method, text: str) -> Any:
    """Make the dataclass of the flags of `fit METHOD`."""
    parts = [("task", Annotated[Task, Flat]), ("method", type(method)), ("recipe", Annotated[Recipe, Flat])]
    made = dataclasses.make_dataclass("Options", parts, frozen=True)
    made.__doc__ = text
    return made
