"""Whatever a network does, a rule that cannot follow it names the operation and what to do instead."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Between(nn.Module):
    """Two linear layers with any function between them."""

    def __init__(self, function: Callable[[Tensor], Any], after: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.function, self.after = function, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.last(self.function(self.first(x))))


def model(function: Callable[[Tensor], Any] = torch.relu, after: Callable[[Tensor], Any] = lambda y: y) -> Any:
    torch.manual_seed(0)
    network = Between(function, after)
    return lb.bayesianize(network, lb.MeanField(init_std=0.05), likelihood=lb.Categorical()).eval()


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = lb.UnsupportedOperation) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).endswith(".")


def in_place(y: Tensor) -> Tensor:
    y = torch.relu(y)
    y *= 2
    return y


PLAIN_ONLY: dict[str, Callable[[Tensor], Any]] = {
    "torch.vmap(lambda row: row * 2)(y)": lambda y: torch.vmap(lambda row: row * 2)(y),
    "torch.func.grad(torch.sum)(y)": lambda y: torch.func.grad(torch.sum)(y),
    "torch.func.vjp(torch.tanh, y)": lambda y: torch.func.vjp(torch.tanh, y)[0],
    "torch.as_tensor(y)": lambda y: torch.as_tensor(y),
    "torch.tensor([y[0, 0]])": lambda y: y * torch.tensor([y[0, 0]]),
    "torch.Tensor(y)": lambda y: torch.Tensor(y),
}


@pytest.mark.parametrize("code", PLAIN_ONLY)
def test_functions_that_take_plain_tensors_only_are_named(code: str, tmp_path: Path) -> None:
    bnn = model(PLAIN_ONLY[code])
    words = (f"The operation {code} takes plain tensors only", 'bnn.using("sample")')
    refused(lambda: bnn.predict(X, rule="moments"), *words)
    refused(lambda: lb.export_onnx(bnn, tmp_path / "model.onnx", X), *words)
    assert bnn.predict(X, 2).probs.shape == (4, 3)  # the suggested rule works


@pytest.mark.parametrize("rule", ["local", "flipout", "adjoint", "moments"])
def test_functions_that_torch_does_not_document_have_a_name(rule: str) -> None:
    class Experts(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch._grouped_mm(input, self.weight)

    bnn = lb.bayesianize(Experts(6, 3), lb.MeanField()).eval()
    refused(lambda: bnn.predict(X, rule=rule), f"'{rule}' has no formula for _grouped_mm", 'bnn.using("sample")')


def test_own_errors_of_a_network_stay_as_they_are() -> None:
    def fails(y: Tensor) -> Tensor:
        raise TypeError("an own error about a weight")

    with pytest.raises(TypeError, match="an own error"):
        model(fails).predict(X, rule="moments")


NO_GRADIENT: dict[str, Callable[[Tensor], Any]] = {
    "torch.heaviside": lambda y: torch.heaviside(y, torch.ones(1)),
    "torch.igamma": lambda y: torch.special.gammainc(y.abs() + 1, y.abs()),
    "torch.zeta": lambda y: torch.special.zeta(y.abs() + 2, y.abs() + 1),
    "torch.add with out=": lambda y: torch.add(y, 1, out=torch.empty_like(y)),
    "a change in place of the result of Relu": in_place,
    "torch.Tensor.numpy": lambda y: torch.from_numpy(y.numpy()),
    "copy.deepcopy of an activation": lambda y: copy.deepcopy(y),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_operations_without_gradient_are_named_by_the_adjoint_rule(name: str) -> None:
    bnn = model(NO_GRADIENT[name])
    refused(
        lambda: bnn.predict(X, rule="adjoint"), f"'adjoint' needs a gradient that torch does not have, that of {name}"
    )
    assert bnn.predict(X, 2).probs.shape == (4, 3)


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], tuple[str, ...]]] = {
    "scalar": (lambda y: y.sum(), ("shape ()", "(batch, classes)")),
    "one number per example": (lambda y: y.sum(1), ("shape (4,)", "dimension 1")),
    "no classes": (lambda y: y[:, :0], ("shape (4, 0)", "class_dim")),
    "labels": (lambda y: y.argmax(1), ("int64", "Categorical", "logits")),
    "bool": (lambda y: y > 0, ("bool", "logits")),
}


@pytest.mark.parametrize("rule", ["sample", "moments", "adjoint"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_no_logits_are_refused(name: str, rule: str) -> None:
    after, words = OUTPUTS[name]
    refused(lambda: model(after=after).predict(X, rule=rule), *words, kind=lb.LeanBayesError)


def test_outputs_without_classes_are_not_exported(tmp_path: Path) -> None:
    bnn = model(after=lambda y: y[:, :0])
    refused(lambda: lb.export_onnx(bnn, tmp_path / "model.onnx", X), "shape (4, 0)", kind=lb.LeanBayesError)


@pytest.mark.parametrize("rule", ["sample", "moments", "adjoint"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_inputs_of_another_dtype_are_explained(rule: str, dtype: torch.dtype) -> None:
    words = (f"inputs are {str(dtype).removeprefix('torch.')}", "weights are float32", "x.to(torch.float32)")
    refused(lambda: model().predict(X.to(dtype), rule=rule), *words, kind=lb.LeanBayesError)


def test_images_of_another_dtype_are_explained() -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), lb.MeanField()).eval()
    refused(lambda: bnn.predict(torch.zeros(2, 3, 4, 4).double()), "float64", "float32", kind=lb.LeanBayesError)


def test_a_wrong_dtype_inside_of_a_network_stays_an_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        model(lambda y: y.double()).predict(X)


UNREADABLE = {"sparse_coo": X.to_sparse(), "meta": torch.empty(4, 6, device="meta")}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_inputs_that_cannot_be_read_are_refused(kind: str, tmp_path: Path) -> None:
    x = UNREADABLE[kind]
    refused(lambda: model().predict(x), kind, "pass", kind=lb.LeanBayesError)
    refused(lambda: lb.calibrate(model(), [x], layers=True), kind, "pass", kind=lb.LeanBayesError)
    refused(lambda: lb.export_onnx(model(), tmp_path / "model.onnx", x), kind, "pass", kind=lb.LeanBayesError)


def test_calibration_skips_empty_batches() -> None:
    bnn, other = model(), model()
    lb.calibrate(bnn, [X[:0], X, X[:0]], layers=True, samples=4, generator=torch.Generator().manual_seed(0))
    lb.calibrate(other, [X], layers=True, samples=4, generator=torch.Generator().manual_seed(0))
    assert bnn.moment_scale == other.moment_scale
    for name, correction in bnn.moment_layers.items():
        assert torch.equal(correction, other.moment_layers[name])
    refused(lambda: lb.calibrate(model(), [X[:0]], layers=True), "pass some inputs", kind=lb.LeanBayesError)


@pytest.mark.parametrize("rule", ["sample", "moments", "adjoint"])
def test_views_and_single_examples_work(rule: str) -> None:
    bnn = model(F.gelu)
    for x in (X[:1], X.T.contiguous().T, X[:1].expand(4, 6), X.flip(0)):
        with bnn.frozen(0):
            found, expected = bnn.predict(x, 2, rule=rule), bnn.predict(x.contiguous().clone(), 2, rule=rule)
        torch.testing.assert_close(found.probs, expected.probs)
