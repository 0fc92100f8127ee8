"""Types of arguments and settings: a wrong one raises one sentence, and NumPy numbers become Python numbers."""

import collections.abc
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from leanbayes.core.names import shown, suggestion
from leanbayes.errors import LeanBayesError

F = TypeVar("F", bound=Callable[..., Any])
_UNFIT: Any = object()
_LEAST, _MOST = -(2**63), 2**64 - 1  # of whole numbers
_KINDS: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a string", str),
    type(None): ("None", type(None)),
}
_DESCRIPTIONS: dict[Any, str] = {
    os.PathLike: "a path",
    Path: "a path",
    nn.Module: "a torch.nn.Module",
    torch.Generator: "a torch.Generator, such as torch.Generator().manual_seed(0)",
}
_ITERABLES = (Iterable, collections.abc.Iterable, collections.abc.Collection)
_SHOWN = (str, bytes, bool, int, float, complex, type(None), list, tuple, dict, set)


def checked(*others: str, **expected: str) -> Callable[[F], F]:
    """Decorate a function whose arguments are checked against their annotations at each call.

    Any string fits a choice of strings: the function itself lists the choices.

    Args:
        others: The names of arguments that the function itself checks.
        expected: What an argument must be, for messages in which its type alone would say too little.

    Example:
        >>> @checked(size="a number of bytes")
        ... def allocate(size: int) -> None: ...
        >>> allocate("1 GB")  # raises LeanBayesError: size='1 GB' must be a number of bytes.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        kinds = {name: one.kind for name, one in signature.parameters.items() if name not in others}
        names = [name for name, kind in kinds.items() if kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # an argument is missing or unknown, which Python explains
                return function(*args, **kwargs)
            hints = {name: hint for name, hint in _hints(function).items() if name in names}
            for name, value in bound.arguments.items():
                if name in hints:
                    bound.arguments[name] = checked_value(name, value, hints[name], expected.get(name), any_word=True)
            return function(*bound.args, **bound.kwargs)

        return typing.cast(F, call)

    return decorate


@functools.cache
def _hints(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function)


def checked_value(name: str, value: Any, hint: Any, expected: str | None = None, any_word: bool = False) -> Any:
    """Return a value with Python numbers in place of NumPy's; raise an error if it does not have the declared type.

    Args:
        name: The name of the argument or setting.
        value: The value.
        hint: The declared type.
        expected: What the value must be, or None for a description of the type.
        any_word: Whether any string fits a choice of strings, because a later check lists the choices.
    """
    found = _conform(value, hint, any_word)
    if found is _UNFIT:
        if type(value) is int and not _LEAST <= value <= _MOST:
            expected = expected or "a whole number of at most 64 bits"
        expected, words = expected or _describe(hint), [one for one in _choices(hint) if isinstance(one, str)]
        if isinstance(value, str) and words:
            raise LeanBayesError(f"{name}={shown(value)} is unknown: {suggestion(value, words, f'use {expected}.')}")
        if isinstance(value, _SHOWN):
            raise LeanBayesError(f"{name}={shown(value)} must be {expected}.")
        kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise LeanBayesError(f"{name} must be {expected}, not {kind}.")
    return found


def plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number."""
    return value.item() if isinstance(value, np.generic) else value


def _conform(value: Any, hint: Any, any_word: bool) -> Any:
    """Return the value as the declared type has it, or `_UNFIT`."""
    value, origin, parts = plain(value), typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        fits = any(type(value) is type(one) and value == one for one in parts)
        return value if fits or (any_word and isinstance(value, str)) else _UNFIT
    if origin in (typing.Union, types.UnionType):
        found = (_conform(value, part, any_word) for part in parts)
        return next((one for one in found if one is not _UNFIT), _UNFIT)
    if hint is Any:
        return value
    if hint in _KINDS:
        return _number(value, hint)
    if origin in (tuple, list, collections.abc.Sequence):
        return _sequence(value, tuple if origin is tuple else None, parts, any_word)
    return value if _is_instance(value, hint, origin, parts) else _UNFIT


def _number(value: Any, hint: Any) -> Any:
    if not isinstance(value, _KINDS[hint][1]) or (isinstance(value, bool) and hint is not bool):
        return _UNFIT
    if type(value) is int and not _LEAST <= value <= _MOST:
        return float(value) if hint is float and abs(value) < 1e300 else _UNFIT
    return value


def _sequence(value: Any, kind: Any, parts: tuple[Any, ...], any_word: bool) -> Any:
    """Return a sequence with checked elements; NumPy arrays are sequences of numbers."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, collections.abc.Sequence) or isinstance(value, (str, bytes)):
        return _UNFIT
    if not parts or parts == ((),):
        return value
    of_each = parts[:1] * len(value) if kind is None or parts[-1] is Ellipsis else parts
    if len(of_each) != len(value) or not hasattr(type(value), "__iter__"):
        return _UNFIT
    found = [_conform(one, part, any_word) for one, part in zip(value, of_each, strict=True)]
    if any(one is _UNFIT for one in found):
        return _UNFIT
    return tuple(found) if kind is tuple else value if all(map(_same, found, value)) else found


def _same(one: Any, other: Any) -> bool:
    return one is other


def _is_instance(value: Any, hint: Any, origin: Any, parts: Sequence[Any]) -> bool:
    """Whether a value is an instance of a class, or one cannot know."""
    kind = origin or hint
    if kind is collections.abc.Callable:
        return callable(value) and not isinstance(value, nn.Module)
    if kind in _ITERABLES:
        return _is_iterable(value)
    if kind is Dataset:  # anything that can be indexed does, which those who read examples check
        return True
    if kind is type and parts:
        return isinstance(value, type) and issubclass(value, parts[0])
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(getattr(value, "_orig_mod", value), kind)  # torch.compile wraps a module


def _is_iterable(value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping, type)) or (isinstance(value, Tensor) and value.dim() == 0):
        return False
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _choices(hint: Any) -> list[Any]:
    """Return the values of a `Literal` type, also as a part of a union."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return list(parts)
    unions = (typing.Union, types.UnionType)
    return [one for part in parts for one in _choices(part)] if typing.get_origin(hint) in unions else []


def _describe(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(part) for part in parts))
    if hint in _KINDS:
        return _KINDS[hint][0]
    kind = origin or hint
    if kind is collections.abc.Callable:
        return "a function"
    if kind in (tuple, list, collections.abc.Sequence):
        several = {int: "whole numbers", float: "numbers", str: "strings"}
        of = several.get(parts[0]) if parts else None
        return f"a list of {of}" if of else "a list"
    if kind in _ITERABLES:
        return "a list or a DataLoader of batches"
    if kind is type and parts:
        return f"a class of {parts[0].__name__}"
    if kind in _DESCRIPTIONS:
        return _DESCRIPTIONS[kind]
    name = getattr(kind, "__name__", str(kind))
    return getattr(kind, "described", None) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
