"""Tests of the experiment on sources of output noise."""

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
TASK = ("--data", "digits", "--model", "mlp", "--model-options", "hidden=[24]", "--device", "cpu", "--quiet")


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> dict[str, Any]:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    return runpy.run_path(str(EXPERIMENTS / name), run_name="__main__" if words else "read")


def test_noise_of_each_layer_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file, out = tmp_path / "run", tmp_path / "small.lbc", tmp_path / "noise.json"
    assert main(["fit", "mean-field", *TASK, "--epochs", "3", "--out", str(run)]) == 0
    few = ("--samples", 200, "--examples", 40, "--device", "cpu", "--out", out)
    script(monkeypatch, "noise_sources.py", run, *few)
    record = json.loads(out.read_text())
    *layers, every = record["results"]
    assert (record["examples"], every["block"], len(layers)) == (40, "all", 2)
    assert all(row["std_ratio"] == pytest.approx(1, abs=0.15) for row in record["results"])  # an MLP has no positions
    assert all(row["log_correlation"] > 0.8 for row in record["results"])
    assert sum(row["variance"] for row in layers) == pytest.approx(every["variance"], rel=0.2)  # it is nearly linear
    assert str(tmp_path) not in out.read_text()

    lb.compress(lb.bayesianize(open_run(run, "cpu").model, lb.WeightSharing(components=16)).eval(), file)
    script(monkeypatch, "noise_sources.py", run, "--file", file, *few)
    shared = json.loads(out.read_text())
    assert "--file small.lbc" in shared["command"]
    assert shared["results"] != record["results"]
    table = script(monkeypatch, "tables.py")["noise_table"](shared)
    assert "| all | 100% |" in table
    with pytest.raises(SystemExit, match="must be at least 2"):
        script(monkeypatch, "noise_sources.py", run, "--samples", 1, "--device", "cpu")


def test_blocks_are_named_up_to_the_first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = script(monkeypatch, "noise_sources.py")["blocks"]
    names = [
        "conv1.weight",
        "layers.0.conv1.weight",
        "layers.0.shortcut.1.weight",
        "layers.11.conv1.weight",
        "fc.weight",
    ]
    assert blocks(names) == {
        "conv1": names[:1],
        "layers.0": names[1:3],
        "layers.11": names[3:4],
        "fc": names[4:],
    }
