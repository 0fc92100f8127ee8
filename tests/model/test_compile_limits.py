"""What torch.compile and torch.func can do with a loss, and what they cannot, as docs/design.md states it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import leanbayes as lb

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def model(**settings: Any) -> lb.BayesianModel:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return lb.bayesianize(network, lb.MeanField(**settings), seed=0)


def compiled(samples: int, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a seed as compiled, and as it is."""
    bnn = model()
    loss = lambda: lb.elbo_loss(bnn, X, Y, num_data=100, samples=samples, check=False)  # noqa: E731
    with bnn.frozen(3):
        return torch.compile(loss, backend="aot_eager", **settings)(), loss()


def test_a_loss_of_one_sample_is_one_graph() -> None:
    torch.testing.assert_close(*compiled(1, fullgraph=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, at the break
def test_a_loss_of_several_samples_breaks_the_graph() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(2, fullgraph=True)
    torch.testing.assert_close(*compiled(2))


def test_the_loss_of_a_language_model_is_one_graph() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    bnn = lb.bayesianize(transformers.GPT2LMHeadModel(config).eval(), lb.MeanField(), seed=0)
    ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(0))
    loss = lambda: lb.elbo_loss(bnn, {"input_ids": ids}, ids, num_data=100, check=False)  # noqa: E731
    with bnn.frozen(3):
        torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(), loss())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_blocks_are_compiled_after_bayesianize_because_copies_are_not_compiled() -> None:
    ran = 0

    def backend(graph: Any, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            nonlocal ran
            ran += 1
            return graph(*inputs)

        return run

    torch.manual_seed(0)
    network = nn.Sequential(Block(), Block(), Block())
    bnn = lb.bayesianize(network, lb.MeanField(), seed=0)
    with bnn.frozen(3):
        expected = bnn(X)
        for block in bnn.network.children():
            block.compile(backend=backend)
        torch.testing.assert_close(bnn(X), expected)
    assert ran == 3
    for block in network:
        block.compile(backend=backend)
    lb.bayesianize(network, lb.MeanField(), seed=0)(X)
    assert ran == 3


def test_transforms_take_the_gradient_of_one_sample_only() -> None:
    bnn = model()
    parameters = {name: value.detach() for name, value in bnn.named_parameters()}

    class Loss(nn.Module):
        def __init__(self, samples: int) -> None:
            super().__init__()
            self.bnn, self.samples = bnn, samples

        def forward(self) -> torch.Tensor:
            return lb.elbo_loss(self.bnn, X, Y, num_data=100, samples=self.samples, check=False)

    def slopes(samples: int) -> Any:
        named = {f"bnn.{name}": value for name, value in parameters.items()}
        with bnn.frozen(3):
            return grad(lambda values: functional_call(Loss(samples), values, ()))(named)

    found = slopes(1)
    with bnn.frozen(3):
        lb.elbo_loss(bnn, X, Y, num_data=100).backward()
    for name, value in bnn.named_parameters():
        torch.testing.assert_close(found[f"bnn.{name}"], value.grad)
    with pytest.raises(RuntimeError):
        slopes(2)
