"""Docstrings of builders: a size of a network has the arguments of its class, which are described there once."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

Builder = TypeVar("Builder", bound=Callable[..., Any])

_RESULT = """Returns:
    Network that maps images to logits (batch, num_classes).

"""


def arguments_of(network: type) -> Callable[[Builder], Builder]:
    """Complete the docstring of a builder with the Args and Raises of the class that it builds."""
    sections = _sections(inspect.getdoc(network) or "")

    def complete(builder: Builder) -> Builder:
        summary, example = (inspect.getdoc(builder) or "").split("Example:\n")
        texts = re.findall(r"^    (\w+): (.*\n(?:     .*\n)*)", sections["Args"], re.MULTILINE)
        names = inspect.signature(builder).parameters
        arguments = "".join(f"    {name}: {text}" for name, text in texts if name in names)
        raises = sections["Raises"]
        builder.__doc__ = f"{summary}Args:\n{arguments}\n{_RESULT}Raises:\n{raises}\nExample:\n{example}"
        return builder

    return complete if network.__doc__ else lambda builder: builder  # python -OO removes docstrings


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a docstring by their titles."""
    return {title: body for title, body in re.findall(r"^(\w+):\n((?:    .*\n?)+)", text, re.MULTILINE)}
