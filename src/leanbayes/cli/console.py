"""What the command line prints to standard error: one line per error or warning."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from leanbayes.errors import RuleMismatchWarning, printable


def complain(text: str, code: int) -> int:
    """Print a message, and return the exit code."""
    print(f"leanbayes: {printable(text)}", file=sys.stderr)
    return code


def line(text: str) -> None:
    """Print a line, in which the control characters of names are escaped."""
    print(printable(text))


def cell(text: Any) -> str:
    """Return a text for a table, without control characters and markup."""
    return escape(printable(str(text)))


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print each warning of leanbayes once, in one line, without its place in the code."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, RuleMismatchWarning):
            usual(message, category, *place, **more)
        elif str(message) not in printed:
            printed.add(str(message))
            complain(str(message), 0)

    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.simplefilter("always", RuleMismatchWarning)
        warnings.showwarning = show
        yield
