"""Arguments and settings of a wrong type raise one sentence, and NumPy numbers do where Python numbers do."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes import data, networks
from leanbayes.core.arguments import checked
from leanbayes.evaluation import EvaluationSettings, costs_of, evaluate_fully, moment_accuracy
from leanbayes.training import Recipe, read_record

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
BATCHES = [(X, Y)]
NETWORK = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
BNN = lb.bayesianize(NETWORK, lb.MeanField(), seed=0)
FITTED = lb.bayesianize(NETWORK, lb.Laplace(probes=2), data=BATCHES)
DATA = data.from_datasets(TensorDataset(X, Y), test=TensorDataset(X, Y))
WRONG: list[Any] = [
    "5%", "", object(), 1j, b"ab", [None], [[]], {"a": 1}, torch.tensor([1.0, 2.0]), np.array([1, 2]), nn.ReLU(),
    int, 10**30, True, -1, float("nan"), "a\x1b[31m\nb", None, torch.tensor(2), torch.Generator(), 0.3, set(),
]  # fmt: skip


def predict(x: Any = X, **settings: Any) -> Any:
    return BNN.predict(x, **settings)


def ivon(**settings: Any) -> Any:
    return lb.IVON(lb.bayesianize(NETWORK, lb.MeanField(engine="ivon")), **settings)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bayesianize": (lb.bayesianize, {"model": NETWORK, "method": lb.MeanField(), "data": None, "select": None,
                                     "likelihood": None, "seed": 0}),
    "predict": (predict, {"samples": 2, "rule": None, "generator": None, "memory_budget": None, "keep_outputs": False}),
    "elbo_loss": (partial(lb.elbo_loss, x=X), {"model": BNN, "y": Y, "num_data": 12, "likelihood": None,
                                 "temperature": 1.0, "samples": 1, "over": "accumulate",
                                 "generator": None, "check": None}),
    "IVON": (ivon, {"num_data": 12, "lr": 1.0, "temperature": 1.0, "betas": (0.9, 0.99), "hess_init": None,
                    "weight_decay": 0.0, "scale_lr": 0.01, "keep_std": False}),
    "calibrate": (lb.calibrate, {"bnn": BNN, "batches": BATCHES, "to": "samples", "samples": 2, "generator": None,
                                 "layers": False, "layer_inputs": 4, "factors": True}),
    "choose_prior": (lb.choose_prior, {"bnn": FITTED, "batches": BATCHES, "samples": 2, "seed": 0}),
    "delta_method": (partial(lb.delta_method, x=X, function=lambda y: y[:, 0]), {"bnn": BNN, "max_passes": 2}),
    "restrict": (lb.restrict, {"bnn": BNN, "rate": 0.5, "data": BATCHES}),
    "sensitivity": (lb.sensitivity, {"model": NETWORK, "batches": BATCHES, "kind": "fisher", "likelihood": None,
                                     "select": None, "seed": 0}),
    "evaluate": (lb.evaluate, {"bnn": BNN, "batches": BATCHES, "samples": 2, "rule": None, "seed": 0,
                               "target_scale": (), "details": False, "metrics": ()}),
    "decide": (lb.decide.fit, {"bnn": BNN, "batches": BATCHES, "false_alarms": 0.5, "coverage": None, "samples": 2,
                               "score": None, "ood_score": None, "sets": "adaptive", "rule": None, "seed": 0}),
    "acquire": (lb.decide.acquire, {"bnn": BNN, "pool": [X], "number": 2, "score": None, "samples": 2, "rule": None,
                                    "seed": 0}),
    "member": (lb.bayesianize(NETWORK, lb.Ensemble(2)).member, {"number": 1}),
    "save": (lb.save, {"bnn": BNN, "path": "none.safetensors"}),
    "load": (lb.load, {"path": "none", "model": NETWORK}),
    "push_to_hub": (lb.push_to_hub, {"bnn": BNN, "repo_id": "//", "card": None, "private": None, "token": None,
                                     "commit_message": "first"}),
    "from_pretrained": (lb.from_pretrained, {"repo": "//", "model": NETWORK, "revision": None, "token": None}),
    "compress": (lb.compress, {"bnn": BNN, "path": "none.lbc", "target_size": None, "max_nll_increase": None,
                               "data": None, "samples": None, "seed": 0, "values": "fp16", "rest": "fp16"}),
    "export": (lb.export_onnx, {"bnn": None, "path": "none.onnx", "example": X, "rule": "moments", "check": True}),
    "moment_accuracy": (partial(moment_accuracy, x=X), {"bnn": BNN, "samples": 2, "rule": "moments",
                                                        "generator": None}),
    "costs_of": (costs_of, {"bnn": None, "x": X, "samples": 2, "rule": None, "repeats": 1}),
    "evaluate_fully": (evaluate_fully, {"bnn": None, "data": DATA, "settings": None, "ood": None, "workers": 0}),
    "fit": (lb.fit, {"model": None, "method": lb.MeanField(), "data": DATA, "recipe": None, "out": None,
                     "likelihood": None, "select": None, "overwrite": False, "progress": False, "notes": None}),
    "from_datasets": (data.from_datasets, {"train": TensorDataset(X, Y), "validation": None, "test": None, "task": None,
                                           "validation_share": 0.1, "seed": 0, "classes": (), "outputs": 3}),
    "Batches": (data.Batches, {"dataset": TensorDataset(X, Y), "batch_size": 4, "device": "cpu", "seed": 0,
                               "shuffle": True, "parts": 1, "mine": None, "workers": 0, "dtype": None}),
    "build": (networks.build, {"name": "mlp", "input_shape": (4,), "outputs": 3, "seed": 0, "hidden": (4,)}),
    "resnet18": (networks.resnet18, {"num_classes": 3, "width": 2, "channels": 1, "stem": "small"}),
    "read_record": (read_record, {"folder": "none"}),
    "Gaussian": (lb.Gaussian, {"std": 1.0, "learned": False}),
    "Categorical": (lb.Categorical, {"ignore_index": -100, "class_dim": 1}),
}  # fmt: skip
SETTINGS = (
    lb.PBN, lb.SSVI, lb.VDP, lb.Deterministic, lb.Ensemble, lb.MCDropout, lb.MeanField, lb.RigL, lb.WeightSharing,
    lb.BatchEnsemble, lb.RankOne, lb.ABNN, lb.SNGP, lb.LPBNN, lb.PackedEnsemble, lb.MIMO, lb.Laplace, lb.StdSearch,
    lb.SWA, lb.AEB, lb.MBNN, lb.SparseVD, lb.SBP, lb.SWAG, lb.CyclicalSGMCMC, lb.VBLL, lb.Normal, lb.ScaleMixture,
    lb.VariationalDropout, Recipe, EvaluationSettings,
)  # fmt: skip


def check_sentence(call: Callable[[], Any], expected_failure: bool = False) -> None:
    try:
        call()
    except lb.LeanBayesError as error:
        message = str(error)
        assert message.isprintable()
        assert message.endswith((".", "?"))
        assert len(message) < 400
    else:
        assert not expected_failure


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_raise_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function, arguments = CALLS[name]
    for argument in arguments:
        for value in WRONG:
            check_sentence(partial(function, **{**arguments, argument: value}))
    assert BNN.rule == "sample"  # nothing is left of an argument that was refused
    BNN.predict(X, samples=1)


@pytest.mark.parametrize("cls", SETTINGS)
def test_wrong_settings_raise_one_sentence(cls: Any) -> None:
    for field in dataclasses.fields(cls):
        for value in WRONG:
            check_sentence(partial(cls, **{field.name: value}))
        check_sentence(partial(cls, **{field.name: {"a": object()}}), expected_failure=field.name != "prior")


def test_messages_say_what_is_expected() -> None:
    cases: dict[str, Callable[[], Any]] = {
        "density='5%' must be a number.": lambda: lb.SSVI(density="5%"),  # type: ignore[arg-type]
        "samples='3' must be a whole number or None.": lambda: BNN.predict(X, samples="3"),  # type: ignore[arg-type]
        "model='mlp' must be a torch.nn.Module.": lambda: lb.bayesianize("mlp", lb.MeanField()),  # type: ignore[call-overload]
        "bnn must be a Bayesian model, which lb.bayesianize makes of a network, not Sequential.": lambda: lb.save(
            NETWORK,  # type: ignore[arg-type]
            "a",
        ),
        "method must be an instance such as lb.MeanField(), not the class MeanField.": lambda: lb.bayesianize(
            NETWORK,
            lb.MeanField,  # type: ignore[call-overload]
        ),
        "'' is not the name of a file: give one such as 'runs/model'.": lambda: lb.save(BNN, ""),
    }
    for message, call in cases.items():
        with pytest.raises(lb.LeanBayesError) as caught:
            call()
        assert str(caught.value) == message


def test_numpy_numbers_do_where_python_numbers_do() -> None:
    three: Any = np.int64(3)
    half: Any = np.float32(0.5)
    twelve: Any = np.int64(12)
    assert BNN.predict(X, samples=three).samples == 3
    assert lb.bayesianize(NETWORK, lb.MeanField(samples=three), seed=three).method.samples == 3
    assert lb.elbo_loss(BNN, X, Y, num_data=twelve, samples=three, temperature=half).isfinite()
    lb.calibrate(lb.bayesianize(NETWORK, lb.MeanField()), BATCHES, to="samples", samples=three)
    assert lb.evaluate(BNN, BATCHES, samples=three, seed=three)["accuracy"] >= 0
    assert networks.build("mlp", (three + 1,), three, seed=three, hidden=np.array([5]))(X).shape == (12, 3)
    assert data.from_datasets(TensorDataset(X, Y), seed=three, validation_share=half).input_shape == (4,)
    assert Recipe(epochs=three).epochs == 3
    assert data.Normalize(half, (half,)) == data.Normalize((0.5,), (0.5,))
    assert ivon(num_data=twelve, lr=half).param_groups[0]["lr"] == 0.5


def test_annotations_decide() -> None:
    @checked("other", size="a number of bytes")
    def function(
        size: int, words: list[str] | None = None, *rest: int, kind: Literal["a", "b"] = "a", other: int = 0
    ) -> Any:
        return size, words, kind, other

    assert function(np.int64(2), ["a"], "not checked", other="own check") == (2, ["a"], "a", "own check")  # type: ignore[arg-type]
    assert function(2, kind="c")[2] == "c"  # type: ignore[arg-type]  # a function lists its choices itself
    for value in ("1 GB", True, 2.0, 10**30):
        with pytest.raises(lb.LeanBayesError, match="must be a number of bytes"):
            function(value)  # type: ignore[arg-type]
    for words in ("a", [1], {"a": 1}):
        with pytest.raises(lb.LeanBayesError, match="must be a list of strings or None"):
            function(1, words)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing"):
        function()  # type: ignore[call-arg]
    assert "size" in inspect.signature(function).parameters
