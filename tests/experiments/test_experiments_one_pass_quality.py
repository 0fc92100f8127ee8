"""Tests of the comparison of one pass with samples and rivals."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.networks import build

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FEW = ["--counts", 4, 8, "--reference-samples", 200, "--fit-samples", 8, "--fit-inputs", 32, "--labels", 100]
SHORT = [*FEW, "--limit", 60, "--ood-limit", 50, "--ood-reference", 20, "--batch", 30, "--device", "cpu"]


def record_of(monkeypatch: pytest.MonkeyPatch, out: Path, *words: Any) -> dict[str, Any]:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", ["one_pass_quality.py", *map(str, words), "--out", str(out)])
    runpy.run_path(str(EXPERIMENTS / "one_pass_quality.py"), run_name="__main__")
    return json.loads(out.read_text())


def test_every_predictor_is_compared_with_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cnn.safetensors"
    network = build("small-cnn", (1, 8, 8), 10, seed=0)
    lb.save(lb.bayesianize(network, lb.MeanField(init_std=0.15)).eval(), file)
    words = [file, "--data", "digits", "--model", "small-cnn", *SHORT, "--repeats", 1, "--cost-batch", 8]
    record = record_of(monkeypatch, tmp_path / "found.json", *words)
    rows = record["predictors"]
    reference = rows.pop("200 samples, the reference")
    assert reference["auroc"] == {}
    corrections = ("", ", one scalar per layer (CVP)", ", corrected layers")
    assert list(rows) == [
        *("4 samples", "8 samples", "mean network", "mean network, temperature by labels"),
        *("moments", "adjoint", "adjoint, mean of moments", "adjoint, 3 margins, mean of moments"),
        "moments, factors by labels",
        *("moments" + corrections[1], f"moments{corrections[1]}, factors by labels"),
        *("moments" + corrections[2], "adjoint, mean of moments, corrected layers"),
        "adjoint, 3 margins, mean of moments, corrected layers",
        f"moments{corrections[2]}, factors by labels",
    ]
    assert {name for name, row in rows.items() if row["uses_labels"]} == {name for name in rows if "labels" in name}
    close = {name: row["test_against_reference"] for name, row in rows.items()}
    assert 0 < close["8 samples"]["kl"] < close["4 samples"]["kl"]
    assert close["moments"]["kl"] < close["mean network"]["kl"]
    assert 0.5 < close["moments, corrected layers"]["std_ratio"] < 2
    assert 0.8 < close["adjoint"]["margin_std_ratio"] < 1.25  # by an independent formula
    assert close["adjoint"]["margin_log_correlation"] > 0.5
    corrected = close["adjoint, 3 margins, mean of moments, corrected layers"]
    assert corrected["kl"] < close["moments"]["kl"]
    assert corrected["log_correlation"] > close["moments, corrected layers"]["log_correlation"]
    assert "log_correlation" not in close["mean network"]
    for row in rows.values():
        assert row["letters_against_reference"]["kl"] > 0
        assert row["letters_against_reference"]["images"] == 30  # whole batches
        assert row["auroc"]["letters"].keys() == {"max_probability", "entropy", "mutual_information"}
        assert 0 <= row["coverage_at_half_percent"] <= row["coverage_at_1_percent"] <= 1
    assert record["cost"]["over_plain"]["plain forward"] == 1
    assert record["cost"]["milliseconds"].keys() > {"moments", "moments, corrected layers", "adjoint", "8 samples"}
    assert "MLPs" in record["left_out"]["SUQ"]
    table = runpy.run_path(str(EXPERIMENTS / "one_pass_tables.py"))["quality_tables"](record)
    (line,) = (
        line for line in table.splitlines() if line.startswith("| moments | 2.") or line.startswith("| moments | 3.")
    )
    assert f"| moments | {rows['moments']['nll']:.4f} | {rows['moments']['ece']:.4f} |" in line
    assert f"{record['cost']['over_plain']['8 samples']:.1f} |" in table
    assert str(tmp_path) not in (tmp_path / "found.json").read_text()


def test_scores_are_those_of_the_public_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of one pass has the scores of `lb.evaluate`, and its KL is a sum of explicit terms."""
    file = tmp_path / "mlp.safetensors"
    bnn = lb.bayesianize(build("mlp", (1, 8, 8), 10, seed=0, hidden=[16]), lb.MeanField(init_std=0.15)).eval()
    lb.save(bnn, file)
    words = [file, "--data", "digits", "--model", "mlp", "--model-options", "hidden=[16]", *SHORT, "--no-cost"]
    record = record_of(monkeypatch, tmp_path / "found.json", *words)
    assert "cost" not in record
    from leanbayes.data import Batches, load
    from leanbayes.evaluation.full_evaluation import some

    data = load("digits")
    assert data.test is not None
    x, y = next(iter(Batches(some(data.test, 60, 0), 60, shuffle=False, normalize=data.normalize).epoch()))
    scores = lb.evaluate(bnn, [(x, y)], rule="moments")
    row = record["predictors"]["moments"]
    for name in ("nll", "ece", "accuracy", "aurc", "coverage_at_1_percent"):
        assert row[name] == pytest.approx(scores[name], abs=1e-6)
    samples = bnn.predict(x, rule="sample", samples=2000, generator=torch.Generator().manual_seed(5), keep_outputs=True)
    p, q = samples.probs.double(), bnn.predict(x, rule="moments").probs.double()
    kl = (p * (p / q).log()).sum(-1).mean().item()
    assert row["test_against_reference"]["kl"] == pytest.approx(kl, rel=0.5, abs=2e-4)  # of 200 samples
    assert samples.outputs is not None
    variance = samples.outputs.var(0)
    with bnn.using("moments"):
        ratio = (bnn(x).variance / variance).sqrt().median().item()
    assert row["test_against_reference"]["std_ratio"] == pytest.approx(ratio, rel=0.05)


