"""The engine has one default for each kind of task, and temperature and learning rate for each engine, whoever asks."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.cli.options import engine_chosen
from leanbayes.core.config import change
from leanbayes.data import NAMES, load, preset, task_of
from leanbayes.training import read_record

ROOT = Path(__file__).parents[1]
# What docs/guide/tune.md says: temperature and learning rate. None is that of the optimizer.
EXPECTED: dict[tuple[str, str], tuple[float, float | None]] = {
    ("backprop", "classes"): (0.003, None),
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
    found = [
        preset(name, method=method(engine))
        for name in NAMES
        if (task_of(name) == "regression") == (task == "regression")
    ]
    assert {one["temperature"] for one in found} == {temperature}
    if engine == "ivon":
        assert {one["lr"] for one in found} == {lr}


@pytest.mark.parametrize(("kind", "own"), [(lb.SparseVD, 0.1), (lb.SBP, 1.0), (lb.VariationalDropout, 0.1)])
def test_methods_with_a_temperature_of_their_own(
    kind: type[lb.SparseVD] | type[lb.SBP] | type[lb.VariationalDropout], own: float, tmp_path: Path
) -> None:
    x, y = examples("classes")
    bnn = lb.bayesianize(torch.nn.Linear(3, 2), kind())
    losses = [
        lb.elbo_loss(bnn, x, y, num_data=40, temperature=one, generator=torch.Generator().manual_seed(1)).item()
        for one in (None, own, 0.01)
    ]
    assert losses[0] == losses[1] != losses[2]
    lb.fit(network(), kind(), TensorDataset(x, y), out=tmp_path / "run", epochs=1, batch_size=8, progress=False)
    assert read_record(tmp_path / "run")["config"]["recipe"]["temperature"] == own
    assert preset("digits", method=kind())["temperature"] == own


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


# -- the engine -------------------------------------------------------------------------------------------------------

METHODS_WITH_A_CHOICE = {"mean-field": lb.MeanField(), "pbn": lb.PBN(0.5), "ssvi": lb.SSVI(0.5)}
SETTINGS_OF_OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"lr": 1e-3},
    {"weight_decay": 0.0},
    {"scale_lr": 1e-3},
    {"temperature": 0.5},
    {"temperature_end": 0.5},
]


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a data set of each kind: its path or name."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split, label, number in itertools.product(("train", "val"), "ab", range(6)):
        path = folder / "photos" / split / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(path)
    return {"color": str(folder / "photos"), "gray": "digits", "regression": "toy"}


def engine_of_fit(data: Any, out: Path, method: lb.Method, norm: bool = True, **settings: Any) -> str:
    """Return the engine that `lb.fit` trains a network with, or without BatchNorm."""
    outputs = 10 if data.task == "classification" else 1
    hidden = nn.BatchNorm1d(4) if norm else nn.LayerNorm(4)
    network = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(data.input_shape), 4), hidden, nn.Linear(4, outputs))
    own: Any = {"epochs": 2, "batch_size": 512, "progress": False, "refresh_batchnorm": False, **settings}
    bnn = lb.fit(network, method, data, out=out, overwrite=True, **own)
    assert read_record(out)["config"]["method"]["engine"] == bnn.method.engine
    return bnn.method.engine


def engine_of_the_command_line(data: str, method: lb.Method, **settings: Any) -> str:
    """Return the engine that `leanbayes fit` trains with."""
    words = [f"--data={data}", *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())]
    return engine_chosen(method, words, {}).engine


@pytest.mark.parametrize("method", METHODS_WITH_A_CHOICE.values(), ids=METHODS_WITH_A_CHOICE)
@pytest.mark.parametrize("kind", ["color", "gray", "regression"])
def test_fit_and_the_command_line_choose_the_same_engine(
    kind: str, method: lb.Method, data_sets: dict[str, str], tmp_path: Path
) -> None:
    data = load(data_sets[kind], resize=(8, 8)) if kind == "color" else load(data_sets[kind])
    expected = "ivon" if kind == "color" else "backprop"
    assert method.engine == "auto"
    assert engine_of_fit(data, tmp_path, method) == expected
    assert engine_of_the_command_line(data_sets[kind], method) == expected
    assert engine_of_the_command_line(data_sets[kind], change(method, {"engine": "ivon"})) == "ivon"


@pytest.mark.parametrize("settings", SETTINGS_OF_OPTIMIZERS, ids=str)
def test_a_setting_of_an_optimizer_chooses_backprop(
    settings: dict[str, Any], data_sets: dict[str, str], tmp_path: Path
) -> None:
    data = load(data_sets["color"], resize=(8, 8))
    assert engine_of_fit(data, tmp_path, lb.MeanField(), **settings) == "backprop"
    assert engine_of_the_command_line(data_sets["color"], lb.MeanField(), **settings) == "backprop"


def test_networks_without_batchnorm_are_trained_by_backprop(data_sets: dict[str, str], tmp_path: Path) -> None:
    data = load(data_sets["color"], resize=(8, 8))
    assert engine_of_fit(data, tmp_path, lb.MeanField(), norm=False) == "backprop"
    assert engine_of_the_command_line(data_sets["color"], lb.MeanField(), model="vit-tiny") == "backprop"
    assert engine_of_the_command_line(data_sets["color"], lb.MeanField(), model="wrn-28-10") == "ivon"


def test_what_ivon_cannot_train_is_trained_by_backprop(data_sets: dict[str, str]) -> None:
    for method in (lb.MeanField(prior=lb.ScaleMixture()), lb.PBN(0.5, kl="mean")):
        assert engine_of_the_command_line(data_sets["color"], method) == "backprop"


@pytest.mark.parametrize("method", METHODS_WITH_A_CHOICE.values(), ids=METHODS_WITH_A_CHOICE)
def test_own_loops_bring_their_own_optimizer(method: lb.Method) -> None:
    x, y = examples("classes")
    bnn = lb.bayesianize(network(), method, data=[(x, y)] if isinstance(method, lb.PBN) else None)
    assert bnn.method == change(method, {"engine": "backprop"})
    optimizer = torch.optim.Adam(bnn.parameters())
    before = bnn.posterior.mean().clone()
    lb.elbo_loss(bnn, x, y, num_data=40).backward()
    optimizer.step()
    assert not torch.equal(bnn.posterior.mean(), before)
    with pytest.raises(lb.LeanBayesError, match="engine='ivon'"):
        lb.IVON(bnn, num_data=40)


def test_the_pages() -> None:
    text = (ROOT / "docs" / "guide" / "tune.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+).*? \| ([\d.]+) \| (.*?) \|$", text, re.MULTILINE)
    found = {(e, t): (float(hot), None if lr == "of the optimizer" else float(lr)) for e, t, hot, lr in rows}
    assert found == EXPECTED
    for words in ("1 for", "0.003 for classes", "0.1 for a regression"):
        assert words in " ".join((lb.elbo_loss.__doc__ or "").split())
        assert words in " ".join((lb.Recipe.__doc__ or "").split())
    readme = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    assert code.count('lb.MeanField(engine="ivon")') == 2
    assert "temperature=" not in code
    assert re.search(r"lb\.IVON\(bnn, num_data=len\(train_set\)\)", code)
    assert "at temperature 1: the [default]" in " ".join(readme.split())
