"""The package can be released: its version is in one place, and the files around it are complete."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import leanbayes as lb

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))


def test_the_version_is_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'^__version__ = "(.*)"$', source.read_text(), re.MULTILINE) == [lb.__version__]
    assert not [
        path
        for path in (ROOT / "src").rglob("*.py")
        if path != source and f'"{lb.__version__}"' in path.read_text().replace("'", '"')
    ]


def test_the_changelog_has_the_version_and_a_place_for_the_next() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    assert lb.__version__ in heads
    assert re.fullmatch(r"\d+\.\d+\.\d+", lb.__version__)


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "license", "type"}
    assert "version" not in citation, "the version has one place"
    assert citation["license"] == PROJECT["project"]["license"]


def steps_of(workflow: dict[str, Any], job: str) -> list[str]:
    return [step["run"] for step in workflow["jobs"][job]["steps"] if "run" in step]


def test_the_workflow_runs_what_a_developer_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert steps_of(workflow, "checks") == [".ci/run"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in ("docs", "release"):
        (command,) = steps_of(workflow, job)
        assert command.removeprefix("make ") in targets


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_can_be_filled_in(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    assert template.keys() >= {"name", "description", "body"}
    names = [part["id"] for part in template["body"]]
    assert len(set(names)) == len(names) >= 3
    assert all(part["attributes"]["label"] for part in template["body"])


def test_the_package_declares_what_it_imports_and_the_source_distribution_what_exists() -> None:
    names = [re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["dependencies"]]  # type: ignore[index]
    assert sorted(names) == ["numpy", "safetensors", "torch"]
    for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert (ROOT / name.removeprefix("/")).exists(), name
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {"torch", "mkdocs-material", "mkdocstrings", "build"} <= pinned


def test_make_installs_the_extra_of_the_docs() -> None:
    (line,) = re.findall(r"^\t\$\(DOCS_VENV\).*PIP_INSTALL\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name.strip("'") for name in line.split()] == PROJECT["project"]["optional-dependencies"]["docs"]


def test_every_extra_that_the_errors_name_exists() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in re.findall(r'missing_package\([^\n]*, "(\w+)"\)', path.read_text())
    }
    assert {"train", "cli"} <= named <= extras.keys()


def test_install_commands_name_the_folder() -> None:
    """The package is on no index, so `pip install 'leanbayes[...]'` would fail."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    code = [*(ROOT / "src").rglob("*.py"), ROOT / "tools" / "reference_pages.py"]
    assert [path for path in pages + code if re.search(r"pip install '?leanbayes", path.read_text())] == []
