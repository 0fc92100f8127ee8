"""Tests of the comparison of adapters of a language model."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import leanbayes as lb

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_adapters_are_compared_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    out = tmp_path / "adapters.json"
    words = ["--pretraining", 10, "--adapting", 3, "--pages", 16, "--test", 8, "--seeds", 2, "--compile"]
    words += ["--seconds", 600, "--out", out]
    monkeypatch.syspath_prepend(EXPERIMENTS)
    predict = lb.BayesianModel.predict
    asked = []

    def eager(self: Any, *args: Any, compile: bool | None = None, **settings: Any) -> Any:
        asked.append(compile)  # compiling takes too long for a test
        return predict(self, *args, **settings)

    monkeypatch.setattr(lb.BayesianModel, "predict", eager)
    monkeypatch.setattr(sys, "argv", ["language_model.py", *map(str, words)])
    runpy.run_path(str(EXPERIMENTS / "language_model.py"), run_name="__main__")
    record = json.loads(out.read_text())
    first, second = record["seeds"]
    ways = [f"mean-field{engine} {way}" for engine in ("", ", ivon") for way in ("10 samples", "one pass")]
    assert [*first] == [*second] == ["plain", *ways]
    assert all(first[name]["nll"] != second[name]["nll"] for name in first)
    assert record["settings"]["pretraining"] == 10
    assert {*record["compiled"]} == {"plain", *ways[:2]}
    assert asked.count(True) == 18
    assert str(tmp_path) not in out.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["adapters.json"]
    table = runpy.run_path(str(EXPERIMENTS / "language_tables.py"))["language_table"]
    lines = table(record).splitlines()
    assert lines[-5].startswith(f"| plain | {(first['plain']['nll'] + second['plain']['nll']) / 2:.4f} |")
    record["compiled"] = {ways[0]: 1.25, ways[1]: 2.5, "plain": "a reason"}
    cells = [line.split("|")[-2].strip() for line in table(record).splitlines()[-6:]]
    assert cells == ["---:", "", "1.2", "2.5", "", ""]