def test_predictors_without_samples_are_scored_on_more_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mlp.safetensors"
    bnn = lb.bayesianize(build("mlp", (1, 8, 8), 10, seed=0, hidden=[16]), lb.MeanField(init_std=0.15)).eval()
    lb.save(bnn, file)
    words = [file, "--data", "digits", "--model", "mlp", "--model-options", "hidden=[16]", *SHORT, "--no-cost"]
    record = record_of(monkeypatch, tmp_path / "found.json", *words, "--reference-limit", 30, "--ood-limit", 0)
    assert (record["images"], record["all_images"], record["ood_images"]) == (30, 60, {})
    rows = record["predictors"]
    assert "all_images" not in rows["8 samples"]
    from leanbayes.data import Batches, load
    from leanbayes.evaluation.full_evaluation import some

    data = load("digits")
    assert data.test is not None
    x, y = next(iter(Batches(some(data.test, 60, 0), 60, shuffle=False, normalize=data.normalize).epoch()))
    for found, count in ((rows["moments"], 30), (rows["moments"]["all_images"], 60)):
        scores = lb.evaluate(bnn, [(x[:count], y[:count])], rule="moments")
        assert found["nll"] == pytest.approx(scores["nll"], abs=1e-6)
        assert found["ece"] == pytest.approx(scores["ece"], abs=1e-6)
    table = runpy.run_path(str(EXPERIMENTS / "one_pass_tables.py"))["quality_tables"](record)
    assert "| NLL, 60 images | ECE, 60 images |" in table
    assert f"| {rows['moments']['all_images']['nll']:.4f} |" in table


def test_dense_predictions_have_one_row_per_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    predictors = runpy.run_path(str(EXPERIMENTS / "one_pass_predictors.py"))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.05)).eval()
    x, y = torch.randn(2, 1, 6, 5), torch.randint(3, (2, 6, 5))
    images = predictors["Set"](bnn, [(x, y)])
    assert torch.equal(images.labels, y.flatten())
    found = predictors["by_rule"](bnn, images, "moments")
    prediction = bnn.predict(x, rule="moments")
    torch.testing.assert_close(found.probs, prediction.probs.permute(0, 2, 3, 1).reshape(-1, 3))
    torch.testing.assert_close(found.mutual_information, prediction.mutual_information.flatten())
    _, sampled = next(predictors["by_samples"](bnn, images, [400], 0))
    assert (found.margin / sampled.margin).sqrt().median().item() == pytest.approx(1, abs=0.35)
