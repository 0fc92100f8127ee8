"""The reference that `make docs` generates has every command with its flags, every term, and every public name."""

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import test_public_names

from leanbayes.cli.main import COMMANDS
from leanbayes.methods import METHODS
from leanbayes.report.glossary import GLOSSARY

ROOT = Path(__file__).parents[1]
MKDOCS = (ROOT / "mkdocs.yml").read_text()


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "reference_pages.py"))


@pytest.fixture(scope="module")
def cli(program: dict[str, Any]) -> str:
    return program["cli_page"]()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_flags_with_meanings(command: str, cli: str) -> None:
    section = cli.partition(f"\n## leanbayes {command}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert len(rows) >= 2
    assert all(len(meaning) > 4 for _, meaning, _ in rows)
    assert f"`{command} {COMMANDS[command].arguments}`" in cli


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_settings(method: str, cli: str) -> None:
    section = cli.partition(f"\n### leanbayes fit {method}\n")[2].partition("\n##")[0]
    flags = {re.split(r"[ ,]", name)[0] for name in re.findall(r"^\| `(--method\.[^`]*)`", section, re.MULTILINE)}
    settings = {field.name.replace("_", "-") for field in fields(METHODS[method])}  # type: ignore[arg-type]
    # A prior has flags of its own, and settings that are no plain values have none.
    assert {flag.removeprefix("--method.") for flag in flags if ".prior." not in flag} >= settings - {"prior", "start"}


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
)
def test_commands_in_pages_exist_with_their_flags(page: str, cli: str) -> None:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = "".join(block for language, block in blocks if not language)
    found = re.findall(r"^(?:torchrun .* -m )?leanbayes (.*)$", code, re.MULTILINE) + re.findall(
        r"`leanbayes (.*?)`", text
    )
    for command in found:
        name, *words = command.partition("#")[0].split()
        section = cli.partition(f"\n## leanbayes {name}\n")[2].partition("\n## ")[0]
        assert section, command
        flags = {
            flag
            for cell in re.findall(r"^\| `(--.*?)` \|", section, re.MULTILINE)
            for flag in re.findall(r"--[\w.-]+", cell)
        }
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags | {"--help"}, command


def test_a_flag_is_parsed_with_its_default(program: dict[str, Any]) -> None:
    text = (
        "╭─ options ───╮\n│ --out {None}|PATH  file to write. (default: None) │\n"
        "│ --long-name [STR ...]   │\n│                    words that are\n"
        "│                    wrapped. (required) │\n╰──╯"
    )
    assert [*program["sections"](text)] == [
        (
            "options",
            [
                ("--out {None}|PATH", "file to write.", "None"),
                ("--long-name [STR ...]", "words that are wrapped.", "required"),
            ],
        )
    ]


def test_the_glossary_has_every_term(program: dict[str, Any]) -> None:
    page = program["glossary_page"]()
    for term, meaning in GLOSSARY.items():
        assert f"**{term}**: {meaning}\n" in page


def test_every_public_name_is_on_one_page_of_the_site(program: dict[str, Any]) -> None:
    pages = {package: program["api_page"](package, names) for package, names in program["public_names"]().items()}
    shown = [name for page in pages.values() for name in re.findall(r"^::: (.*)$", page, re.MULTILINE)]
    assert sorted(shown) == sorted(test_public_names.NAMES)
    for package in pages:
        assert f"reference/api/{package}.md" in MKDOCS
