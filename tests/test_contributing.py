"""CONTRIBUTING.md names files that exist, and a row for every kind of thing that can be added."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:src|tests|docs|benchmarks|experiments|tools)/[\w./]*)`", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_a_named_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    "kind", ["method", "posterior", "rule", "moment rule", "likelihood", "metric", "data set", "network"]
)
def test_every_kind_of_addition_has_a_row_with_an_example(kind: str) -> None:
    (row,) = re.findall(rf"^\| \*\*{kind}\*\*.*$", PAGE, re.MULTILINE)
    assert "`src/leanbayes/" in row
    assert "example" in row or "a row" in row
    assert "tests/" in row


def test_the_commands_are_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {line.split()[1] for line in re.findall(r"^make [a-z-]+", PAGE, re.MULTILINE)} <= targets
