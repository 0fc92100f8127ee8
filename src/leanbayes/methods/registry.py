"""Methods by name and as text, as the command line and config files write them."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from leanbayes.core import config
from leanbayes.core.names import lookup
from leanbayes.core.setting_text import Makers, parse_settings
from leanbayes.model.defaults import with_engine
from leanbayes.model.method import METHODS, Method
from leanbayes.priors import Normal, ScaleMixture

_MAKERS: Makers = {"Normal": partial(config.change, Normal()), "ScaleMixture": partial(config.change, ScaleMixture())}


def get_method(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Return the method of that name, with some settings changed.

    Args:
        name: The name on the command line, such as "mean-field". Case and separators do not matter.
        settings: The settings to change. A mapping changes the settings of a prior.

    Example:
        >>> get_method("mean-field", {"rule": "flipout", "prior": {"scale": 0.05}})
    """
    return config.change(METHODS[lookup("method", name, METHODS)], settings or {})


def parse_method(text: str) -> Method:
    """Parse a method and its settings from a text.

    Example:
        >>> parse_method("mean-field:rule=flipout,prior.scale=0.05")
        >>> parse_method("mean-field:prior=ScaleMixture(pi=0.3, wide=1.0)")
    """
    name, _, rest = text.partition(":")
    return get_method(name, parse_settings(rest, text, _MAKERS))


def describe_method(method: Method) -> str:
    """Return the text that `parse_method` parses: the name, and the settings that differ from the defaults.

    The engine is named if it is not backprop, which "auto" stands for here.
    """
    name = next((name for name, known in METHODS.items() if type(known) is type(method)), type(method).__name__)
    default = METHODS.get(name)
    differences = _differences(with_engine(default), with_engine(method)) if default else ()
    changed = ",".join(f"{path}={_quoted(value)}" for path, value in differences)
    return f"{name}:{changed}" if changed else name


def _quoted(value: Any) -> Any:
    """Return a value as its text has it, such as a rule with several settings."""
    return f"'{value}'" if isinstance(value, str) and "," in value else value


def _differences(default: Any, value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        old, new = getattr(default, field.name), getattr(value, field.name)
        if type(old) is type(new) and dataclasses.is_dataclass(new):
            yield from ((f"{field.name}.{path}", inner) for path, inner in _differences(old, new))
        elif old != new:
            yield field.name, new
