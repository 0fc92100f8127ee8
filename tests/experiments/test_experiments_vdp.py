"""Tests of the configs of experiments, and of the experiments of the VDP++ paper."""

import json
import runpy
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from leanbayes.cli import main
from leanbayes.cli.compare import command as compare
from leanbayes.methods import parse_method
from leanbayes.networks import build

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "CamVid": (3, 240, 320)}
SHAPES |= dict.fromkeys(("cifar10", "cifar100"), (3, 32, 32))
IMAGES = 6  # test images, all in one batch
METHODS = ("deterministic", "mean-field:samples=2", "vdp", "vdp:objective=gaussian,variance=row,correlation=none")


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_valid(path: Path) -> None:
    assert callable(compare(["--config", str(path)]))
    settings = yaml.safe_load(path.read_text())
    assert all(parse_method(name) for name in settings["methods"])
    assert build(settings["model"], SHAPES[settings["data"]], 10, **settings.get("model_options", {}))


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes())


def write_mnist(root: Path) -> None:
    """Write images whose bright half gives their class."""
    random, folder = np.random.default_rng(0), root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for split, size in (("train", 48), ("t10k", IMAGES)):
        labels = (np.arange(size) % 2).astype(np.uint8)
        images = random.integers(0, 100, (size, 28, 28), dtype=np.uint8)
        images[labels == 1, :14] += 150
        write_idx(folder / f"{split}-images-idx3-ubyte", images)
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels)


def examine(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.setattr(sys, "argv", ["vdp.py", *map(str, words)])
    runpy.run_path(str(EXPERIMENTS / "vdp.py"), run_name="__main__")


def test_experiments_run_on_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path)
    runs, out, figures = tmp_path / "runs", tmp_path / "vdp.json", tmp_path / "figures"
    words = f"--data mnist --model mlp --model-options hidden=[8] --root {tmp_path} --out {runs} --seeds 2 --quiet "
    words += f"--epochs 1 --batch-size 22 --evaluation.shifts noise --evaluation.shift-examples {IMAGES} "
    words += "--no-report --device cpu"
    assert main(["compare", *METHODS, *words.split(), "--ood"]) == 0
    words = f"{runs} --root {tmp_path} --out {out} --figures {figures} --examples {IMAGES} --samples 2 --covariance 1"
    examine(monkeypatch, *words.split(), "--device", "cpu", "--no-explain")
    found, compared = json.loads(out.read_text()), json.loads((runs / "compare.json").read_text())
    assert str(tmp_path) not in out.read_text()
    assert found["seeds"] == [0, 1]
    assert len(found["results"]) == len(compared["results"]) == 8
    for result in found["results"]:
        check(result, compared["results"], json.dumps(result["method"]))
    assert len(found["summary"]["tests"]["accuracy"]["pairs"]) == 6
    assert lines(figures) == {"snr-variance": 3, "snr-accuracy": 4, "pruning": 4}
    table = capsys.readouterr().out
    assert all(name in table for name in ("deterministic", "mean-field", "objective=gaussian", "accuracy"))


def check(result: dict[str, Any], compared: list[dict[str, Any]], method: str) -> None:
    """Check that the results match those of `compare`: on clean and noisy images, and with pruned weights."""
    same = next(one for one in compared if json.dumps(one["method"]) == method and one["seed"] == result["seed"])
    assert result["scores"]["nll"] == pytest.approx(same["scores"]["nll"], rel=1e-4)
    noise = {one["level"]: one["scores"]["nll"] for one in same["shifts"] if one["family"] == "noise"}
    assert {one["snr"]: one["nll"] for one in result["noise"]} == pytest.approx(noise, rel=1e-4)
    pruning = [point["nll"] for point in same["pruning"]["magnitude"]]
    assert [point["nll"] for point in result["pruning"]] == pytest.approx(pruning, rel=1e-4)
    bayesian = result["name"] != "deterministic"
    assert all(-1 <= value <= 1 for value in result["spearman"].values())
    assert bool(result["spearman"]) == bayesian
    assert all((one.get("variance", 0) > 0) == bayesian for one in result["noise"])
    assert ("covariance" in result) == result["name"].startswith("vdp")
    if "covariance" in result:
        low, middle, high = result["covariance"]["ratio"]
        assert 0 < low <= middle <= high


def lines(folder: Path) -> dict[str, int]:
    """Return the number of lines per figure."""
    pages = {path.stem: ElementTree.parse(path) for path in folder.glob("*.svg")}
    return {name: len(page.findall(".//{*}polyline")) for name, page in pages.items()}


def test_folder_without_runs_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no run in"):
        examine(monkeypatch, tmp_path)
