"""The baselines: the plain network, ensembles and Monte Carlo dropout."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import CASES
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.bayesian import BayesianModel


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def members_of(bnn: BayesianModel) -> list[nn.Module]:
    return list(bnn.network.get_submodule("networks").children())


# -- the plain network ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_deterministic_is_the_network_bit_for_bit(name: str) -> None:
    model, x = CASES[name].build(), CASES[name].example()
    bnn = lb.bayesianize(model, lb.Deterministic())
    expected = model(x)
    y = torch.zeros(len(x), *expected.shape[2:], dtype=torch.long)
    loss = lb.elbo(bnn, x, y, num_data=50)
    assert loss.equal(F.cross_entropy(expected, y))
    loss.backward()
    F.cross_entropy(expected, y).backward()
    for ours, theirs in zip(bnn.network.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.equal(theirs.grad)
    assert bnn.kl().item() == 0
    pred = bnn.predict(x, keep_outputs=True)
    assert pred.samples == 1
    with torch.no_grad():
        assert pred.outputs[0].equal(model.eval()(x))
        assert bnn.eval()(x).equal(model(x))
        assert bnn.to_deterministic()(x).equal(model(x))


# -- ensembles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_members_start_apart_and_the_first_is_the_network(name: str) -> None:
    model = CASES[name].build()
    state = torch.get_rng_state()
    first, second, third = members_of(lb.bayesianize(model, lb.Ensemble(members=3)))
    assert torch.get_rng_state().equal(state)
    weights = [*model.named_parameters()]
    assert all(first.get_parameter(n).equal(p) for n, p in weights)
    matrices = [n for n, p in weights if p.dim() > 1 and n not in ("cls_token", "pos_embed", "position")]
    for one, other in ((first, second), (first, third), (second, third)):
        assert not any(one.get_parameter(n).equal(other.get_parameter(n)) for n in matrices)


def test_members_repeat_with_their_seed() -> None:
    one, same, other = (
        lb.bayesianize(CASES["cnn"].build(), lb.Ensemble(members=2, seed=seed)).state_dict() for seed in (3, 3, 4)
    )
    assert all(tensor.equal(same[name]) for name, tensor in one.items())
    assert not one["network.networks.1.0.weight"].equal(other["network.networks.1.0.weight"])


def test_frozen_parameters_are_kept_in_every_member() -> None:
    """A pretrained backbone that is not trained would stay random for ever."""
    model = CASES["cnn"].build()
    model.get_parameter("0.weight").requires_grad_(False)
    for member in members_of(lb.bayesianize(model, lb.Ensemble(members=2))):
        assert member.get_parameter("0.weight").equal(model.get_parameter("0.weight"))


@pytest.mark.parametrize("members", [1, 4])
def test_ensemble_predicts_the_average_of_its_members(members: int) -> None:
    bnn, x = lb.bayesianize(CASES["cnn"].build(), lb.Ensemble(members=members)), CASES["cnn"].example()
    pred = bnn.predict(x, keep_outputs=True)
    with torch.no_grad():
        outputs = torch.stack([member.eval()(x) for member in members_of(bnn)])
    assert pred.outputs.equal(outputs)
    assert pred.samples == members
    torch.testing.assert_close(pred.probs, outputs.softmax(-1).mean(0))
    cut = bnn.predict(x, memory_budget=1)
    torch.testing.assert_close(cut.probs, pred.probs)


def test_each_member_has_its_own_statistics() -> None:
    bnn, x = lb.bayesianize(CASES["cnn"].build(), lb.Ensemble(members=2)), CASES["cnn"].example()
    members = copy.deepcopy(members_of(bnn))
    lb.elbo(bnn, x, torch.zeros(4, dtype=torch.long), num_data=4)
    for member, alone in zip(members_of(bnn), members, strict=True):
        alone(x)
        assert member.get_buffer("1.running_mean").equal(alone.get_buffer("1.running_mean"))
    assert bnn.refresh_batchnorm([x, 2 * x]) == 4
    one, other = (member.get_buffer("1.running_mean") for member in members_of(bnn))
    assert one.abs().min() > 0
    assert not torch.isclose(one, other).any()


@pytest.mark.parametrize("members", [1, 3])
def test_no_single_network_stands_for_an_ensemble(members: int) -> None:
    bnn, x = lb.bayesianize(CASES["mlp"].build(), lb.Ensemble(members=members)), CASES["mlp"].example()
    with pytest.raises(lb.LeanBayesError, match="members"):
        bnn.predict(x, rule="mean")
    with pytest.raises(lb.LeanBayesError, match="take a member"):
        bnn.to_deterministic()
    with pytest.raises(lb.LeanBayesError, match="number of members"):
        bnn.predict(x, samples=members + 1)


def test_calls_of_an_ensemble_are_draws() -> None:
    bnn, x = lb.bayesianize(CASES["mlp"].build(), lb.Ensemble(members=3)), CASES["mlp"].example()
    with torch.no_grad():
        assert len({tuple(bnn(x).flatten().tolist()) for _ in range(20)}) == 3


# -- dropout ----------------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(x, 0.5, self.training))


class Attention(nn.Module):
    """Dropout of attention, with a p for `F.scaled_dot_product_attention` that may follow the mode."""

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
    "attention_of_a_mode": lambda: Attention(follows_mode=True),
    "multihead": lambda: SelfAttention(need_weights=False),
    "multihead_with_weights": lambda: SelfAttention(need_weights=True),
    "encoder": lambda: encoder(dropout=0.5),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DROPOUTS)
def test_the_networks_own_dropout_makes_the_draws(name: str, training: bool) -> None:
    """In evaluation mode without gradients too, where torch has a fast path without dropout."""
    model, x = DROPOUTS[name](), torch.randn(8, 6)
    bnn = lb.bayesianize(model, lb.MCDropout()).train(training)
    state = torch.get_rng_state()
    with torch.no_grad():
        outputs = [bnn(x) for _ in range(4)]
        assert len({tuple(output.flatten().tolist()) for output in outputs}) == 4
        with bnn.frozen(3):
            assert bnn(x).equal(bnn(x))
        with bnn.using("mean"):
            torch.testing.assert_close(bnn(x), model.eval()(x))
    assert torch.get_rng_state().equal(state)
    assert bnn.predict(x, samples=4).mutual_information.max() > 1e-5


def test_dropped_share_is_the_rate() -> None:
    """40,000 inputs at a rate of 0.3: the share has a standard error of 0.0023."""
    model = nn.Sequential(nn.Dropout(0.3))
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    output = lb.bayesianize(model, lb.MCDropout())(torch.ones(200, 200))
    torch.testing.assert_close(output.unique(), torch.tensor([0.0, 1 / 0.7]))
    assert (output == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert (output == 0).float().mean(0).std().item() < 0.05  # in no column more than in others


def test_channels_are_dropped_whole() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d(0.5))
    output = lb.bayesianize(model, lb.MCDropout())(torch.ones(64, 1, 4, 4))
    dropped = (output == 0).flatten(1)
    assert (dropped.all(1) == dropped.any(1)).all()
    assert 10 < dropped.all(1).sum() < 54


def test_a_rate_of_one_drops_everything() -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Dropout(1.0), nn.Linear(6, 3)), lb.MCDropout())
    torch.testing.assert_close(bnn(torch.randn(2, 6)), bnn.network.get_parameter("inner.1.bias").expand(2, 3))


def test_mean_of_draws_is_a_linear_network_without_dropout() -> None:
    model, x = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 3)), torch.randn(4, 6)
    bnn = lb.bayesianize(model, lb.MCDropout(0.4), likelihood=lb.Gaussian())
    pred = bnn.predict(x, samples=4000)
    error = (pred.epistemic_variance / 4000).sqrt()
    assert (error > 0).all()
    assert ((pred.mean - model(x)).abs() < 5 * error).all()


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "lstm", "autoencoder", "conv1d"])
def test_inserted_dropout_can_be_taken_out(name: str, tmp_path: Path) -> None:
    model, x = CASES[name].build().eval(), CASES[name].example()
    bnn = lb.bayesianize(model, lb.MCDropout(rate=0.3))
    with torch.no_grad():
        assert not bnn(x).equal(bnn(x))
        with bnn.using("mean"):
            assert bnn(x).equal(model(x))
        plain = bnn.to_deterministic()
        assert plain.train()(x).equal(model.train()(x))
    assert not any(module._forward_pre_hooks for module in plain.modules())
    assert not bnn(x).equal(bnn(x))  # the model itself keeps it
    bnn.save(tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", CASES[name].build())
    with bnn.frozen(1), loaded.frozen(1):
        assert loaded.predict(x, samples=2).probs.equal(bnn.predict(x, samples=2).probs)


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "multihead", "encoder"])
def test_the_rate_sets_that_of_existing_dropout(name: str) -> None:
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


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [lb.Deterministic(), lb.Ensemble(members=2), lb.MCDropout(0.2), lb.MeanField()])
def test_baselines_learn(method: Any) -> None:
    from sklearn.datasets import load_iris

    data = load_iris()
    x = F.layer_norm(torch.tensor(data.data, dtype=torch.float32).T, (150,)).T
    y = torch.tensor(data.target)
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), method)
    before = (bnn.predict(x).label == y).float().mean()
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.02)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        losses.append(lb.elbo(bnn, x, y, num_data=150, temperature=0.1))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    accuracy = (bnn.predict(x).label == y).float().mean()
    assert accuracy > max(0.9, before)
