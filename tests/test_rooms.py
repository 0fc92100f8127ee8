"""The package tree is the dependency graph: a package imports only from packages above it, inside functions too."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leanbayes.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "leanbayes"
MODULES = sorted(path for path in SOURCE.rglob("*.py"))
FRONT = ("__init__.py", "__main__.py")  # they only gather what the packages offer
# Names that mean the same everywhere: a package's base class, its table of names, and its public names.
CONVENTIONS = {"__init__", "base", "registry"}


@cache
def packages() -> tuple[str, ...]:
    """The one list of docs/design.md, from top to bottom."""
    page = (ROOT / "docs" / "design.md").read_text().partition("## The package tree")[2].partition("\n## ")[0]
    return tuple(re.findall(r"^  (\w+)(?:/|\.py)\s", page, re.MULTILINE))


class Import(NamedTuple):
    """One module of leanbayes imports another."""

    by: str
    of: str


def dotted(path: Path) -> str:
    """The name of a module below `leanbayes`, such as core.noise; that of a package is core."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in MODULES}


def package(module: str) -> str:
    return module.partition(".")[0]


def imported(node: ast.AST, by: str) -> Iterator[str]:
    """Every module of leanbayes that is imported below a node, but for `if TYPE_CHECKING:`."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        for other in node.orelse:
            yield from imported(other, by)
        return
    found: list[str] = []
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"{by} has a relative import"
        for alias in node.names:
            part = f"{node.module}.{alias.name}"
            found.append(part if part.removeprefix("leanbayes.") in NAMES else str(node.module))
    for name in found:
        if name.startswith("leanbayes."):
            yield name.removeprefix("leanbayes.")
        elif name == "leanbayes":
            yield ""  # the front, which imports all
    for child in ast.iter_child_nodes(node):
        yield from imported(child, by)


@cache
def every_import() -> tuple[Import, ...]:
    return tuple(
        Import(dotted(path), of)
        for path in MODULES
        if path.relative_to(SOURCE).as_posix() not in FRONT
        for of in imported(ast.parse(path.read_text()), dotted(path))
    )


def test_the_list_names_every_package_once_and_has_at_most_16() -> None:
    there = {package(dotted(path)) for path in MODULES if path.relative_to(SOURCE).as_posix() not in FRONT}
    assert sorted(packages()) == sorted(there)
    assert len(packages()) <= 16


def test_packages_import_from_above_only() -> None:
    order = {name: number for number, name in enumerate(packages())}
    assert len(every_import()) > len(MODULES)
    upwards = [one for one in every_import() if one.of and order[package(one.of)] > order[package(one.by)]]
    assert upwards == []


def test_only_the_command_line_imports_the_front() -> None:
    """It imports everything, so whoever imports it depends on everything."""
    assert {package(one.by) for one in every_import() if not one.of} <= {"cli"}


def test_modules_have_no_import_cycle() -> None:
    """Inside packages too. A package's __init__ only gathers names, and is left out."""
    inits = {dotted(path) for path in MODULES if path.name == "__init__.py"}
    graph: dict[str, set[str]] = {}
    for one in every_import():
        if one.by not in inits and one.of not in inits:
            graph.setdefault(one.by, set()).add(one.of)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_at_most_three_modules_stand_outside_packages() -> None:
    assert len([path for path in SOURCE.glob("*.py") if path.name not in FRONT]) <= 3


def test_no_two_modules_share_a_name() -> None:
    """But a command may have the name of what it runs, a method that of its posterior, a folder that of its file."""
    modules = [path for path in MODULES if path.stem not in CONVENTIONS | {"__main__"}]
    commands = {SOURCE / "cli" / f"{name}.py" for name in COMMANDS}
    counts = Counter(path.stem for path in modules if path not in commands)
    folders = Counter(path.name for path in SOURCE.rglob("*") if path.is_dir() and path.name != "__pycache__")
    twice = {name for name, count in counts.items() if count > 1} - {"mean_field"}
    assert twice == set()
    assert {name for name, count in folders.items() if count > 1} == set()
    for path in modules:
        if path.stem in folders:
            assert path.parent.name == path.stem or path in commands, f"{path} has the name of another folder"
