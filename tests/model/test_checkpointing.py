"""Activation checkpointing: losses and gradients equal those without it, for all rules, in any loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.core import checkpointing

RULES = ("sample", "flipout", "local", "moments", "mean")
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Checkpointed(nn.Module):
    """A network that computes two parts again in the backward pass. One layer is used in both parts, and one twice."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
            self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 8))
            self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.reentrant = reentrant

    def run(self, function: Any, x: Tensor) -> Tensor:
        return function(x) if self.reentrant is None else checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.first, self.stem(x))
        x = self.run(lambda value: self.second(value) + self.second(self.first(value)), x)
        return self.head(x)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def results(method: lb.Method, reentrant: bool | None, samples: int = 1, losses: int = 1) -> list[Tensor]:
    """Return the loss and all gradients after one backward pass."""
    bnn = lb.bayesianize(Checkpointed(reentrant).double(), method, seed=0).train()
    bnn.network.eval()  # torch's own dropout is not what is tested; MCDropout has its own masks
    total = sum(lb.elbo_loss(bnn, X, Y, num_data=60, samples=samples) for _ in range(losses))
    assert isinstance(total, Tensor)
    total.backward()
    return [total.detach(), *(p.grad for p in bnn.parameters() if p.grad is not None)]


METHODS = {
    **{f"MeanField {rule}": lb.MeanField(rule=rule, init_std=0.3) for rule in RULES},
    "PBN": lb.PBN(0.3, sensitivity="random", init_std=0.3, rule="local"),
    "SSVI": lb.SSVI(0.5, init_std=0.1),
    "WeightSharing": lb.WeightSharing(8, minimum=1),
    "Deterministic": lb.Deterministic(),
    "Ensemble": lb.Ensemble(2),
    "MCDropout": lb.MCDropout(0.3),
}


@REENTRANT
@pytest.mark.parametrize(("samples", "losses"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_without_checkpointing(name: str, samples: int, losses: int, reentrant: bool) -> None:
    plain = results(METHODS[name], None, samples, losses)
    found = results(METHODS[name], reentrant, samples, losses)
    assert len(plain) == len(found) > 3
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)


@REENTRANT
@pytest.mark.parametrize("rule", RULES)
def test_a_loss_inside_drawn_has_its_own_sample(rule: str, reentrant: bool) -> None:
    """The block keeps one sample, the loss draws another, and recomputation uses that of the loss."""
    found = []
    for how in (None, reentrant):
        bnn = lb.bayesianize(Checkpointed(how).double(), lb.MeanField(rule=rule, init_std=0.3), seed=0).eval()
        with bnn.drawn():
            lb.elbo_loss(bnn, X, Y, num_data=60).backward()
        found.append([p.grad for p in bnn.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
def test_calls_inside_drawn_use_one_sample(rule: str) -> None:
    bnn = lb.bayesianize(Checkpointed(None).double(), lb.MeanField(rule=rule, init_std=0.3), seed=0).eval()
    with bnn.drawn() as call:
        assert torch.equal(bnn(X), bnn(X))
        assert torch.equal(bnn(X), call(X))
        inside = bnn(X)
    assert not torch.equal(bnn(X), inside)


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
def test_the_innermost_block_decides(rule: str) -> None:
    bnn = lb.bayesianize(Checkpointed(None).double(), lb.MeanField(rule=rule, init_std=0.3), seed=0).eval()
    with bnn.using("mean"):
        mean = bnn(X)
    with bnn.frozen(3):
        frozen = bnn(X)
    with bnn.drawn() as call:
        outer = bnn(X)
        with bnn.using("mean"):
            assert torch.equal(bnn(X), mean)
            assert torch.equal(call(X), outer)
        with bnn.frozen(3):
            assert torch.equal(bnn(X), frozen)
        with bnn.drawn() as second:
            inner = bnn(X)
            assert not torch.equal(inner, outer)
            assert torch.equal(second(X), inner)
            assert torch.equal(call(X), outer)
            assert torch.equal(bnn(X), inner)
        assert torch.equal(bnn(X), outer)
    with pytest.raises(lb.LeanBayesError, match="has ended"):
        call(X)
    assert bnn.network.get_submodule("stem").weight is None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@REENTRANT
@pytest.mark.parametrize("method", [lb.MeanField(), lb.MeanField(rule="local"), lb.Ensemble(2), lb.MCDropout(0.3)])
def test_a_checkpoint_around_the_model_needs_the_sample(method: lb.Method, reentrant: bool) -> None:
    """Without it the backward pass would draw another sample than the forward pass."""
    bnn = lb.bayesianize(Checkpointed(None).double(), method, seed=0).eval()
    x = X.clone().requires_grad_()
    output = checkpoint(bnn, x, use_reentrant=reentrant)
    with pytest.raises(lb.LeanBayesError, match=r"around the model.*_draw=bnn.next_draw\(\)"):
        output.square().sum().backward()
    draw = bnn.next_draw()
    found = []
    for output in (bnn(x, _draw=draw), checkpoint(bnn, x, _draw=draw, use_reentrant=False)):
        bnn.zero_grad()
        output.square().sum().backward()
        found.append([p.grad for p in bnn.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


@REENTRANT
def test_checkpoints_inside_checkpoints(reentrant: bool) -> None:
    class Nested(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.run(lambda value: self.run(self.first, value), self.stem(x)))

    found = []
    for how in (None, reentrant):
        bnn = lb.bayesianize(Nested(how).double(), lb.MeanField(rule="local", init_std=0.3), seed=0).eval()
        lb.elbo_loss(bnn, X, Y, num_data=60).backward()
        found.append([p.grad for p in bnn.scale_parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


@REENTRANT
def test_nothing_stays_wrapped_and_no_weight_stays_in_the_network(reentrant: bool) -> None:
    results(lb.MeanField(), reentrant)
    bnn = lb.bayesianize(Checkpointed(reentrant).double(), lb.MeanField())
    lb.elbo_loss(bnn, X, Y, num_data=60).backward()
    assert checkpointing._users == 0
    assert torch.utils.checkpoint.CheckpointFunction.apply is checkpointing._torch_apply
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is checkpointing._torch_generator
    assert bnn.network.get_submodule("stem").weight is None


@pytest.mark.parametrize("rule", ["sample", "local", "flipout"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(rule: str, reentrant: bool) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    x = {"input_ids": torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))}
    y = torch.tensor([0, 1, 0])
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        network = BertForSequenceClassification(config)
        if enabled:
            name = "activation_checkpointing_enable"  # its former name is deprecated in newer versions
            enable = getattr(network, name, None) or network.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        bnn = lb.bayesianize(network, lb.MeanField(rule=rule, init_std=0.3), seed=0).double().train()
        lb.elbo_loss(bnn, x, y, num_data=30).backward()
        found.append([p.grad for p in bnn.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)


class Convolutions(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)
            self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        plain = self.reentrant is None
        x = self.block(x) if plain else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x.mean((2, 3)))


@REENTRANT
@pytest.mark.parametrize("rule", RULES)
def test_convolutions_are_recomputed_exactly(rule: str, reentrant: bool) -> None:
    x = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for how in (None, reentrant):
        bnn = lb.bayesianize(Convolutions(how).double(), lb.MeanField(rule=rule, init_std=0.3), seed=0).train()
        lb.elbo_loss(bnn, x, Y, num_data=60).backward()
        found.append([p.grad for p in bnn.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)
