"""Tests of the experiment on corrections of layers."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_each_way_is_compared_with_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "layers.json"
    words = [
        "--cases",
        "CNN, mean-field",
        "--epochs",
        2,
        "--truth",
        40,
        "--samples",
        8,
        "--inputs",
        40,
        "--examples",
        50,
    ]
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", ["layer_corrections.py", *map(str, words), "--out", str(out)])
    runpy.run_path(str(EXPERIMENTS / "layer_corrections.py"), run_name="__main__")
    record = json.loads(out.read_text())
    rows = {row["way"]: row for row in record["results"]["CNN, mean-field"]}
    assert rows["40 samples"]["test"]["kl"] == pytest.approx(0, abs=1e-12)  # it is the truth
    ways = ("as it is", "two factors", "layers, one value per layer", "layers", "layers and two factors")
    passes = [rows[f"one pass, {way}"] for way in ways]
    assert len({row["nll"] for row in passes}) == len(ways)
    assert all(0 < row["letters"]["kl"] < 1 for row in passes)
    assert passes[3]["test"]["std_ratio"] == pytest.approx(1, abs=0.25)
    assert record["command"].startswith("python experiments/layer_corrections.py --cases 'CNN, mean-field' --epochs 2")
    assert str(tmp_path) not in out.read_text()


def test_one_value_per_layer_is_the_mean_of_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    one_value_per_layer = runpy.run_path(str(EXPERIMENTS / "layer_corrections.py"))["one_value_per_layer"]
    found = torch.tensor([[1.1, 1.1, 1.0], [0.1, 0.3, 0.0], [0.5, 2.0, 1.0]])  # the last channel has no variance
    averaged = one_value_per_layer({"0.weight": found})["0.weight"]
    torch.testing.assert_close(averaged, torch.tensor([[1.1, 1.1, 1.0], [0.2, 0.2, 0.0], [1.0, 1.0, 1.0]]))
