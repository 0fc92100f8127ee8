"""Settings as JSON. Only registered types are built from a file."""

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from leanbayes.core.arguments import checked_value, plain
from leanbayes.core.names import shown, suggestion
from leanbayes.errors import FileFormatError, LeanBayesError

T = TypeVar("T")
_TYPES: dict[str, type] = {}


def configurable(cls: type[T]) -> type[T]:
    """Allow `cls` (a dataclass, or a class with a `settings` dict) in saved files, under its class name.

    A dataclass then checks the types of its settings before its own `__post_init__`.
    """
    _TYPES[cls.__name__] = cls
    if dataclasses.is_dataclass(cls):
        _check_types_in_init(cls)
    return cls


def _check_types_in_init(cls: Any) -> None:
    """Let the `__init__` of a dataclass convert NumPy scalars, and raise an error for settings of a wrong type."""
    init, names = cls.__init__, [one.name for one in dataclasses.fields(cls) if one.init]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        hints, given = _hints(cls), [*zip(names, args, strict=False), *kwargs.items()]
        settings = {name: checked_value(name, value, hints.get(name, Any), any_word=True) for name, value in given}
        if len(args) > len(names) or len(settings) != len(args) + len(kwargs):
            init(self, *args, **kwargs)  # too many arguments, or one twice, which Python explains
        init(self, **settings)

    cls.__init__ = checked


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def renamed(default: Any, name: str | None = None, *, values: Mapping[str | bool | None, str] | None = None) -> Any:
    """Declare a setting that older files store under another name, or with other names for its values.

    Args:
        default: The default of the setting.
        name: The former name of the setting.
        values: The current name of each former value.
    """
    return dataclasses.field(default=default, metadata={"former_name": name, "former_values": dict(values or {})})


def current_settings(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of a dataclass from an older file to current names and values.

    Files that were written before a setting existed have the value `former_default` of its metadata, if there is one.
    """
    current = dict(settings)
    for one in dataclasses.fields(cls):
        former = one.metadata.get("former_name")
        if former in current and one.name not in current:
            current[one.name] = current.pop(former)
        values = one.metadata.get("former_values", {})
        if one.name in current and isinstance(current[one.name], (str, bool, type(None))):
            current[one.name] = values.get(current[one.name], current[one.name])
        if "former_default" in one.metadata:
            current.setdefault(one.name, one.metadata["former_default"])
    return current


def change(value: T, settings: Mapping[str, Any]) -> T:
    """Return a dataclass with some settings changed; a mapping changes the settings of a nested dataclass."""
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    hints = _hints(type(value))
    known = [field.name for field in dataclasses.fields(value)]
    changes = {}
    for name, new in settings.items():
        if name not in known:
            hint = suggestion(name, known, f"it has {', '.join(known) or 'none'}.")
            raise LeanBayesError(f"{type(value).__name__} has no setting {shown(name)}: {hint}")
        old = getattr(value, name)
        new = plain(new)
        if new is None and "none" in typing.get_args(hints[name]):  # readers of settings may turn "none" into None
            new = "none"
        if isinstance(new, Mapping) and dataclasses.is_dataclass(old):
            changes[name] = change(old, new)
        else:
            changes[name] = checked_value(name, new, hints[name])
    return dataclasses.replace(value, **changes)


def check_choices(settings: Any, **kinds: Any) -> None:
    """Raise an error for settings that are not among the values of their `Literal` type."""
    for name, kind in kinds.items():
        if getattr(settings, name) not in typing.get_args(kind):
            words = ", ".join(map(repr, typing.get_args(kind)))
            raise LeanBayesError(f"{name}={shown(getattr(settings, name))} is unknown: use one of {words}.")


def encode(value: Any) -> Any:
    """Convert a registered object, with all objects in it, to JSON values."""
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = type(value).__name__
    if _TYPES.get(name) is not type(value):
        raise LeanBayesError(f"{name} cannot be saved: decorate it with leanbayes.core.config.configurable.")
    if dataclasses.is_dataclass(value):
        settings = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        settings = vars(value)["settings"]
    return {"type": name, **{key: encode(item) for key, item in settings.items()}}


def decode(value: Any) -> Any:
    """Rebuild an object that `encode` converted.

    Raises:
        FileFormatError: A type is not registered, or its settings do not fit this version.
        ValueError: The name of a type is not a string.
    """
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    settings = {key: decode(item) for key, item in value.items() if key != "type"}
    kind = value.get("type")
    if not isinstance(kind, (str, type(None))):
        raise ValueError(f"the type in its header is a {type(kind).__name__}")
    cls = _TYPES.get(kind or "")
    if cls is None:
        raise FileFormatError(
            f"The file needs the type {repr(kind)[:100]}, which this version of leanbayes does not know: "
            "update leanbayes, or import the package that registers the type."
        )
    if dataclasses.is_dataclass(cls):
        settings = current_settings(cls, settings)
    # A float that is null was infinite, which JSON cannot express.
    hints = _hints(cls) if dataclasses.is_dataclass(cls) else {}
    infinite = {key: math.inf for key, item in settings.items() if item is None and hints.get(key) is float}
    try:
        return cls(**settings | infinite)
    except (TypeError, LeanBayesError) as error:
        raise FileFormatError(
            f"The settings of {value['type']} in the file do not fit this version: {str(error).rstrip('.')}."
        ) from None
