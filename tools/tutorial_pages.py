"""Write each tutorial as a page and as a notebook, from one Python file in docs/tutorials, with the output of its code.

A file consists of cells: `# %% [markdown]` starts text in comments, and `# %%` starts code. The code runs as it is,
cell by cell, and what a cell prints is shown below it.

python tools/tutorial_pages.py FOLDER [NAME ...]
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = Path(__file__).parents[1] / "docs" / "tutorials"
_MARK = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


class Cell(NamedTuple):
    """Text or code, and what the code printed."""

    is_code: bool
    text: str
    output: str = ""


def cells_of(source: str) -> list[Cell]:
    """Cut a source file into its cells."""
    _, *parts = _MARK.split(source)
    cells = []
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        if kind:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.strip().splitlines())
        cells.append(Cell(not kind, text.strip()))
    return cells


def run(cells: Sequence[Cell], name: str) -> tuple[list[Cell], dict[str, Any]]:
    """Run the code in the current folder, and return the cells with their output, and the names that the code defined.

    If a package is missing, the cells after that have no output, and a note says so.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    done = []
    for number, cell in enumerate(cells):
        if cell.is_code:
            try:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(cell.text, f"{name}, cell {number}", "exec"), names)
            except ModuleNotFoundError as error:
                note = Cell(False, f"*The output of this page is missing: it was made without {error.name}.*")
                return [*done, note, *cells[number:]], names
            cell = cell._replace(output=out.getvalue())
        done.append(cell)
    return done, names


def page(cells: Sequence[Cell], name: str) -> str:
    """Return the page: Markdown, with links to the notebook and to the source."""
    (title, *text), *rest = (cells[0].text.splitlines(), *cells[1:])
    links = f"[Notebook]({name}.ipynb) · [Python]({name}.py)"
    parts = [title, links, "\n".join(text).strip()]
    for cell in rest:
        parts.append(f"```python\n{cell.text}\n```" if cell.is_code else cell.text)
        if cell.output:
            parts.append(f"```text\n{cell.output.rstrip()}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def notebook(cells: Sequence[Cell], name: str) -> str:
    """Return the notebook, in version 4.5 of its format."""
    count, written = 0, []
    for number, cell in enumerate(cells):
        one: dict[str, Any] = {"id": f"{name}-{number}".replace("_", "-"), "metadata": {}}
        one |= {"source": cell.text.splitlines(keepends=True), "cell_type": "code" if cell.is_code else "markdown"}
        if cell.is_code:
            count += 1
            text = {"output_type": "stream", "name": "stdout", "text": cell.output.splitlines(keepends=True)}
            one |= {"execution_count": count, "outputs": [text] if cell.output else []}
        written.append(one)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": written, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def main() -> None:
    """Run the given tutorials, or all, each in an empty folder, and write both forms of each."""
    folder = Path(sys.argv[1]).absolute() / "tutorials"
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("torchvision"):  # which timm imports
        from any_torchvision import import_torchvision

        library = import_torchvision()  # noqa: F841 - keeps the declarations alive
    names = sys.argv[2:] or sorted(path.stem for path in SOURCES.glob("*.py"))
    for path in [SOURCES / f"{name}.py" for name in names]:
        start, before = time.perf_counter(), Path.cwd()
        with tempfile.TemporaryDirectory() as empty:
            os.chdir(empty)
            try:
                cells, _ = run(cells_of(path.read_text()), path.stem)
            finally:
                os.chdir(before)
        (folder / f"{path.stem}.md").write_text(page(cells, path.stem))
        (folder / f"{path.stem}.ipynb").write_text(notebook(cells, path.stem))
        print(f"{path.stem}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
