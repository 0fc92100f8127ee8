"""Write the pages of the reference that come from code: the API, the command line from its parsers, and the glossary.

python tools/reference_pages.py FOLDER
"""

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from leanbayes.cli import main as run_command
from leanbayes.cli.main import COMMANDS
from leanbayes.methods import METHODS
from leanbayes.report.glossary import GLOSSARY

_WIDTH, _WIDEST = 110, 4000  # columns of a terminal with one box below the other, and in which no text is wrapped
_CLI = """# Command line

`pip install '.[cli]'` installs the program `leanbayes`. Every command has `--help`. Flags may also come from
a yaml file: `--config FILE`, with the names of the flags and `_` for `-`
([training](../training.md#the-command-line)).

Exit codes: 0 for success, 1 if the command failed, 2 if it was called in a wrong way, 130 if it was interrupted.

This page is generated from the parsers.

| command | what it does |
|---|---|
"""
_GLOSSARY = """# Glossary

The terms of the report and of this site, as the report explains them. [Metrics](../metrics.md) says how to add one, and
[what the numbers mean](../guide/numbers.md) what to do with them.

"""
# Modules with public names, and the page of the package that defines a name.
PUBLIC = (
    "leanbayes",
    "leanbayes.data",
    "leanbayes.networks",
    "leanbayes.evaluation",
    "leanbayes.evaluation.decide",
    "leanbayes.evaluation.plot",
    "leanbayes.training",
    "leanbayes.training.sklearn",
    "leanbayes.report",
)
PAGES = {
    "model": ("Models", "Make a network Bayesian, train it in your own loop, and predict."),
    "methods": ("Methods", "What a model is trained with: each class is the recipe of a paper, or a baseline."),
    "priors": ("Priors", "What is known about the weights before training."),
    "likelihoods": ("Likelihoods and predictions", "What the outputs of a network mean, and what a prediction is."),
    "engines": ("Engines", "How means and stds are trained ([engines](../../engines.md))."),
    "rules": ("Rules", "How random weights are combined with activations ([design](../../design.md))."),
    "posteriors": ("Posteriors", "How the distribution of the weights is stored ([design](../../design.md))."),
    "training": ("Training", "`lb.fit` and its settings ([training](../../training.md))."),
    "deploy": ("Files, calibration and export", "From a trained model to a file that others use."),
    "evaluation": ("Evaluation and decisions", "[Scores](../../metrics.md), and [decisions](../../decisions.md)."),
    "data": ("Data", "Data sets by name, and your own ([data](../../data.md))."),
    "networks": ("Networks", "Reference networks by name ([data](../../data.md#networks-by-name))."),
    "report": ("Report", "The HTML report from Python ([report](../../report.md))."),
    "errors": ("Errors", "What is raised. Each message says what is wrong and what to do."),
}  # fmt: skip


class Flag(NamedTuple):
    """A flag or an argument of a command."""

    name: str
    meaning: str
    default: str


