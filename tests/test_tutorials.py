"""The tutorials run as they are, what they print is true, and pages and notebooks have all of it."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.py"))}


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "tutorial_pages.py"))


@pytest.fixture
def tutorial(
    program: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Run the tutorial with the name of the test, check its page and notebook, and return the names that it defined."""
    monkeypatch.chdir(tmp_path)
    name = request.node.name.removeprefix("test_")
    cells, names = program["run"](program["cells_of"](SOURCES[name].read_text()), name)
    page, notebook = program["page"](cells, name), json.loads(program["notebook"](cells, name))
    assert not re.search("output of this page is missing", page)
    outputs = [cell.output for cell in cells if cell.output]
    assert len(outputs) >= 2
    assert all(output.rstrip() in page for output in outputs)
    assert [
        text for cell in notebook["cells"] for one in cell.get("outputs", ()) for text in ["".join(one["text"])]
    ] == outputs
    return names


def test_regression(tutorial: dict[str, Any]) -> None:
    assert 0.8 <= tutorial["inside"] <= 1
    assert tutorial["ratio"] > 3
    assert tutorial["prediction"].samples == 100


def test_segmentation(tutorial: dict[str, Any]) -> None:
    assert tutorial["accuracy"] > 0.9
    entropies = tutorial["entropies"]
    assert entropies["right"] < 0.7 * min(entropies["wrong"], entropies["unknown object"])
    assert tutorial["found"] > 0.4


def test_text_lora(tutorial: dict[str, Any]) -> None:
    assert tutorial["accuracy"] > 0.9
    assert tutorial["bnn"].posterior.random_weights < 0.1 * tutorial["everything"]
    assert tutorial["unknown"].entropy.mean() > 1.3 * tutorial["known"].entropy.mean()
    alarms = {name: alarm.float().mean().item() for name, alarm in tutorial["alarms"].items()}
    assert alarms["familiar"] < 0.25 < alarms["unknown words"]
    frozen = dict(tutorial["network"].named_parameters())
    trained = dict(tutorial["bnn"].to_deterministic().named_parameters())
    assert all(frozen[name].equal(trained[name]) for name in frozen if ".base." in name)


def test_ship(tutorial: dict[str, Any]) -> None:
    assert tutorial["small"].bytes < 0.1 * tutorial["plain_bytes"]
    assert tutorial["right"].float().mean() > 0.9
    assert tutorial["difference"] < 1e-4
    accepted = tutorial["decision"].accepted
    assert accepted.float().mean() > 0.5
    assert tutorial["right"][accepted].float().mean() > 0.9


def test_active_learning(tutorial: dict[str, Any]) -> None:
    random, chosen = (tutorial["results"][by] for by in ("random", "information"))
    assert chosen["found"] >= 1.5 * random["found"]
    assert chosen["accuracy"] > random["accuracy"]
    assert len(tutorial["chosen"].unique()) == 120


def test_every_tutorial_has_a_test() -> None:
    in_models = "test_images_timm" in (ROOT / "tests" / "models" / "test_tutorial_with_timm.py").read_text()
    assert SOURCES.keys() - ({"images_timm"} if in_models else set()) <= {
        name.removeprefix("test_") for name in globals()
    }


def test_cells_pages_and_notebooks(program: dict[str, Any]) -> None:
    first = "# %% [markdown]\n# # Title\n#\n# About.\n\n# %%\nx = 1\nprint(x)\n\n"
    source = first + "# %% [markdown]\n# ## More\n\n# %%\nimport nowhere_at_all\n"
    cells = program["cells_of"](source)
    assert [cell.text for cell in cells] == ["# Title\n\nAbout.", "x = 1\nprint(x)", "## More", "import nowhere_at_all"]
    done, names = program["run"](cells, "some_name")
    assert names["x"] == 1
    text = program["page"](done, "some_name")
    assert text.startswith(
        "# Title\n\n[Notebook](some_name.ipynb) · [Python](some_name.py)\n\nAbout.\n\n```python\nx = 1\n"
    )
    assert "```text\n1\n```" in text
    assert "made without nowhere_at_all" in text
    assert text.rstrip().endswith("```python\nimport nowhere_at_all\n```")
    notebook = json.loads(program["notebook"](done, "some_name"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    assert kinds == ["markdown", "code", "markdown", "markdown", "code"]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(kinds)
    assert all(re.fullmatch(r"[\w-]{1,64}", cell["id"]) for cell in notebook["cells"])


@pytest.mark.parametrize("name", SOURCES)
def test_links_of_tutorials_are_not_dead(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s#:]+\.md)", SOURCES[name].read_text()):
        assert (SOURCES[name].parent / link).resolve().is_file(), link
