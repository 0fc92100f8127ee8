"""The pages with measured numbers are what the programs write from the result files."""

import json
import re
import runpy
import shutil
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]


@pytest.mark.parametrize("folder", ["experiments", "benchmarks"])
def test_pages_are_those_that_the_program_writes(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("experiments", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path / folder)
    runpy.run_path(str(tmp_path / folder / "tables.py"), run_name="__main__")
    for page in PAGES:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), page


def test_the_readme_quotes_the_results_of_the_engines() -> None:
    def mean(row: str, kind: str) -> float:
        files = (ROOT / "experiments" / "results" / "engines").glob(f"cifar10-{row}-[0-9].json")
        found = [json.loads(path.read_text())["scores"]["refreshed"][kind]["nll"] for path in files]
        assert len(found) >= 2
        return statistics.fmean(found)

    text = " ".join((ROOT / "README.md").read_text().split())
    plain, scaled = mean("sgd", "test"), mean("sgd", "test_with_temperature")
    quoted = f"has NLL {mean('ivon', 'test'):.3f} where SGD has {plain:.3f}, or {scaled:.3f} with a fitted temperature"
    assert quoted in text
    step = json.loads((ROOT / "benchmarks" / "results" / "engines-resnet-18.json").read_text())["rows"]["ivon"]["ratio"]
    assert f"a step takes {step:.2f} times that of SGD" in text


def test_the_networks_of_the_readme_have_nearly_the_same_accuracy() -> None:
    choose = (ROOT / "docs" / "guide" / "choose.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| ([\d.]+)%", choose, re.MULTILINE))
    shown = ("Deterministic", "MeanField by ivon (60 epochs), 30 samples", "composition (500 held out), one pass")
    plain, *others = (float(rows[name]) for name in shown)
    assert max(abs(other - plain) for other in others) < 0.5
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "within half a percentage point" in readme
    row = next(line for line in choose.splitlines() if line.startswith("| Deterministic, temperature |"))
    ece, auroc = (row.split("|")[place].strip() for place in (4, 6))
    assert f"the gap of the plain network to {float(ece):.1%}" in readme
    assert f"unknown inputs ({float(auroc.rstrip('%')):.1f}%)" in readme


@pytest.mark.parametrize("page", PAGES)
def test_wide_tables_are_behind_a_summary(page: str) -> None:
    shown = re.sub(r"<details.*?</details>", "", (ROOT / page).read_text(), flags=re.DOTALL)
    widths = [line.count("|") - 1 for line in shown.splitlines() if re.fullmatch(r"\|[-:| ]+\|", line)]
    assert max(widths, default=0) <= 10


def test_the_planned_state_is_the_measured_one() -> None:
    table = (ROOT / "docs" / "guide" / "large_models.md").read_text().partition("<!-- measured: plan -->")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    pairs = [(float(row[3].rstrip(" B")), float(row[4].rstrip(" B"))) for row in rows[1:] if row[4]]
    assert len(pairs) >= 10
    assert all(abs(planned - found) <= 0.02 for planned, found in pairs)


MEASURED = re.compile(r"<!-- measured.*?-->(.*?)<!-- /measured -->", re.DOTALL)
SETTINGS = {"docs/training.md": {"0.999"}}  # numbers in the text of a page that nobody measured

QUOTED = re.compile(r"(?<![\w.:])(\d*\.(?:\d{2,4}\b|\d(?=\s?(?:%|×|times|ms|MB|GB))))(?!\.\d)")


def rounded(values: Iterable[float]) -> set[str]:
    """All ways to print values, or values in percent, with up to four decimals."""
    found = [one for value in values for one in (value, 100 * value)]
    short = {f"{one:.{digits}f}" for one in found for digits in (1, 2)}
    return short | {f"{one:.{digits}f}" for value in found for one in (value, value / 100) for digits in (3, 4)}


@pytest.fixture(scope="module")
def in_tables() -> set[str]:
    """The numbers of all tables that programs write."""
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    whole = [text for page, text in texts.items() if page in ("docs/results.md", "docs/benchmarks.md")]
    tables = "\n".join([*whole, *(part for text in texts.values() for part in MEASURED.findall(text))])
    return rounded(map(float, re.findall(r"\d+\.\d+", tables)))


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(one)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("docs/results.md", "docs/benchmarks.md")])
def test_measured_numbers_in_sentences_are_in_tables_or_in_the_named_file(page: str, in_tables: set[str]) -> None:
    text = re.sub(r"```.*?```", "", MEASURED.sub("", (ROOT / page).read_text()), flags=re.DOTALL)
    files = [path for name in re.findall(r"`([\w-]+\.json)`", text) for path in (ROOT / "experiments").rglob(name)]
    known = in_tables | rounded(value for path in files for value in numbers_in(json.loads(path.read_text())))
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    quoted = {f"0{one}" if one.startswith(".") else one for one in QUOTED.findall(plain)}
    assert quoted - known - SETTINGS.get(page, set()) == set()


@pytest.mark.parametrize("page", PAGES)
def test_named_config_files_and_programs_of_experiments_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    programs = re.findall(r"\b(?:experiments|benchmarks)/\w+\.(?:py|yaml|toml)\b", text)
    configs = re.findall(r"--config (experiments/\S+?)[`\s]", text) + re.findall(r"`(\w+\.yaml)`", text)
    names = {*programs, *(name if "/" in name else f"experiments/{name}" for name in configs)}
    assert [name for name in sorted(names) if not (ROOT / name).is_file()] == []
