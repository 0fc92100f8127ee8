"""An extension of mkdocstrings: the section `Example:` of a docstring is code, as `Examples:` is."""

import re
from typing import Any

from griffe import Extension, Object


class DocstringExamples(Extension):
    """Rename the section before it is parsed: griffe knows the plural only."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
