"""The README's example runs as it is printed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import leanbayes as lb


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    train_set = torch.utils.data.TensorDataset(x, y)
    names = {
        "model": model,
        "train_set": train_set,
        "train_loader": torch.utils.data.DataLoader(train_set, batch_size=32),
        "x_test": x,
    }
    exec(example.group(1), names)
    assert "2 of 4 parameters are Bayesian" in capsys.readouterr().out
    assert isinstance(names["bnn"], lb.BayesianModel)
    assert (tmp_path / "model.safetensors").is_file()
