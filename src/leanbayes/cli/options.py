"""Reading flags: the settings of a data set's preset are their defaults, and a config file stands before them."""

import dataclasses
import os
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from leanbayes import config
from leanbayes.cli.presets import preset
from leanbayes.errors import LeanBayesError
from leanbayes.priors import Prior
from leanbayes.training import Recipe

T = TypeVar("T")
Flat = tyro.conf.arg(name="")  # the flags of a part, without its name before them
RuleName = Literal["sample", "flipout", "local", "moments", "covariance", "mean"]
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class Task:
    """What to train, on what, and where to put it.

    Attributes:
        data: name of a data set (digits, mnist, fashion-mnist, cifar10, cifar100, svhn, toy, uci:NAME), or the path of
            a csv table or of a folder of pictures.
        model: name of a network, such as mlp, lenet-5, resnet-18, vit-tiny, unet, timm:NAME or torchvision:NAME.
        model_options: settings of the network itself, as NAME=VALUE.
        start: folder of a finished run of that network: the training goes out from its weights and their spreads.
        root: folder that holds the data sets. None means what the environment variable LEANBAYES_DATA says.
        resize: height and width that the pictures of a folder are brought to.
        validation_share: share of the training data that is held out. Choices are made on it, never on the test data.
        out: folder of the run. None means runs/DATA-MODEL-METHOD-SEED.
        overwrite: start anew where that folder holds a run. Otherwise such a run goes on.
        quiet: show no progress.
        config: yaml file with any of these settings. A flag wins over it.
    """

    data: str = "digits"
    model: str = "small-cnn"
    model_options: tuple[str, ...] = ()
    start: Path | None = None
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
        tyro.constructors.StructFieldSpec(f.name, hints[f.name], getattr(default, f.name), _help(default, f.name))
        for f in dataclasses.fields(default)
    ]
    return tyro.constructors.StructConstructorSpec(instantiate=type(default), fields=tuple(fields))


def _help(value: Any, name: str) -> str | None:
    """Find the line on a setting in the docstring of its class."""
    lines = (line.strip() for line in (type(value).__doc__ or "").splitlines())
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), None)


def parse(
    kind: type[T], words: list[str], prog: str, default: T | None = None, file_settings: Mapping[str, Any] | None = None
) -> T:
    """Read flags into a dataclass, and with them the settings of a config file that no flag is given for."""
    flags = _as_flags(file_settings or {}, {_bare(word) for word in words if word.startswith("--")})
    try:
        read: Any = tyro.cli(kind, args=[*words, *flags], prog=f"leanbayes {prog}", default=default, registry=REGISTRY)
    except SystemExit as leaving:
        if leaving.code and flags:
            print(f"The settings of {_flag(words, 'config')} are read as flags: {' '.join(flags)}", file=sys.stderr)
        raise
    return read


def with_preset(words: list[str], settings: Mapping[str, Any]) -> tuple[Task, Recipe]:
    """Return the settings that suit the data, which flags or else a config file name."""
    data = str(_flag(words, "data") or settings.get("data") or Task.data)
    root = _flag(words, "root") or settings.get("root")
    suited = preset(data, None if root is None else str(root))
    own = {field.name for field in dataclasses.fields(Task)}
    task = {name: value for name, value in suited.items() if name in own}
    recipe = {name: value for name, value in suited.items() if name not in own}
    return config.change(Task(data=data), task), Recipe().changed(recipe)


def _flag(words: list[str], name: str) -> str | None:
    """Return the value of a flag, of which the last counts."""
    found = None
    for place, word in enumerate(words):
        if word == f"--{name}" and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found


def config_of(words: list[str]) -> dict[str, Any]:
    """Read the config file that the flags name, if they do."""
    name = _flag(words, "config")
    return read_config(Path(name)) if name else {}


def read_config(path: Path) -> dict[str, Any]:
    """Read a yaml file of settings."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise LeanBayesError(f"Cannot read {path}: {error.strerror}; check the path.") from None
    except UnicodeDecodeError:
        raise LeanBayesError(f"{path} is not a text file: give a yaml file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "it cannot be read"
        raise LeanBayesError(f"{path} is not valid yaml{where}: {what}.") from None
    if not isinstance(values, dict):
        raise LeanBayesError(f"{path} must hold settings as `name: value`, not a {type(values).__name__}.")
    return values


def _as_flags(settings: Mapping[str, Any], given: set[str], prefix: str = "") -> list[str]:
    """Write settings as flags, so that those of a file are read and checked as those of the command line are."""
    flags = []
    for key, value in settings.items():
        name = f"{prefix}{key}".replace("_", "-")
        if isinstance(value, Mapping) and name != "model-options":
            flags += _as_flags(value, given, f"{name}.")
        elif name not in given:
            flags += _as_flag(name, value)
    return flags


def _as_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        outer, dot, last = name.rpartition(".")
        return [f"--{outer}{dot}{'' if value else 'no-'}{last}"]
    if name == "model-options" and isinstance(value, Mapping):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, str):
        return [f"--{name}={value}"]  # in one word, so that a switch does not leave it over as one of the methods
    if not isinstance(value, (list, tuple)):
        return [f"--{name}", str(value)]
    if name not in ("model-options", "resize", "ood", "look.shifts"):
        raise LeanBayesError(f"`{name}` in the config file must be one value, not the list {value}.")
    return [f"--{name}", *(str(item) for item in value)]


def _bare(flag: str) -> str:
    """Return the name of a flag, whether it switches something on or off."""
    outer, dot, last = flag.removeprefix("--").partition("=")[0].replace("_", "-").rpartition(".")
    return f"{outer}{dot}{last.removeprefix('no-')}"


def is_first_process() -> bool:
    """Whether this process is the one that speaks, under torchrun or accelerate launch."""
    return os.environ.get("RANK", "0") == "0"
