"""The code in the docs and the examples run as they are printed."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb

ROOT = Path(__file__).parent.parent


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.fixture
def names() -> dict[str, object]:
    """What a reader is taken to have."""
    x = torch.randn(96, 5)
    y = (x[:, 0] > 0).long()
    train_set = TensorDataset(x, y)
    return {
        "lb": lb,
        "torch": torch,
        "model": nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)),
        "method": lb.MeanField(),
        "epochs": 2,
        "train_set": train_set,
        "train_loader": DataLoader(train_set, batch_size=32),
        "x_test": x,
    }


def test_the_readme_runs(
    names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in python_blocks(ROOT / "README.md"):
        exec(block, names)
    assert "2 of 4 parameters are Bayesian" in capsys.readouterr().out
    assert isinstance(names["bnn"], lb.BayesianModel)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_page_on_training_runs(names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit, own_loop = python_blocks(ROOT / "docs" / "training.md")
    exec(fit.replace("epochs=30", "epochs=1"), names)
    assert (tmp_path / "runs" / "mine" / "model.safetensors").is_file()
    exec(own_loop, names)
    assert isinstance(names["training"], lb.Training)
    assert names["training"].step == names["training"].steps == 6


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), "--epochs", "1"])
    runpy.run_path(str(example), run_name="__main__")
    assert "digits are right" in capsys.readouterr().out
