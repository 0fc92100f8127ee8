"""Standard JSON, which has neither NaN nor infinity: both are written as null. JSON of untrusted files has limits."""

import json
import math
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 1 << 22  # of untrusted JSON
MOST_CHARACTERS_OF_RECORDS = 1 << 26  # a report of a run holds small images
_MOST_CONTAINERS, _MOST_VALUES, _MOST_DEPTH, _MOST_DIGITS = 1 << 17, 1 << 20, 32, 20


def json_text(values: Any) -> str:
    """Write values as JSON."""
    return json.dumps(without_nan(values), indent=1, allow_nan=False)


def without_nan(values: Any) -> Any:
    """Replace NaN and infinity by None in nested dicts, lists and tuples."""
    if isinstance(values, dict):
        return {key: without_nan(one) for key, one in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_nan(one) for one in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def with_nan(values: Any) -> Any:
    """Replace None by NaN in nested dicts and lists of numbers and strings."""
    if isinstance(values, dict):
        return {key: with_nan(one) for key, one in values.items()}
    if isinstance(values, list):
        return [with_nan(one) for one in values]
    return math.nan if values is None else values


def parse_untrusted(text: str, most_characters: int = MOST_CHARACTERS, *, null_for_nan: bool = False) -> Any:
    """Parse JSON from a file that anybody can have written. Infinity is allowed, because earlier versions wrote it.

    Memory and time are limited: the length and the numbers of brackets and commas are checked before parsing.

    Args:
        text: The content of the file.
        most_characters: The limit of its length.
        null_for_nan: Whether NaN and infinity, which earlier versions wrote, are read as null.

    Raises:
        ValueError: It is not JSON, exceeds a limit, or has NaN or a key twice.
    """
    if len(text) > most_characters:
        raise ValueError(f"it has more than {most_characters:,} characters")
    if text.count("[") + text.count("{") > _MOST_CONTAINERS or text.count(",") > _MOST_VALUES:
        raise ValueError("it has too many values")
    try:
        constant = (lambda name: None) if null_for_nan else _constant
        values = json.loads(text, object_pairs_hook=_unique, parse_int=_int, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [values]
    for _ in range(_MOST_DEPTH):
        containers = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [one for container in containers for one in container]
        if not level:
            return values
    raise ValueError("it is nested too deeply")


def read_untrusted(path: Path) -> Any:
    """Read the JSON record of a run, which anybody can have written; NaN and infinity become null.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not text or JSON, or exceeds a limit.
    """
    if not path.is_file() and path.exists():  # a pipe or a device could be endless
        raise ValueError("it is not a regular file")
    if path.stat().st_size > MOST_CHARACTERS_OF_RECORDS:
        raise ValueError(f"it has more than {MOST_CHARACTERS_OF_RECORDS:,} bytes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is not a text file") from None
    return parse_untrusted(text, MOST_CHARACTERS_OF_RECORDS, null_for_nan=True)


def check_shape(value: Any, shape: Any, name: str = "") -> None:
    """Raise an error for JSON values that do not have the expected types.

    Args:
        value: The values.
        shape: A type (int does not include true and false, float includes int, and Any is anything), None for null, a
            tuple of alternatives, `[shape]` for a list, `{str: shape}` for a dict with any keys, or a dict with a shape
            for each key; a key that ends with "?" may be missing. Other keys may hold anything.
        name: The place of the value, for the message.

    Raises:
        ValueError: A value has another type, or a key is missing.
    """
    if isinstance(shape, tuple):
        if not any(_has_shape(value, one) for one in shape):
            raise ValueError(f"{name or 'it'} has a wrong type")
    elif isinstance(shape, list):
        _check_type(value, list, name)
        for number, item in enumerate(value):
            check_shape(item, shape[0], f"{name}[{number}]")
    elif isinstance(shape, dict):
        _check_type(value, dict, name)
        expected = dict.fromkeys(value, shape[str]) if str in shape else shape
        for key, inner in expected.items():
            plain = key if str in shape else key.removesuffix("?")
            if plain in value:
                check_shape(value[plain], inner, f"{name}.{plain}".lstrip("."))
            elif plain == key:
                raise ValueError(f"it has no {f'{name}.{key}'.lstrip('.')!r}")
    else:
        _check_type(value, shape, name)


def _has_shape(value: Any, shape: Any) -> bool:
    try:
        check_shape(value, shape)
    except ValueError:
        return False
    return True


def _check_type(value: Any, kind: Any, name: str) -> None:
    if kind is Any:
        return
    kinds = (int, float) if kind is float else type(None) if kind is None else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{repr(name)[1:-1][:200] or 'it'} has a wrong type")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found


def _int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("it has a number that is too large")
    return int(digits)


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it has a number that is NaN")
    return float(name)
