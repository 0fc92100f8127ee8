"""Monte Carlo dropout, for every kind of dropout in a network."""

from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import noise


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(x, 0.5, self.training))


class Attention(nn.Module):
    """Dropout in `F.scaled_dot_product_attention`, whose p may depend on the mode."""

    def __init__(self, follows_mode: bool) -> None:
        super().__init__()
        self.qkv, self.follows_mode, self.drop = nn.Linear(6, 18), follows_mode, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, None] * torch.ones(4, 1)).chunk(3, -1)
        p = self.drop.p if self.training or not self.follows_mode else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p)[:, 0]


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, -x, 2 * x], 1)
        return self.attention(x, x, x, need_weights=self.need_weights)[0][:, 0]


def encoder(**settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, **settings)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.TransformerEncoder(layer, 2), nn.Flatten())


DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)),
    "inplace": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5, inplace=True), nn.Linear(6, 3)),
    "dropout2d": lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(6, 3)),
    "functional": Functional,
    "attention": lambda: Attention(follows_mode=False),
    "attention_that_follows_mode": lambda: Attention(follows_mode=True),
    "multihead": lambda: SelfAttention(need_weights=False),
    "multihead_with_weights": lambda: SelfAttention(need_weights=True),
    "encoder": lambda: encoder(dropout=0.5),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DROPOUTS)
def test_the_dropout_of_the_network_makes_samples_differ(name: str, training: bool) -> None:
    """Also in evaluation mode without gradients, for which torch has a fast path without dropout."""
    model, x = DROPOUTS[name](), torch.randn(8, 6)
    bnn = lb.bayesianize(model, lb.MCDropout()).train(training)
    state = torch.get_rng_state()
    with torch.no_grad():
        outputs = [bnn(x) for _ in range(4)]
        assert len({tuple(output.flatten().tolist()) for output in outputs}) == 4
        with bnn.frozen(3):
            assert bnn(x).equal(bnn(x))
        if isinstance(model, Attention):
            model.drop.p = 0.0
        with bnn.using("mean"):
            torch.testing.assert_close(bnn(x), model.eval()(x))
    assert torch.get_rng_state().equal(state)
    assert bnn.predict(x, samples=4).mutual_information.max() > 1e-5


def test_dropped_fraction_is_the_rate() -> None:
    """For 40,000 inputs and a rate of 0.3, the fraction has a standard error of 0.0023."""
    model = nn.Sequential(nn.Dropout(0.3))
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    output = lb.bayesianize(model, lb.MCDropout())(torch.ones(200, 200))
    torch.testing.assert_close(output.unique(), torch.tensor([0.0, 1 / 0.7]))
    assert (output == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert (output == 0).float().mean(0).std().item() < 0.05  # no column has more than others


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masks_are_a_function_of_the_key(dtype: torch.dtype) -> None:
    """An input is kept if the noise of the key and layer is above the quantile of the rate."""
    model = nn.Sequential(nn.Dropout(0.3), nn.Identity())
    model.register_parameter("unused", nn.Parameter(torch.zeros(1, dtype=dtype)))
    bnn, x = lb.bayesianize(model, lb.MCDropout()), torch.randn(20, 30, dtype=dtype)
    kept = noise.normal(torch.empty(20, 30), noise.make_key(3), 1) > NormalDist().inv_cdf(0.3)
    with bnn.frozen(3):
        output = bnn(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, torch.where(kept, x / 0.7, 0.0))


def test_each_layer_has_its_own_mask() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    output = lb.bayesianize(model, lb.MCDropout())(torch.ones(100, 100))
    assert (output == 0).float().mean().item() == pytest.approx(0.75, abs=0.02)


def test_whole_channels_are_dropped() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d(0.5))
    output = lb.bayesianize(model, lb.MCDropout())(torch.ones(64, 1, 4, 4))
    dropped = (output == 0).flatten(1)
    assert (dropped.all(1) == dropped.any(1)).all()
    assert 10 < dropped.all(1).sum() < 54


