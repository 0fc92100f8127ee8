"""The code in the docs runs as it is printed."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.data import Normalize
from leanbayes.evaluation import METRICS, evaluate
from leanbayes.likelihoods.decisions.abstention import least_examples
from leanbayes.methods import METHODS
from leanbayes.report.glossary import GLOSSARY

ROOT = Path(__file__).parents[1]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.fixture
def names() -> dict[str, object]:
    """Return what the code on a page uses without defining it."""
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
        "test_loader": DataLoader(train_set, batch_size=40),
        "held_out": DataLoader(train_set, batch_size=40),
        "test_set": TensorDataset(*train_set[:30]),
    }


def test_the_readme_runs(
    names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in python_blocks(ROOT / "README.md"):
        exec(block, names)
    printed = capsys.readouterr().out
    assert "2 of 4 parameters are Bayesian" in printed
    assert re.search("^(answer|ask a person: .*)$", printed, re.MULTILINE)
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert isinstance(names["bnn"], lb.BayesianModel)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_page_on_training_runs(names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit, two_data_sets, own_loop = python_blocks(ROOT / "docs" / "training.md")
    exec(fit.replace("epochs=30", "epochs=1"), names)
    assert (tmp_path / "runs" / "mine" / "model.safetensors").is_file()
    exec(
        two_data_sets.replace("epochs=30", "epochs=1"),
        names | {"first_set": names["train_set"], "second_set": names["test_set"]},
    )
    exec(own_loop, names)
    assert isinstance(names["training"], lb.Training)
    assert names["training"].step == names["training"].steps == 6


FEW_STEPS = {  # and few weights
    "csgmcmc": lb.CyclicalSGMCMC(cycles=1, per_cycle=2, exploration=0.0),
    "aeb": lb.AEB(snapshots=2, until=0.5),
    "mbnn": lb.MBNN(snapshots=2),
    "lp-bnn": lb.LPBNN(latent=4),
    "ssvi": lb.SSVI(0.5, interval=10),
    "rigl": lb.RigL(0.5, interval=10),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_in_the_loop_of_the_page(name: str, names: dict[str, object]) -> None:
    *_, own_loop = python_blocks(ROOT / "docs" / "training.md")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU()
        names |= {"model": nn.Sequential(*hidden, nn.Linear(16, 2)), "method": FEW_STEPS.get(name, METHODS[name])}
    names["epochs"] = 20
    exec(own_loop, names)
    bnn, training = names["bnn"], names["training"]
    assert isinstance(bnn, lb.BayesianModel)
    assert isinstance(training, lb.Training)
    assert training.step == training.steps
    x, y = names["train_set"][:]  # type: ignore[index]
    assert type(bnn.method) is type(METHODS[name])
    assert (bnn.predict(x).label == y).float().mean() > 0.8


def test_the_page_on_sparse_networks_runs(
    names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit, from_trained = python_blocks(ROOT / "docs" / "sparse.md")
    exec(fit.replace("epochs=30", "epochs=1"), names)
    assert (tmp_path / "model.safetensors").is_file()
    exec(from_trained, names)
    counts = [(names[name].posterior.mean() != 0).sum().item() for name in ("bnn", "sparse")]  # type: ignore[attr-defined]
    assert counts == [round(0.05 * 112), round(0.3 * 112)]


def test_the_page_on_baselines_runs(names: dict[str, object]) -> None:
    for block in python_blocks(ROOT / "docs" / "baselines.md"):
        exec(block.replace("epochs=30", "epochs=2"), names)
        assert isinstance(names["bnn"], lb.BayesianModel)


def test_the_page_on_methods_after_training_runs(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    methods = []
    for block in python_blocks(ROOT / "docs" / "after_training.md"):
        exec(block.replace("epochs=30", "epochs=30, progress=False"), names)
        methods.append(type(names["bnn"].method).__name__)
    assert methods == ["Laplace", "StdSearch", "SWAG", "CyclicalSGMCMC", "VBLL"]


def test_the_page_on_engines_runs(names: dict[str, Any]) -> None:
    names["loader"] = names["train_loader"]
    (block,) = python_blocks(ROOT / "docs" / "engines.md")
    exec(block, names)
    assert names["bnn"].optimized_by == "ivon"
    assert torch.isfinite(names["loss"])


def test_the_page_on_one_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph_only(graph: Any, inputs: Any, **options: Any) -> Any:  # inductor takes a minute
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graph_only))
    names: dict[str, Any] = {}
    first, compiled, adjoint, areas = python_blocks(ROOT / "docs" / "one_pass.md")
    exec(first, names)
    eager = names["bnn"].predict(names["x"], rule="moments", compile=False)
    exec(compiled.splitlines()[0], names)
    torch.testing.assert_close(names["pred"].probs, eager.probs, rtol=1e-3, atol=1e-5)
    exec(compiled.splitlines()[1], names)
    assert names["pred"].probs.equal(eager.probs)
    exec(adjoint, names)
    assert (names["pred"].margin_std > 0).all()
    exec(areas, names)
    assert (names["area"].stddev > 0).all()


def test_the_page_on_partial_networks_runs(names: dict[str, Any]) -> None:
    names |= {"trained": names["model"], "batches": names["train_loader"]}
    fit, restrict = python_blocks(ROOT / "docs" / "partial.md")
    exec(fit.replace("epochs=30", "epochs=2").replace("epochs=10", "epochs=1"), names)
    exec(restrict, names)
    counts = [names[name].posterior.random_weights for name in ("bnn", "fewer")]
    assert counts == [int(0.05 * 112), int(0.01 * 112)]


def test_every_page_with_code_has_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")):  # test_guide.py has the other folders
        folder = "" if page.parent == ROOT else '"docs" / '
        assert not python_blocks(page) or re.search(rf'blocks?.*ROOT / {folder}"{page.name}"', tests), page.name


def test_the_page_on_decisions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    block, acquiring = python_blocks(ROOT / "docs" / "decisions.md")
    exec(block, names)
    assert lb.load(tmp_path / "model.safetensors", names["network"]).policy == names["policy"]
    assert names["decision"].sets.any(-1).all()
    exec(acquiring, names)
    assert len(set(names["places"].tolist())) == 10
    text = " ".join((ROOT / "docs" / "decisions.md").read_text().split())
    needed = [least_examples(risk, 0.05) for risk in (0.01, 0.05)]
    assert f"a risk of 1 % needs {needed[0]} held-out examples, and 5 % needs {needed[1]}" in text


def test_the_page_on_metrics_runs(names: dict[str, Any]) -> None:
    names["bnn"] = bnn = lb.bayesianize(names["model"], lb.MeanField())
    names["evaluate"] = evaluate
    usual, own = python_blocks(ROOT / "docs" / "metrics.md")
    exec(usual, names)
    usual_scores = names["scores"]
    assert isinstance(usual_scores, dict)
    exec(own, names)
    scores = names["scores"]
    assert isinstance(scores, dict)
    # Both use the samples of seed 0, so by hand:
    x = names["x_test"]
    probs = bnn.predict(x, generator=torch.Generator().manual_seed(0)).probs
    assert scores["margin"] == pytest.approx((2 * probs.amax(1) - 1).mean().item(), rel=1e-5)
    assert scores["median_entropy"] == pytest.approx(torch.special.entr(probs).sum(1).median().item(), rel=1e-5)
    assert scores.keys() - usual_scores.keys() == {"margin", "spherical", "median_entropy"}
    assert (0.5**0.5) * 0.1 < scores["spherical"] <= 1


def test_the_page_on_reports_runs(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, corrupted = python_blocks(ROOT / "docs" / "report.md")
    monkeypatch.chdir(tmp_path)
    for name, method in (("bnn", lb.MeanField()), ("plain", lb.Deterministic())):
        names[name] = lb.bayesianize(names["model"], method)
    exec(own, names)
    page = (tmp_path / "report.html").read_text()
    assert "custom training loop" in page
    assert "mine, custom network" in page
    (tmp_path / "CIFAR-10-C").mkdir()
    random = np.random.default_rng(0)
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", random.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8))
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", random.integers(0, 10, 20, dtype=np.uint8))
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path))
    network = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    names |= {
        "bnn": lb.bayesianize(network, lb.MeanField()),
        "data": SimpleNamespace(normalize=Normalize((0.5,), (0.25,))),
    }
    exec(corrupted, names)
    assert 0 <= names["scores"]["accuracy"] <= 1


def test_the_page_on_metrics_has_the_words_of_the_report() -> None:
    text = " ".join((ROOT / "docs" / "metrics.md").read_text().split())
    for term, meaning in GLOSSARY.items():
        assert f"**{term}**: {meaning}" in text, term
    for metric in (metric for metrics in METRICS.values() for metric in metrics):
        assert f"`{metric.name}`" in text, metric.name
