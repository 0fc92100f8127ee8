"""Tests of the page on the papers, and of the experiment on the recipe of PBN."""

import json
import re
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> dict[str, Any]:
    """Run a script with these arguments, or import it if there are none."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    return runpy.run_path(str(EXPERIMENTS / name), run_name="__main__" if words else "read")


def test_rows_of_the_recipe_start_from_one_plain_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pbn" / "recipe.json"
    flags = ["--data", "digits", "--epochs", 4, "--seeds", 2, "--rate", 0.1]
    script(monkeypatch, "pbn_recipe.py", "--rows", "plain", "paper", "stds fixed", *flags, "--out", out)
    found = json.loads(out.read_text())
    assert [(one["name"], one["seed"]) for one in found["results"]] == [
        (name, seed) for seed in range(2) for name in ("plain", "paper", "stds fixed")
    ]
    plain, paper, fixed = found["results"][:3]
    assert plain["stds"] == {}
    assert paper["stds"].keys() == fixed["stds"].keys() == {"1.weight", "3.weight", "5.weight"}
    weights = 64 * 300 + 300 * 100 + 100 * 10
    assert sum(of["count"] for of in paper["stds"].values()) == int(0.1 * weights)
    assert [of["count"] for of in paper["stds"].values()] == [of["count"] for of in fixed["stds"].values()]
    assert all(0.02 < of["median"] < 0.1 for of in fixed["stds"].values())  # softplus(-3) is 0.049
    assert paper["stds"]["5.weight"]["median"] != fixed["stds"]["5.weight"]["median"]
    assert all(one["test"]["accuracy"] > 0.8 for one in found["results"])
    tables = script(monkeypatch, "pbn_tables.py")
    (table,) = (part for part in tables["partial_tables"](out.parent) if "The recipe of the paper" in part)
    row = next(line for line in table.splitlines() if line.startswith("| paper |"))
    accuracy = statistics.fmean(one["test"]["accuracy"] for one in found["results"] if one["name"] == "paper")
    assert row.split("|")[2].strip() == f"{accuracy:.2%}"
    assert "2 epochs, for as many epochs" in table
    stored = script(monkeypatch, "papers_tables.py")["Stored"](tmp_path)
    of_fixed = [one for one in found["results"] if one["name"] == "stds fixed"]
    assert stored.recipe("recipe", "stds_fixed").startswith(
        f"{statistics.fmean(one['test']['accuracy'] for one in of_fixed):.2%}"
    )
    stds = [statistics.fmean(one["stds"][layer]["median"] for one in of_fixed) for layer in fixed["stds"]]
    assert stored.recipe_stds("recipe", "stds_fixed") == ", ".join(f"{std:.2f}" for std in stds)
    of_paper = [one["test"]["nll"] for one in found["results"] if one["name"] == "paper"]
    difference = statistics.fmean(of_paper) - statistics.fmean(one["test"]["nll"] for one in of_fixed)
    assert stored.recipe_paired("recipe", "paper", "stds_fixed", "nll", ".3f").startswith(f"{difference:+.3f} (p = ")
    with pytest.raises(LookupError, match="other in pbn/recipe"):
        stored.recipe("recipe", "other")


def test_paired_differences_and_p_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script(monkeypatch, "papers_tables.py")
    values = {"a": (0.1, 0.3, 0.2), "b": (0.2, 0.45, 0.35)}
    runs = [{"name": name, "scores": {"nll": value}} for name, of in values.items() for value in of]
    (tmp_path / "compared.json").write_text(json.dumps({"results": runs}))
    p = scipy.stats.ttest_rel(values["a"], values["b"]).pvalue
    assert tables["Stored"](tmp_path).paired("compared", "a", "b", "nll", ".3f") == f"-0.133 (p = {p:.3f})"
    pairs = [{"first": "a", "second": "b, c=d", "p_value": 0.0123}]
    (tmp_path / "vdp.json").write_text(json.dumps({"summary": {"tests": {"nll": {"pairs": pairs}}}}))
    assert tables["Stored"](tmp_path).p_value("vdp.json", "nll", "a", "b,", "c=d") == "0.012"
    with pytest.raises(tables["MissingResultError"], match=r"nll of b and a in vdp\.json"):
        tables["Stored"](tmp_path).p_value("vdp.json", "nll", "b", "a")


def test_every_cell_of_the_page_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a result that is missing is left out, so all rows must be there."""
    sections = list(script(monkeypatch, "papers_tables.py")["papers_tables"](EXPERIMENTS / "results"))
    rows = re.findall(r"^\| (?!in the paper)(.*?) \|", "\n".join(sections), re.MULTILINE)
    listed = re.findall(r'item = "(.*?)"', (EXPERIMENTS / "papers.toml").read_text())
    assert rows == listed
    assert not re.findall(r"\{\w+ ", "\n".join(sections))
