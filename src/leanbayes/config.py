"""Settings that travel through JSON: only registered types are ever built from a file."""

import dataclasses
from typing import Any, TypeVar

from leanbayes.errors import FileFormatError

T = TypeVar("T")
_TYPES: dict[str, type] = {}


def configurable(cls: type[T]) -> type[T]:
    """Allow `cls` (a dataclass, or a class with a `settings` dict) in saved files, under its own name."""
    _TYPES[cls.__name__] = cls
    return cls


def encode(value: Any) -> Any:
    """Turn a registered object, and what it holds, into plain JSON values."""
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = type(value).__name__
    if _TYPES.get(name) is not type(value):
        raise TypeError(f"{name} cannot be saved: decorate it with leanbayes.config.configurable.")
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
    try:
        return cls(**settings)
    except TypeError as error:
        raise FileFormatError(
            f"The settings of {value['type']} in the file do not fit this version: {error}."
        ) from None
