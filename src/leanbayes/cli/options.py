"""Parsing flags. A flag overrides the config file, which overrides the preset of the data set."""

import contextlib
import dataclasses
import inspect
import io
import math
import os
import shlex
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import tyro

from leanbayes.core import config
from leanbayes.core.names import shown
from leanbayes.core.network import has_batchnorm
from leanbayes.data import has_color_classes, preset
from leanbayes.errors import LeanBayesError, printable
from leanbayes.model.defaults import OF_BACKPROP, with_engine
from leanbayes.model.method import Method
from leanbayes.networks import build
from leanbayes.priors import Prior
from leanbayes.rules import get_rule
from leanbayes.training import Recipe

_LARGEST_CONFIG, _MOST_VALUES, _MOST_BITS = 1 << 20, 10_000, 1024  # of a config file, and of a number in it

T = TypeVar("T")
M = TypeVar("M", bound=Method)
Flat = tyro.conf.arg(name="")  # flags of a nested dataclass without a prefix
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class Task:
    """What to train, on which data, and where to store the run.

    Attributes:
        data: name of a data set (digits, mnist, fashion-mnist, cifar10, cifar100, svhn, toy, gap, uci:NAME), or the
            path of a csv table or of a folder of images.
        model: name of a network, such as mlp, lenet-5, resnet-18, vit-tiny, unet, timm:NAME or torchvision:NAME.
        model_options: settings of the network, as NAME=VALUE.
        start: folder of a finished run of the same network. Training starts from the mean and std of its weights.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        resize: height and width to which the images of a folder are resized.
        validation_share: fraction of the training data that is held out. All choices are made on it, never on the test
            data.
        out: folder of the run. None means runs/DATA-MODEL-METHOD-SEED.
        overwrite: replace an existing run in this folder. Otherwise that run is continued.
        quiet: show no progress.
        config: yaml file with any of these settings. Flags override it.
    """

    data: str = "digits"
    model: str = "small-cnn"
    model_options: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
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
    """Give a prior the flags of its default."""
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
    """Return the help of a setting from the docstring of its class."""
    lines = (line.strip() for line in (type(value).__doc__ or "").splitlines())
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), None)


def _description(kind: type) -> str:
    """Return the docstring of a command without its attributes, wrapped to the width of the terminal."""
    paragraphs = (inspect.getdoc(kind) or "").partition("\nAttributes:")[0].strip().split("\n\n")
    wrap = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        initial_indent="  ",  # tyro joins lines that start with a letter
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return "\n".join(wrap.fill(paragraph) for paragraph in paragraphs)


def parse(
    kind: type[T], words: list[str], prog: str, default: T | None = None, file_settings: Mapping[str, Any] | None = None
) -> T:
    """Parse flags into a dataclass, together with the settings of a config file that no flag overrides."""
    flags = _as_flags(file_settings or {}, {_bare(word) for word in words if word.startswith("--")})
    if flag_of([*words, *flags], "out") == "":
        raise LeanBayesError("--out is empty: give a path, such as . for the current folder, or leave it out.")
    try:
        with _escaped_errors([*words, *flags]):
            read: Any = tyro.cli(
                kind,
                args=[*words, *flags],
                prog=f"leanbayes {prog}",
                description=_description(kind),
                default=default,
                registry=REGISTRY,
            )
    except SystemExit as leaving:
        if leaving.code and flags:
            text = f"The settings of {flag_of(words, 'config')} were read as flags: {shlex.join(flags)}"
            print(printable(text), file=sys.stderr)
        raise
    _check_rule(getattr(read, "rule", None))
    return read


def _check_rule(rule: str | None) -> None:
    """Raise an error for a flag --rule that is not the name of a rule, optionally with settings."""
    try:
        get_rule(rule or "sample")
    except LeanBayesError as error:
        raise LeanBayesError(f"--rule {shown(rule)}: {error}") from None


@contextlib.contextmanager
def _escaped_errors(words: list[str]) -> Iterator[None]:
    """Escape the control characters of arguments in the messages of the parser, which quotes them."""
    if all(map(str.isprintable, words)):
        yield
        return
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    finally:
        for line in text.getvalue().splitlines():
            print(printable(line), file=sys.stderr)


def with_preset(words: list[str], settings: Mapping[str, Any], method: Method | None = None) -> tuple[Task, Recipe]:
    """Return the preset of the data set that the flags or the config file name, for a method."""
    data, root = _data_of(words, settings)
    settings_of_data = preset(data, root, method)
    own = {field.name for field in dataclasses.fields(Task)}
    task = {name: value for name, value in settings_of_data.items() if name in own}
    recipe = {name: value for name, value in settings_of_data.items() if name not in own}
    return config.change(Task(data=data), task), Recipe().changed(recipe)


