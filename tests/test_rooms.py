"""Files import as docs/design.md says: from those above them in its list, and from below inside functions only."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "leanbayes"
PAGE = (ROOT / "docs" / "design.md").read_text().partition("## The rooms")[2].partition("\n## ")[0]
NAME = r"[\w/]+(?:\.py|/)"


class Import(NamedTuple):
    """One file of the package imports another, or a room."""

    by: str
    of: str
    inside_function: bool


def listed() -> list[tuple[str, ...]]:
    """Files and rooms, line by line."""
    lines = re.findall(rf"^  ({NAME}(?: {NAME})*)", PAGE, re.MULTILINE)
    return [tuple(line.split()) for line in lines]


@cache
def height(path: str) -> int:
    """The line that a file stands on: its own, or that of its room."""
    lines = {name: number for number, names in enumerate(listed()) for name in names}
    room = f"{path.split('/')[0]}/"
    return lines[path] if path in lines else lines[room]


def files() -> list[str]:
    paths = (path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    return [path for path in paths if path not in ("__init__.py", "__main__.py")]  # which only name the others


def place(module: str) -> str | None:
    """The file of a module, or the room of a package; None for what is no module, and for the whole."""
    path = module.removeprefix("leanbayes").lstrip(".").replace(".", "/")
    if path and (SOURCE / path).is_dir():
        return f"{path}/__init__.py"
    return f"{path}.py" if (SOURCE / f"{path}.py").is_file() else None


def imports(by: str, node: ast.AST, inside: bool = False) -> Iterator[Import]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    modules = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level
        modules = [
            part if place(part) else str(node.module)
            for part in (f"{node.module}.{alias.name}" for alias in node.names)
        ]
    for module in modules:
        of = place(module) if module.split(".")[0] == "leanbayes" else None
        if of is not None:
            yield Import(by, of, inside)
    for child in ast.iter_child_nodes(node):
        yield from imports(by, child, inside or isinstance(node, ast.FunctionDef))


def every_import() -> list[Import]:
    return [one for path in files() for one in imports(path, ast.parse((SOURCE / path).read_text()))]


def upwards(found: list[Import]) -> list[Import]:
    """Those of what stands below."""
    return [one for one in found if height(one.of) > height(one.by)]


def test_what_is_listed_is_there_and_what_is_there_is_listed() -> None:
    names = [name for line in listed() for name in line]
    assert len(names) == len(set(names)) > 30
    for name in names:
        assert (SOURCE / name).is_dir() if name.endswith("/") else (SOURCE / name).is_file(), name
    for path in files():
        assert height(path) >= 0


def test_files_import_from_above() -> None:
    found = [one for one in every_import() if not one.inside_function]
    assert len(found) > len(files())
    assert upwards(found) == []


def test_imports_from_below_are_those_that_the_page_names() -> None:
    sentences = re.findall(rf"`({NAME})` imports\s((?:(?:, |\sand )?`{NAME}`)+)", PAGE)
    named = {(by, of) for by, those in sentences for of in re.findall(rf"`({NAME})`", those)}
    assert {(one.by, one.of) for one in upwards(every_import())} == named != set()