def test_a_rate_of_one_drops_everything() -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Dropout(1.0), nn.Linear(6, 3)), lb.MCDropout())
    torch.testing.assert_close(bnn(torch.randn(2, 6)), bnn.network.get_parameter("inner.1.bias").expand(2, 3))


LINEAR: dict[str, tuple[Callable[[], nn.Module], float | None]] = {
    "inserted": (lambda: nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 3)), 0.4),
    "attention": (lambda: Attention(follows_mode=False), None),  # linear in the attention weights
    "multihead": (lambda: SelfAttention(need_weights=False), None),
    "multihead_with_weights": (lambda: SelfAttention(need_weights=True), None),
}


@pytest.mark.parametrize("name", LINEAR)
def test_mean_of_samples_is_the_network_without_dropout(name: str) -> None:
    """For a network that is linear in the dropped values: over 2000 samples, within 5 standard errors."""
    build, rate = LINEAR[name]
    bnn, x = lb.bayesianize(build(), lb.MCDropout(rate), likelihood=lb.Gaussian()), torch.randn(4, 6)
    pred = bnn.predict(x, samples=2000)
    error = (pred.epistemic_variance / 2000).sqrt()
    assert (error > 0).all()
    assert ((pred.mean - bnn.predict(x, rule="mean").mean).abs() < 5 * error).all()


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "lstm", "autoencoder", "conv1d"])
def test_inserted_dropout_can_be_removed(name: str, tmp_path: Path) -> None:
    model, x = CASES[name].build().eval(), CASES[name].example()
    bnn = lb.bayesianize(model, lb.MCDropout(rate=0.3))
    with torch.no_grad():
        assert not bnn(x).equal(bnn(x))
        with bnn.using("mean"):
            assert bnn(x).equal(model(x))
        plain = bnn.to_deterministic()
        assert plain.train()(x).equal(model.train()(x))
    assert not any(module._forward_pre_hooks for module in plain.modules())
    assert not bnn(x).equal(bnn(x))  # the model itself still has dropout
    lb.save(bnn, tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", CASES[name].build())
    with bnn.frozen(1), loaded.frozen(1):
        assert loaded.predict(x, samples=2).probs.equal(bnn.predict(x, samples=2).probs)


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "multihead", "encoder"])
def test_the_rate_replaces_that_of_existing_dropout(name: str) -> None:
    bnn = lb.bayesianize(DROPOUTS[name](), lb.MCDropout(rate=0.2))
    layers = [m for m in bnn.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    rates = {m.p for m in layers} | {m.dropout for m in bnn.modules() if isinstance(m, nn.MultiheadAttention)}
    assert rates == {0.2}
    assert not any(module._forward_pre_hooks for module in bnn.modules())


def test_a_network_without_dropout_needs_a_rate() -> None:
    with pytest.raises(lb.LeanBayesError, match="rate="):
        lb.bayesianize(CASES["mlp"].build(), lb.MCDropout())(CASES["mlp"].example())
    with pytest.raises(lb.LeanBayesError, match=r"add nn\.Dropout"):
        lb.bayesianize(nn.Linear(6, 3), lb.MCDropout(0.1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.drop = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1])


def test_recurrent_dropout_is_controlled_or_rejected() -> None:
    """It must not come from the global random state, which `frozen` and the rule mean do not control."""
    x = torch.randn(4, 6)
    try:
        bnn = lb.bayesianize(Recurrent(), lb.MCDropout()).train()
        bnn(x)
    except lb.LeanBayesError:
        return
    with torch.no_grad(), bnn.frozen(1):
        assert bnn(x).equal(bnn(x))
    with torch.no_grad(), bnn.using("mean"):
        assert bnn(x).equal(bnn(x))


def test_inserted_dropout_supports_keyword_inputs() -> None:
    class Keyword(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](input=self[0](input=x))

    bnn, x = lb.bayesianize(Keyword(nn.Linear(6, 6), nn.Linear(6, 3)), lb.MCDropout(0.5)), torch.randn(4, 6)
    assert not bnn(x).equal(bnn(x))
