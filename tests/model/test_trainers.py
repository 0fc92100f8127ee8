"""What trainers of other libraries need of a model: the arguments of its forward, and parameter groups."""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.second(self.first(features).relu())


@pytest.mark.parametrize(
    "method", [lb.MeanField(), lb.Ensemble(2), lb.MCDropout(0.1), lb.Deterministic(), lb.SSVI(0.5)]
)
def test_forward_has_the_signature_of_the_network(method: lb.Method) -> None:
    bnn = lb.bayesianize(Named(), method)
    for model in (bnn, copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert list(inspect.signature(model.forward).parameters) == ["features", "mask"]
        assert model(torch.randn(5, 3)).shape == (5, 2)
        assert model(features=torch.randn(5, 3)).shape == (5, 2)


def test_a_copy_runs_its_own_network() -> None:
    bnn = lb.bayesianize(Named(), lb.MeanField())
    twin = copy.deepcopy(bnn)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    with bnn.using("mean"), twin.using("mean"):
        x = torch.randn(5, 3)
        assert (twin(x) == 0).all()
        assert (bnn(x) != 0).all()


def test_the_trainer_of_transformers_keeps_the_columns_of_the_network(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    class Elbo(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return lb.elbo_loss(model, {"features": inputs["features"]}, inputs["labels"], num_data=32)

    rows = [{"features": torch.randn(3), "labels": torch.tensor(number % 2)} for number in range(32)]
    bnn = lb.bayesianize(Named(), lb.MeanField())
    before = bnn.posterior.mean().clone()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, report_to=[], use_cpu=True, save_strategy="no", label_names=["labels"],
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Elbo(bnn, arguments, train_dataset=rows).train()
    assert not torch.equal(bnn.posterior.mean(), before)


class Experts(nn.Module):
    """A mixture of experts, with one stack of matrices for all of them, as Mixtral has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 2, 4))
        self.layer_scale = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        up = torch.einsum("bi,eoi->beo", x, self.gate_up_proj).relu()
        return torch.einsum("bei,eoi->bo", up, self.down_proj)


def test_stacks_of_matrices_are_bayesian_and_the_report_says_so() -> None:
    bnn = lb.bayesianize(nn.Sequential(Experts(), nn.Linear(4, 2)), lb.MeanField(prior=lb.Normal("fan_in")))
    assert [slot.name for slot in bnn.layout] == ["0.gate_up_proj", "0.down_proj", "1.weight"]
    assert [slot.fan_in for slot in bnn.layout] == [4, 8, 4]
    assert "weight of Experts (gate_up_proj)" in str(bnn.report)
    x = torch.randn(5, 4)
    assert not torch.equal(bnn(x), bnn(x))


def test_an_output_without_logits_names_the_tensors_that_it_has() -> None:
    class Forecast:
        def __init__(self, values: Tensor) -> None:
            self.prediction_outputs = values

    class Forecaster(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return Forecast(super().forward(input))

    bnn = lb.bayesianize(nn.Sequential(Forecaster(3, 2)), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="tensor to score, such as `prediction_outputs`"):
        bnn.predict(torch.randn(4, 3))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fitted_model_keeps_its_signature(precision: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.arange(32) % 2)
    bnn = lb.fit(Named(), lb.MeanField(), data, epochs=1, precision=precision, device="cpu", progress=False)
    assert list(inspect.signature(bnn.forward).parameters) == ["features", "mask"]
    assert bnn(torch.randn(5, 3)).dtype == torch.float32