def help_of(*words: str, width: int = _WIDTH) -> str:
    """Return the help text of a command."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # with an encoding, the parser draws boxes
        with contextlib.redirect_stdout(out):
            run_command([*words, "--help"])
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    out.seek(0)
    return out.read()


def sections(text: str) -> Iterator[tuple[str, list[Flag]]]:
    """Parse a help text into its boxes: the title of each, and its flags."""
    title, lines = "", list[str]()
    for line in text.splitlines():
        if match := re.match(r"╭─ (.*?) ─", line):
            title, lines = match[1], []
        elif line.startswith("╰"):
            yield title, _flags(lines)
        elif line.startswith("│"):
            lines.append(line.strip("│").rstrip())


def _flags(lines: list[str]) -> list[Flag]:
    """Parse the lines of a box. A line that starts at its left names a flag; its meaning follows, or is in the next."""
    rules = [number for number, line in enumerate(lines) if line.strip() and not line.strip(" ─")]
    found: list[list[str]] = []
    for line in lines[rules[-1] + 1 if rules else 0 :]:
        name, _, meaning = line.strip().partition("  ")
        if line.startswith("  "):
            found[-1][1] += " " + line.strip()
        else:
            found.append([name, meaning.strip()])
    return [Flag(name, *_without_default(meaning)) for name, meaning in found]


def _without_default(meaning: str) -> tuple[str, str]:
    if match := re.search(r" ?\((?:default: (.*)|(required))\)$", meaning):
        return meaning[: match.start()].strip(), match[1] or match[2]
    return meaning.strip(), ""


def table(flags: list[Flag]) -> str:
    """Format flags as a table."""
    rows = ["| flag | meaning | default |", "|---|---|---|"]
    for name, meaning, default in flags:
        shown = default if default in ("required", "") else f"`{default}`"
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", meaning, shown)) + " |")
    return "\n".join(rows)


def _own(flags: list[Flag]) -> list[Flag]:
    return [flag for flag in flags if "--help" not in flag.name]


def command_section(name: str) -> str:
    """Describe a command: its usage, its arguments and its flags."""
    usage, _, rest = help_of(name, width=_WIDEST).partition("\n\n")
    about = [line.strip() for line in rest.partition("╭")[0].splitlines() if line.strip()]
    parts = [f"## leanbayes {name}", f"```text\n{usage.removeprefix('usage: ')}\n```", "\n\n".join(about)]
    for title, flags in sections(help_of(name)):
        if _own(flags):
            parts += [] if title in ("options", "positional arguments") else [f"**{title.capitalize()}**"]
            parts.append(table(_own(flags)))
    return "\n\n".join(parts)


def fit_section() -> str:
    """Describe `fit`: what all methods have in common once, then the settings of each method."""
    parts, shared = ["## leanbayes fit", "```text\nleanbayes fit METHOD [OPTIONS]\n```"], False
    parts.append("Train a network. Defaults are those of the data set `digits`; other data sets have their own.")
    for method in METHODS:
        boxes = dict(sections(help_of("fit", method)))
        if not shared:
            parts.append(table(_own(boxes["options"])))
            shared = True
        about = " ".join((METHODS[method].__doc__ or "").strip().splitlines()[0].split())
        parts += [f"### leanbayes fit {method}", about]
        own = [flag for title, flags in boxes.items() if title != "options" for flag in flags]
        if own:
            parts.append(table(own))
    return "\n\n".join(parts)


def cli_page() -> str:
    """Return the page of all commands."""
    head = _CLI + "".join(
        f"| [`{name} {command.arguments}`](#leanbayes-{name}) | {command.summary} |\n"
        for name, command in COMMANDS.items()
    )
    described = (fit_section() if name == "fit" else command_section(name) for name in COMMANDS)
    return "\n\n".join([head.rstrip(), *described])


def glossary_page() -> str:
    """Return the page of all terms, in alphabetical order."""
    terms = sorted(GLOSSARY.items(), key=lambda item: item[0].casefold())
    return _GLOSSARY + "\n\n".join(f"**{term}**: {meaning}" for term, meaning in terms) + "\n"


def public_names() -> dict[str, list[str]]:
    """Return the public classes and functions by the package that defines them, each under its first public name."""
    found: dict[str, list[str]] = {package: [] for package in PAGES}
    seen: set[int] = set()
    for module in PUBLIC:
        exporting = importlib.import_module(module)
        for name in exporting.__all__:
            value = getattr(exporting, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                found[value.__module__.split(".")[1]].append(f"{module}.{name}")
    return found


def api_page(package: str, names: list[str]) -> str:
    """Return the page of the public names of a package: directives that mkdocstrings replaces."""
    title, about = PAGES[package]
    return "\n\n".join([f"# {title}", about, *(f"::: {name}" for name in names)]) + "\n"


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1]) / "reference"
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for package, names in public_names().items():
        (folder / "api" / f"{package}.md").write_text(api_page(package, names))
    (folder / "cli.md").write_text(cli_page() + "\n")
    (folder / "glossary.md").write_text(glossary_page())


if __name__ == "__main__":
    main()