def engine_chosen(method: M, words: list[str], settings: Mapping[str, Any], given: str | None = None) -> M:
    """Return the method with the given engine or, if its engine is "auto", with that of `lb.fit` for the data set."""
    if given is not None:
        method = config.change(method, {"engine": given})
    own_optimizer = any(flag_of(words, name.replace("_", "-")) or name in settings for name in OF_BACKPROP)
    of_images = method.engine == "auto" and has_color_classes(*_data_of(words, settings))
    return with_engine(method, of_images and not own_optimizer and _has_batchnorm(words, settings))


def _has_batchnorm(words: list[str], settings: Mapping[str, Any]) -> bool:
    """Return whether the network that the flags or the config file name has BatchNorm, without memory for it."""
    name = flag_of(words, "model") or settings.get("model") or preset(*_data_of(words, settings))["model"]
    with torch.device("meta"), contextlib.suppress(LeanBayesError):  # the same error comes when the network is needed
        return has_batchnorm(build(str(name), (3, 224, 224), 10, seed=0))
    return False


def _data_of(words: list[str], settings: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the data set that the flags or the config file name, and the folder of all data sets."""
    root = flag_of(words, "root") or settings.get("root")
    data = flag_of(words, "data") or settings.get("data") or Task.data
    return str(data), None if root is None else str(root)


def flag_of(words: list[str], name: str) -> str | None:
    """Return the value of a flag; if it is repeated, the last one."""
    found = None
    for place, word in enumerate(words):
        if word == f"--{name}" and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found


def config_of(words: list[str]) -> dict[str, Any]:
    """Read the config file, if the flags name one."""
    name = flag_of(words, "config")
    return read_config(Path(name)) if name else {}


def read_config(path: Path) -> dict[str, Any]:
    """Read a yaml file of settings."""
    import yaml

    try:
        with path.open() as file:
            text = file.read(_LARGEST_CONFIG + 1)  # a pipe or a device could be endless
        if len(text) > _LARGEST_CONFIG:
            raise LeanBayesError(f"{path} has more than {_LARGEST_CONFIG:,} characters: give a yaml file of settings.")
        if _expanded_size(yaml.compose(text, yaml.SafeLoader), {}) > _MOST_VALUES:
            raise LeanBayesError(f"{path} has more than {_MOST_VALUES:,} values, with those of aliases: shorten it.")
        values = yaml.safe_load(text) or {}
    except OSError as error:
        raise LeanBayesError(f"Cannot read {path}: {error.strerror}; check the path.") from None
    except UnicodeDecodeError:
        raise LeanBayesError(f"{path} is not a text file: give a yaml file.") from None
    except RecursionError:
        raise LeanBayesError(f"{path} is nested too deeply: give settings as `name: value`.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "it cannot be read"
        raise LeanBayesError(f"{path} is not valid yaml{where}: {what}.") from None
    except LeanBayesError:
        raise
    except (ValueError, KeyError, OverflowError) as error:  # yaml's readers of numbers and dates raise them
        raise LeanBayesError(f"{path} has a value that cannot be read ({shown(error.args[0])}): correct it.") from None
    if not isinstance(values, dict):
        raise LeanBayesError(f"{path} must hold settings as `name: value`, not a {type(values).__name__}.")
    return values


def _expanded_size(node: Any, known: dict[int, float]) -> float:
    """Return the number of values in a yaml node if aliases are replaced by what they stand for."""
    if id(node) not in known:
        known[id(node)] = math.inf  # if the node contains itself
        inner = node.value if node is not None and isinstance(node.value, list) else []
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in parts)
    return known[id(node)]


def _as_flags(settings: Mapping[str, Any], given: set[str], prefix: str = "") -> list[str]:
    """Write settings as flags, so that a file is parsed and checked in the same way as the command line."""
    flags = []
    for key, value in settings.items():
        name = f"{prefix}{key}".replace("_", "-")
        if isinstance(value, Mapping) and name != "model-options":
            flags += _as_flags(value, given, f"{name}.")
        elif name not in given:
            flags += _as_flag(name, value)
    return flags


def _as_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise LeanBayesError(f"`{name}` in the config file has more than {_MOST_BITS} bits: use a smaller number.")
    if isinstance(value, bool):
        outer, dot, last = name.rpartition(".")
        return [f"--{outer}{dot}{'' if value else 'no-'}{last}"]
    if name == "model-options" and isinstance(value, Mapping):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, str):
        return [f"--{name}={value}"]  # one word: after a switch, a separate value would be taken for a method
    if not isinstance(value, (list, tuple)):
        return [f"--{name}", str(value)]
    if name not in ("model-options", "resize", "ood", "evaluation.shifts"):
        raise LeanBayesError(f"`{name}` in the config file must be one value, not the list {value}.")
    return [f"--{name}", *(str(item) for item in value)]


def _bare(flag: str) -> str:
    """Return the name of a flag, without the no- that switches it off."""
    outer, dot, last = flag.removeprefix("--").partition("=")[0].replace("_", "-").rpartition(".")
    return f"{outer}{dot}{last.removeprefix('no-')}"


def is_first_process() -> bool:
    """Whether this process prints results, under torchrun or accelerate launch."""
    return os.environ.get("RANK", "0") == "0"
