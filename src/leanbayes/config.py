"""Settings that travel through JSON: only registered types are ever built from a file."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np

from leanbayes.errors import FileFormatError, LeanBayesError, did_you_mean

T = TypeVar("T")
_TYPES: dict[str, type] = {}


def configurable(cls: type[T]) -> type[T]:
    """Allow `cls` (a dataclass, or a class with a `settings` dict) in saved files, under its own name."""
    _TYPES[cls.__name__] = cls
    return cls


def change(value: T, settings: Mapping[str, Any]) -> T:
    """Return a dataclass with some of its settings changed; a mapping changes the settings of what a setting holds."""
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    hints = typing.get_type_hints(type(value))
    known = [field.name for field in dataclasses.fields(value)]
    changes = {}
    for name, new in settings.items():
        if name not in known:
            hint = did_you_mean(name, known, f"it has {', '.join(known) or 'none'}.")
            raise LeanBayesError(f"{type(value).__name__} has no setting {name!r}: {hint}")
        old = getattr(value, name)
        new = new.item() if isinstance(new, np.generic) else new
        if new is None and "none" in typing.get_args(hints[name]):  # a word of its own, that readers take for None
            new = "none"
        if isinstance(new, Mapping) and dataclasses.is_dataclass(old):
            changes[name] = change(old, new)
        elif not _fits(new, hints[name]):
            raise LeanBayesError(f"{name}={new!r} must be {_describe(hints[name])}.")
        else:
            changes[name] = new
    return dataclasses.replace(value, **changes)


_KINDS: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a text", str),
    type(None): ("None", type(None)),
}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that a setting is declared with, as far as JSON has such types."""
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is Any:
        return True
    if hint not in _KINDS:
        return not isinstance(value, Mapping) or isinstance(value, typing.get_origin(hint) or hint)
    return isinstance(value, _KINDS[hint][1]) and (hint is bool or not isinstance(value, bool))


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint))
    return _KINDS[hint][0] if hint in _KINDS else f"a {getattr(hint, '__name__', hint)}"


def check_choices(settings: Any, **kinds: Any) -> None:
    """Refuse settings that are none of the words of their kind, a `Literal`."""
    for name, kind in kinds.items():
        if getattr(settings, name) not in typing.get_args(kind):
            words = ", ".join(map(repr, typing.get_args(kind)))
            raise LeanBayesError(f"{name}={getattr(settings, name)!r} is unknown: use one of {words}.")


def encode(value: Any) -> Any:
    """Turn a registered object, and what it holds, into plain JSON values."""
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = type(value).__name__
    if _TYPES.get(name) is not type(value):
        raise LeanBayesError(f"{name} cannot be saved: decorate it with leanbayes.config.configurable.")
    if dataclasses.is_dataclass(value):
        settings = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        settings = vars(value)["settings"]
    return {"type": name, **{key: encode(item) for key, item in settings.items()}}


def decode(value: Any) -> Any:
    """Rebuild what `encode` wrote; a type that is not registered is refused."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    settings = {key: decode(item) for key, item in value.items() if key != "type"}
    cls = _TYPES.get(value.get("type", ""))
    if cls is None:
        raise FileFormatError(
            f"The file asks for the type {value.get('type')!r}, which this leanbayes does not know: "
            "update leanbayes, or import the package that registers it."
        )
    # A number that is null was infinite, which JSON has no word for.
    hints = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    infinite = {key: math.inf for key, item in settings.items() if item is None and hints.get(key) is float}
    try:
        return cls(**settings | infinite)
    except TypeError as error:
        raise FileFormatError(
            f"The settings of {value['type']} in the file do not fit this version: {error}."
        ) from None
