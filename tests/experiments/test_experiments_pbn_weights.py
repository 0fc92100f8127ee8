"""Tests of the comparison of weight distributions: against SciPy, and on trained runs."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from leanbayes.cli import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TASK = ("--data", "digits", "--model", "mlp", "--model-options", "hidden=[16]", "--device", "cpu", "--quiet")


def script(monkeypatch: pytest.MonkeyPatch, *words: object) -> dict[str, Any]:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", ["pbn_weights.py", *map(str, words)])
    return runpy.run_path(str(EXPERIMENTS / "pbn_weights.py"), run_name="__main__" if words else "read")


def test_distribution_functions_are_those_of_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    rng = np.random.default_rng(0)
    mean, std = rng.normal(size=50), np.where(rng.random(50) < 0.4, 0.0, 0.3)
    at = np.linspace(-3, 3, 101)
    one = module["Weights"](torch.tensor(mean), torch.tensor(std))
    parts = [np.heaviside(at - m, 1.0) if s == 0 else stats.norm.cdf(at, m, s) for m, s in zip(mean, std, strict=True)]
    np.testing.assert_allclose(one.cdf(torch.tensor(at)), np.mean(parts, 0), atol=1e-12)
    a, b = rng.normal(size=400), rng.normal(0.2, 1.5, size=300)
    both = [module["Weights"](torch.tensor(part), torch.zeros(len(part))) for part in (a, b)]
    points = torch.tensor(np.sort(np.concatenate([a, b])))
    assert module["statistic"](*both, points) == pytest.approx(stats.ks_2samp(a, b).statistic, abs=1e-12)


def test_runs_are_compared_with_the_ensemble_of_their_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, out = tmp_path / "runs", tmp_path / "weights.json"
    methods = (
        "deterministic",
        "ensemble:members=2",
        "pbn:rate=0.3,pretrain=0",
        "pbn:rate=0.3,pretrain=0,sensitivity=random,init_std=2.0",
    )
    flags = ["--epochs", "1", "--no-report", "--evaluation.shifts", "labels", "--evaluation.no-pruning", "--ood"]
    assert main(["compare", *methods, *TASK, *flags, "--out", str(runs)]) == 0
    script(monkeypatch, runs, "--out", out, "--figures", tmp_path)
    record = json.loads(out.read_text())
    found = {row["name"]: row["statistic"] for row in record["results"]}
    assert list(found) == ["one member against the others", "deterministic", "PBN 30 %", "PBN 30 %, random"]
    assert all(0 < value < 1 for value in found.values())
    assert found["PBN 30 %, random"] > found["PBN 30 %"] + 0.05  # its σ is twice the std of the weights
    assert (tmp_path / "weights.svg").read_text().startswith("<svg")
    assert str(tmp_path) not in out.read_text()
