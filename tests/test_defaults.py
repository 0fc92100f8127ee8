"""Temperature and learning rate have one default for each engine and kind of task, whoever asks."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.data import NAMES, preset, task_of
from leanbayes.training import read_record

ROOT = Path(__file__).parents[1]
# What docs/guide/tune.md says: temperature and learning rate. None is that of the optimizer.
EXPECTED: dict[tuple[str, str], tuple[float, float | None]] = {
    ("backprop", "classes"): (0.01, None),
    ("backprop", "regression"): (0.1, None),
    ("ivon", "classes"): (1.0, 1.0),
    ("ivon", "regression"): (1.0, 0.1),
}
CASES = pytest.mark.parametrize(("engine", "task"), EXPECTED)


def method(engine: Any) -> lb.MeanField:
    return lb.MeanField(engine=engine)


def examples(task: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    return x, (x[:, 0] > 0).long() if task == "classes" else x[:, :1].clone()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 2)


@CASES
def test_elbo_loss_and_ivon(engine: str, task: str) -> None:
    x, y = examples(task)
    likelihood: Any = lb.Categorical() if task == "classes" else lb.Gaussian(std=0.5)
    y = y if task == "classes" else y.expand(-1, 2)
    bnn = lb.bayesianize(network(), method(engine), likelihood=likelihood)
    temperature, lr = EXPECTED[engine, task]
    if engine == "ivon":
        optimizer = lb.IVON(bnn, num_data=40)
        assert {group["lr"] for group in optimizer.param_groups} == {lr}
        assert optimizer.param_groups[0]["loss_weight"] == 40 / temperature
    losses = [
        lb.elbo_loss(bnn, x, y, num_data=40, temperature=one, generator=torch.Generator().manual_seed(1)).item()
        for one in (None, temperature, 0.5)
    ]
    assert losses[0] == losses[1] != losses[2]


@CASES
def test_fit(engine: str, task: str, tmp_path: Path) -> None:
    x, y = examples(task)
    y = y if task == "classes" else y.expand(-1, 2)
    temperature, lr = EXPECTED[engine, task]
    found = []
    for name, settings in {"default": {}, "given": {"temperature": temperature, "lr": lr or 1e-3}}.items():
        own: Any = {"epochs": 1, "batch_size": 8, "progress": False, **settings}
        bnn = lb.fit(network(), method(engine), TensorDataset(x, y), out=tmp_path / name, **own)
        recorded = read_record(tmp_path / name)
        assert recorded["config"]["recipe"]["temperature"] == recorded["history"][-1]["temperature"] == temperature
        found.append(bnn.posterior.mean())
    assert torch.equal(*found)


@CASES
def test_the_command_line(engine: str, task: str) -> None:
    temperature, lr = EXPECTED[engine, task]
    found = [preset(name, engine=engine) for name in NAMES if (task_of(name) == "regression") == (task == "regression")]
    assert {one["temperature"] for one in found} == {temperature}
    if engine == "ivon":
        assert {one["lr"] for one in found} == {lr}


@CASES
def test_the_estimators(engine: str, task: str) -> None:
    x, y = (tensor.numpy() for tensor in examples(task))
    kind: Any = lb.sklearn.BayesianClassifier if task == "classes" else lb.sklearn.BayesianRegressor
    found = []
    for temperature in (None, EXPECTED[engine, task][0], 0.5):
        model = kind(hidden=(4,), method=method(engine), steps=30, temperature=temperature).fit(x, y.ravel())
        found.append(model.predict_proba(x) if task == "classes" else model.predict(x))
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_the_pages() -> None:
    text = (ROOT / "docs" / "guide" / "tune.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+).*? \| ([\d.]+) \| (.*?) \|$", text, re.MULTILINE)
    found = {(e, t): (float(hot), None if lr == "of the optimizer" else float(lr)) for e, t, hot, lr in rows}
    assert found == EXPECTED
    for words in ("1 for", "0.01 for classes", "0.1 for a regression"):
        assert words in " ".join((lb.elbo_loss.__doc__ or "").split())
        assert words in " ".join((lb.Recipe.__doc__ or "").split())
    readme = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    assert code.count('lb.MeanField(engine="ivon")') == 2
    assert "temperature=" not in code
    assert re.search(r"lb\.IVON\(bnn, num_data=len\(train_set\)\)", code)
    assert "at temperature 1: the [default]" in " ".join(readme.split())
