"""Settings as text, such as "rule=flipout,prior.scale=0.05", as the command line and config files write them."""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from leanbayes.errors import LeanBayesError

_COMMA = re.compile(r",(?![^(]*\))(?=(?:[^']*'[^']*')*[^']*$)")  # outside parentheses and quotes
Makers = Mapping[str, Callable[[dict[str, Any]], Any]]  # what makes the value of NAME(setting=value, ...)


def parse_settings(items: str, text: str, makers: Makers | None = None) -> dict[str, Any]:
    """Parse a list of settings, which is a part of the text.

    Args:
        items: The settings, with commas between them. Dots lead to settings of a setting. A value with a comma of its
            own is in single quotes.
        text: The whole text, for messages about errors.
        makers: By name, what makes an object of its settings, for values such as NAME(setting=value).

    Raises:
        LeanBayesError: A setting has no value, or is set twice.

    Example:
        >>> parse_settings("rule=flipout,prior.scale=0.05", "mean-field:rule=flipout,prior.scale=0.05")
        {'rule': 'flipout', 'prior': {'scale': 0.05}}
    """
    settings: dict[str, Any] = {}
    for item in filter(None, _COMMA.split(items)):
        path, equals, value = item.partition("=")
        if not equals:
            raise LeanBayesError(f"{item!r} in {text!r} has no value: write setting=value.")
        *outer, last = path.strip().replace("-", "_").split(".")
        inner: Any = settings
        for part in outer:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last in inner:
            raise LeanBayesError(f"{path.strip()!r} in {text!r} is set twice: give each setting once.")
        inner[last] = _value(value.strip(), text, makers or {})
    return settings


def _value(word: str, text: str, makers: Makers) -> Any:
    """Parse a number, True, False, None or an object; anything else is a string."""
    call = re.fullmatch(r"(\w+)\((.*)\)", word)
    if call and call[1] in makers:
        return makers[call[1]](parse_settings(call[2], text, makers))
    try:
        return ast.literal_eval(word)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that it may raise
        return {"true": True, "false": False, "none": None}.get(word.lower(), word)
