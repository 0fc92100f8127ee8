"""Functions compiled with torch.jit.script, and methods of a network other than its call."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def product(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    DOUBLED: Any = torch.jit.script(doubled)
    PRODUCT: Any = torch.jit.script(product)
    ACTIVATIONS: Any = torch.jit.script(nn.Sequential(nn.ReLU(), nn.Tanh()))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        return DOUBLED(self.layer(x))


class OfWeights(Scaled):
    def forward(self, x: Tensor) -> Any:
        return PRODUCT(x, self.layer.weight)


class OfModules(Scaled):
    def forward(self, x: Tensor) -> Any:
        return ACTIVATIONS(self.layer(x))


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(
    ("kind", "rule", "name"),
    [
        (Scaled, "moments", "doubled"),
        (OfWeights, "moments", "product"),
        (OfWeights, "local", "product"),
        (OfWeights, "flipout", "product"),
        (OfModules, "moments", "forward"),
    ],
)
def test_scripted_functions_are_refused_in_one_sentence(kind: Any, rule: str, name: str, in_block: bool) -> None:
    bnn, x = lb.bayesianize(kind(), lb.MeanField()), torch.randn(2, 3)
    message = rf"^The torch.jit.script function {name} takes plain tensors only .*PYTORCH_JIT=0.*\.$"
    block: Any = bnn.drawn() if in_block else nullcontext(bnn)
    with bnn.using(rule), pytest.raises(lb.UnsupportedOperation, match=message), block as call:
        call(x)
    with bnn.using("sample"):
        assert bnn(x).shape == (2, 4)


def test_other_errors_of_scripted_functions_stay() -> None:
    bnn = lb.bayesianize(Scaled(), lb.MeanField())
    bnn.network.get_submodule("layer").forward = lambda x: "text"
    with bnn.using("moments"), pytest.raises(RuntimeError, match="found type 'str'") as caught:
        bnn(torch.randn(2, 3))
    assert not isinstance(caught.value, lb.LeanBayesError)


class Language(nn.Module):
    """Generates tokens in a method of its own, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.conv, self.head = nn.Embedding(5, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.conv(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))

    def generate(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)


def test_methods_of_a_network_need_samples() -> None:
    bnn, tokens = lb.bayesianize(Language(), lb.MeanField()).eval(), torch.tensor([[1, 2, 3], [0, 4, 1]])
    network: Any = bnn.network
    with torch.no_grad(), bnn.using("moments"), bnn.drawn(), pytest.raises(lb.UnsupportedOperation, match="generate"):
        network.generate(tokens)
    with torch.no_grad(), bnn.using("moments"), bnn.drawn() as call:
        assert isinstance(call(tokens), lb.Moments)
    with torch.no_grad(), bnn.using("sample"), bnn.drawn():
        assert network.generate(tokens).shape == (2, 4)


def test_an_empty_vector_joins_everything() -> None:
    """The caches of language models start with one."""
    x: Any = lb.Moments(torch.randn(2, 3, 4), torch.rand(2, 3, 4))
    joined: Any = torch.cat([torch.tensor([]), x], -2)
    assert torch.equal(joined.loc, x.loc)
    assert torch.equal(joined.variance, x.variance)
