"""Tests of the comparison of fits of the factors of one pass."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.cli.runs import open_run

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TASK = (
    "--data",
    "digits",
    "--model",
    "mlp",
    "--model-options",
    "hidden=[24]",
    "--device",
    "cpu",
    "--temperature",
    "0.01",
    "--quiet",
)


def test_each_fit_of_the_factors_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file, out = tmp_path / "run", tmp_path / "small.lbc", tmp_path / "factors.json"
    assert main(["fit", "mean-field", *TASK, "--epochs", "2", "--out", str(run)]) == 0
    trained = open_run(run, "cpu").model
    lb.compress(lb.bayesianize(trained, lb.WeightSharing(components=16)).eval(), file)
    monkeypatch.syspath_prepend(EXPERIMENTS)

    def found_by(*more: str) -> dict[str, Any]:
        words = [run, "--file", f"small={file}", "--samples", 5, "--calibration", 50, "--examples", 80, "--out", out]
        monkeypatch.setattr(sys, "argv", ["factors.py", *map(str, words), *more])
        runpy.run_path(str(EXPERIMENTS / "factors.py"), run_name="__main__")
        return json.loads(out.read_text())

    record = found_by()
    assert record["examples"] == 80
    assert list(record["results"]) == ["mean-field", "small"]
    for found in record["results"].values():
        factors = ("none", "by mean and std", "by probabilities", "by labels")
        none, moments, probabilities, labels = (found[f"one pass, factors {name}"] for name in factors)
        assert none["factors"] == [1, 1]
        assert moments["factors"] != probabilities["factors"] != labels["factors"]
        assert none["nll"] != moments["nll"] != probabilities["nll"] != labels["nll"]
        assert found["5 samples"]["accuracy"] > 0.3
    assert "small=small.lbc" in record["command"]
    assert str(tmp_path) not in out.read_text()
    alone = found_by("--files-only", "--ways", "probabilities")
    by = "one pass, factors by probabilities"
    assert alone["results"] == {"small": {by: record["results"]["small"][by]}}
