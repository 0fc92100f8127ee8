"""Tests of the comparison of areas by the delta method with samples."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import random_bytes, write_image

import leanbayes as lb
from leanbayes.networks import build

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SIZE = (16, 32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A model of a U-Net, beside a folder of data like CamVid."""
    for split in ("train", "val", "test"):
        for number in range(6):
            write_image(tmp_path / "CamVid" / split / f"{number}.png", random_bytes(*SIZE, 3))
            write_image(tmp_path / "CamVid" / f"{split}annot" / f"{number}.png", random_bytes(*SIZE) % 11)
    network = build("unet", (3, *SIZE), 11, seed=0, width=2)
    lb.save(lb.bayesianize(network, lb.MeanField(init_std=0.01, relative=False)).eval(), tmp_path / "unet.safetensors")
    return tmp_path / "unet.safetensors"


def record_of(monkeypatch: pytest.MonkeyPatch, file: Path, *more: Any) -> dict[str, Any]:
    words: list[Any] = [file, "--data", "CamVid", "--root", file.parent, "--resize", *SIZE, "--model", "unet"]
    words += ["--model-options", "width=2", "--limit", 5, "--batch", 3, "--repeats", 1, "--device", "cpu", *more]
    out = file.parent / "found.json"
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", ["areas.py", *map(str, words), "--out", str(out)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(EXPERIMENTS / "areas.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert str(file.parent) not in out.read_text()
    return json.loads(out.read_text())


def test_each_way_is_compared_with_many_samples(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(monkeypatch, file, "--reference-samples", 400)
    assert (record["images"], record["pixels"], record["classes"]) == (5, 512, 11)
    assert 20 < record["areas"] <= 55
    ways = record["ways"]
    assert list(ways) == ["8 samples", "30 samples", "100 samples", "independent pixels", "delta method"]
    assert ways["100 samples"]["log_error"] < ways["30 samples"]["log_error"] < ways["8 samples"]["log_error"]
    assert ways["8 samples"]["mean_error"] == pytest.approx((1 / 8) ** 0.5, rel=0.3)
    assert ways["delta method"]["log_error"] < ways["8 samples"]["log_error"]
    assert ways["delta method"]["std_ratio"] == pytest.approx(1, abs=0.1)
    assert ways["independent pixels"]["std_ratio"] < 0.3
    assert record["cost"]["images"] == 3
    assert record["cost"]["over_plain"]["plain network"] == 1
    assert "--std-factor 1.0 --limit 5" in record["command"]
    monkeypatch.syspath_prepend(EXPERIMENTS)
    tables = list(runpy.run_path(str(EXPERIMENTS / "one_pass_tables.py"))["areas_table"]([record]))
    row = ways["delta method"]
    cells = (format(row["log_correlation"], ".4f"), format(row["log_correlation_within_classes"], ".3f"))
    assert f"| unet: delta method | {cells[0]} | {cells[1]} | {row['std_ratio']:.2f} |" in tables[-1]
    assert record["command"] in tables[0]


def test_the_std_of_weights_can_be_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    multiply_std = runpy.run_path(str(EXPERIMENTS / "areas.py"))["multiply_std"]
    bnn = lb.bayesianize(torch.nn.Linear(5, 3), lb.MeanField())
    before = bnn.posterior.variance()
    multiply_std(bnn, 3.0)
    torch.testing.assert_close(bnn.posterior.variance(), 9 * before)
    with pytest.raises(lb.LeanBayesError, match="mean-field"):
        multiply_std(lb.bayesianize(torch.nn.Linear(5, 3), lb.Deterministic()), 3.0)


def test_the_reference_has_the_variances_of_areas_and_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    program = runpy.run_path(str(EXPERIMENTS / "areas.py"))
    bnn = lb.bayesianize(torch.nn.Conv2d(3, 4, 3, padding=1), lb.MeanField(init_std=0.2)).eval()
    x = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    logits = torch.stack(list(program["samples_of"](bnn, x, 40, generator())))
    assert not logits.requires_grad
    assert not torch.equal(logits[0], logits[1])
    probs = logits.double().softmax(2)
    mean, std, independent = program["reference_of"](bnn, x, 40, generator())
    torch.testing.assert_close(mean, probs.sum((3, 4)).mean(0))
    torch.testing.assert_close(std, probs.sum((3, 4)).std(0))
    torch.testing.assert_close(independent, probs.var(0).sum((2, 3)).sqrt())


def test_stds_are_compared_within_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another way knows the classes only, its stds correlate with the reference, but not within the classes."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    reference_type = runpy.run_path(str(EXPERIMENTS / "areas.py"))["Reference"]
    classes = torch.tensor([1.0, 100.0, 1.0], dtype=torch.float64)
    std = classes * torch.tensor([1.0, 2.0, 1.0, 2.0], dtype=torch.float64).unsqueeze(1)
    mean = torch.full((4, 3), 50.0, dtype=torch.float64)
    mean[:, 2] = 0.5  # left out
    reference = reference_type(mean, std)
    found = reference.compared(classes * torch.tensor([1.0, 1.0, 2.0, 2.0]).unsqueeze(1), mean + 1)
    assert found["log_correlation"] > 0.95
    assert found["log_correlation_within_classes"] == pytest.approx(0, abs=1e-6)
    assert found["mean_error"] == pytest.approx((1 / std[:, :2].square()).mean().sqrt().item())
    scaled = reference.compared(3 * std)
    assert scaled["std_ratio"] == pytest.approx(3)
    assert scaled["log_error"] == pytest.approx(torch.tensor(3.0).log().item())
    assert "mean_error" not in scaled
