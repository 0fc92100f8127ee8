"""Look up names that users type. Case and separators do not matter, and a typo gets a suggestion."""

import difflib
from collections.abc import Iterable

from leanbayes.errors import LeanBayesError

_LENGTH = 80  # characters of a value in a message


def shown(value: object) -> str:
    """Return a value as a message shows it: in one line that is not long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


def bare(name: str) -> str:
    """Return a name without its case and separators: "Fashion-MNIST" and "fashion_mnist" are the same."""
    return "".join(character for character in name.lower() if character not in "-_ ")


def find(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that matches, ignoring case and separators, or None."""
    wanted = bare(str(name))
    return next((one for one in known if bare(one) == wanted), None)


def suggestion(name: object, known: Iterable[str], otherwise: str) -> str:
    """Return the end of an error message about an unknown name: "did you mean X?", or `otherwise` if none is close."""
    by_bare = {bare(one): one for one in known}
    close = difflib.get_close_matches(bare(str(name)), by_bare, 1)
    return f"did you mean {by_bare[close[0]]}?" if close else otherwise


def lookup(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the known name that matches, ignoring case and separators.

    Raises:
        LeanBayesError: No name matches; the message suggests the closest one, or lists all of them.
    """
    names = sorted(known)
    found = find(name, names)
    if found is None:
        raise LeanBayesError(f"There is no {kind} {shown(name)}: {suggestion(name, names, f'use {_listed(names)}.')}")
    return found


def _listed(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
