"""Tests of the experiments on PBN: rates, dial, layer shares, severities, and tables."""

import json
import math
import runpy
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from leanbayes.cli import main
from leanbayes.cli.runs import open_run

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
METHODS = (
    "deterministic",
    "pbn:rate=0.2,samples=2",
    "pbn:rate=0.2,sensitivity=random,samples=2",
    "mean-field:samples=2",
)
NAMES = ("deterministic", "PBN 20 %", "mean-field", "PBN 20 %, random")  # by rate, and what is for comparison last


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> dict[str, Any]:
    """Run a script with these arguments, or import it if there are none."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    return runpy.run_path(str(EXPERIMENTS / name), run_name="__main__" if words else "read")


def texts(path: Path) -> list[str]:
    """Return the texts of an SVG file."""
    return [element.text or "" for element in ElementTree.parse(path).findall(".//{*}text")]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "runs"
    flags = [
        "--data",
        "digits",
        "--model",
        "mlp",
        "--epochs",
        "2",
        "--ood",
        "letters",
        "--evaluation.shift-examples",
        "20",
    ]
    flags += ["--evaluation.shifts", "rotation", "corruptions", "--evaluation.no-pruning"]
    assert main(["compare", *METHODS, *flags, "--out", str(out)]) == 0
    return out


def test_rates_are_compared_and_plotted(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rates.json"
    script(monkeypatch, "pbn.py", "rates", compared, "--out", out, "--figures", tmp_path)
    found = json.loads(out.read_text())
    written = {run["name"]: run for run in json.loads((compared / "compare.json").read_text())["results"]}
    assert tuple(one["name"] for one in found["results"]) == NAMES
    assert [one["rate"] for one in found["results"]] == [0.0, 0.2, 1.0, 0.2]
    for one, name in zip(found["results"], (METHODS[0], METHODS[1], METHODS[3], METHODS[2]), strict=True):
        assert one["scores"]["nll"] == pytest.approx(written[name]["scores"]["nll"])
        assert one["ood"]["letters"]["auroc"] == pytest.approx(
            written[name]["ood"]["letters"]["by"]["entropy"]["auroc"]
        )
        assert sum(one["entropy"]) == written[name]["scores"]["examples"]
    partial = found["results"][1]["first_layer"]
    bnn = open_run(next(compared.glob("pbn-rate=0.2-samples=2-*"))).model
    std = bnn.layout.split(bnn.posterior.variance().sqrt())[0].view(-1, 8, 8)
    inside = [(i, j) for i in range(2, 6) for j in range(2, 6)]
    middle = sum(int((std[:, i, j] > 0).sum()) for i, j in inside)
    assert partial["in_the_middle"] == pytest.approx(middle / int((std > 0).sum()))
    assert partial["random"] == pytest.approx((std > 0).double().mean().item())
    assert "runs --seed 0" in found["command"]
    assert str(tmp_path) not in out.read_text()
    assert {"the most sensitive weights", "random weights", "deterministic"} <= set(texts(tmp_path / "rates.svg"))
    assert "letters" in texts(tmp_path / "entropy-letters.svg")
    with Image.open(tmp_path / "first-layer.png") as image:
        assert image.width > 3 * 8 * 6  # three models have random weights


def test_dial_ends_at_the_model_itself(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "dial.json"
    script(monkeypatch, "pbn.py", "dial", compared, "--samples", 2, "--examples", 50, "--out", out)
    found = {one["name"]: one["points"] for one in json.loads(out.read_text())["results"]}
    assert set(found) == set(NAMES[1:])  # the plain network has no dial
    for name, points in found.items():
        by = {way: {p["rate"]: p["nll"] for p in points if p["by"] == way} for way in ("σ", "σ and data")}
        own = 1.0 if name == "mean-field" else 0.2
        assert max(by["σ"]) == own
        assert by["σ"][own] == by["σ and data"][own]  # where nothing is left out, no ranking counts
        assert by["σ"][0.0] == by["σ and data"][0.0]
        assert by["σ"][0.0] != by["σ"][own]


def test_layer_shares_add_up_to_the_rate(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "shares.json"
    script(monkeypatch, "pbn.py", "shares", compared, "--out", out, "--figures", tmp_path)
    for one in json.loads(out.read_text())["results"]:
        weights, bayesian = (sum(layer[key] for layer in one["layers"]) for key in ("weights", "bayesian"))
        assert bayesian == math.floor(one["rate"] * weights)
        assert one["predict_flops"]["one_sample"] == 2 * (64 * 100 + 100 * 100 + 100 * 10)
        assert one["predict_flops"]["5_samples"] == 5 * one["predict_flops"]["one_sample"]
    assert "PBN 20 %" in texts(tmp_path / "shares-digits.svg")


def test_severities_are_means_over_corruptions(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "severities.json"
    script(monkeypatch, "pbn.py", "severities", compared / "compare.json", "--out", out, "--figures", tmp_path)
    found = json.loads(out.read_text())
    shifts = json.loads((compared / "compare.json").read_text())["results"][0]["shifts"]
    levels = found["results"][0]["levels"]
    assert [one["severity"] for one in levels] == [0, 1, 2, 3, 4, 5]
    worst = [one["scores"]["nll"] for one in shifts if one["family"] == "corruptions" and one["level"] == 5]
    assert levels[-1]["nll"] == pytest.approx(statistics.fmean(worst))
    assert levels[0]["ece"] == next(one["scores"]["ece"] for one in shifts if one["family"] == "none")
    assert set(NAMES) <= set(texts(tmp_path / "severities.svg"))


def test_comparison_without_corruptions_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "compare.json"
    run = {"method": {"type": "Deterministic"}, "scores": {"nll": 1.0}, "shifts": [], "seed": 0}
    path.write_text(json.dumps({"recipe": {"seed": 0}, "results": [run]}))
    with pytest.raises(SystemExit, match="evaluated on corruptions"):
        script(monkeypatch, "pbn.py", "severities", path)


def test_toy_points_lie_in_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    pbn = script(monkeypatch, "pbn.py")
    data = pbn["load"]("toy")
    x, y = pbn["toy_points"](data, 4.0, 6.0, 0)
    x, y = x * data.input_std[0] + data.input_mean[0], y * data.target_std[0] + data.target_mean[0]
    assert 4 - 1e-5 <= x.abs().min() <= 4.01
    assert 5.99 <= x.abs().max() <= 6 + 1e-5
    assert abs((x > 0).float().mean().item() - 0.5) < 0.05
    assert (y - x**3).std().item() == pytest.approx(3, rel=0.1)


def test_heat_map_brightness_follows_values(monkeypatch: pytest.MonkeyPatch) -> None:
    heat = script(monkeypatch, "panels.py")["heat"]
    image = heat("σ", torch.tensor([[0.0, 1.0], [2.0, 4.0]]), 4.0, times=3)
    gray = image.image.convert("L")
    assert gray.size == (6, 6)
    assert gray.getpixel((0, 0)) < gray.getpixel((5, 0)) < gray.getpixel((0, 5)) < gray.getpixel((5, 5))


def test_tables_contain_the_results(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script(monkeypatch, "pbn_tables.py")
    assert list(tables["partial_tables"](tmp_path)) == []
    out = tmp_path / "cifar10.json"
    script(monkeypatch, "pbn.py", "severities", compared / "compare.json", "--out", out)
    record = json.loads(out.read_text())
    lines = tables["severity_table"](record).splitlines()
    first = next(line for line in lines if line.startswith("| deterministic"))
    assert first.split(" | ")[1] == f"{record['results'][0]['levels'][0]['nll']:.3f}"
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


@pytest.mark.parametrize(("rate", "expected"), [(None, (5, 15)), (0.0, (1, 3)), (0.01, (1.01, 7.07)), (1.0, (2, 14))])
def test_paper_costs_match_its_first_table(
    rate: float | None, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script(monkeypatch, "pbn_tables.py")["paper_costs"](rate) == pytest.approx(expected)
