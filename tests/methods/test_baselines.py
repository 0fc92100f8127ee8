"""The plain network and ensembles, and that every baseline learns. Dropout is in test_mc_dropout.py."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import nn

import leanbayes as lb
from leanbayes.model.bayesian import BayesianModel


def members_of(bnn: BayesianModel) -> list[nn.Module]:
    return list(bnn.network.get_submodule("networks").children())


# -- the plain network ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_deterministic_is_the_network_bit_for_bit(name: str) -> None:
    model, x = CASES[name].build(), CASES[name].example()
    bnn = lb.bayesianize(model, lb.Deterministic())
    expected = model(x)
    y = torch.zeros(len(x), *expected.shape[2:], dtype=torch.long)
    loss = lb.elbo_loss(bnn, x, y, num_data=50)
    assert loss.equal(F.cross_entropy(expected, y))
    loss.backward()
    F.cross_entropy(expected, y).backward()
    for ours, theirs in zip(bnn.network.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.equal(theirs.grad)
    assert bnn.kl().item() == 0
    pred = bnn.predict(x, keep_outputs=True)
    assert pred.samples == 1
    assert pred.outputs is not None
    with torch.no_grad():
        assert pred.outputs[0].equal(model.eval()(x))
        assert bnn.eval()(x).equal(model(x))
        assert bnn.to_deterministic()(x).equal(model(x))


# -- ensembles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_members_start_differently_and_the_first_is_the_network(name: str) -> None:
    model = CASES[name].build()
    state = torch.get_rng_state()
    first, second, third = members_of(lb.bayesianize(model, lb.Ensemble(members=3)))
    assert torch.get_rng_state().equal(state)
    weights = [*model.named_parameters()]
    assert all(first.get_parameter(n).equal(p) for n, p in weights)
    matrices = [n for n, p in weights if p.dim() > 1 and n not in ("cls_token", "pos_embed", "position")]
    for one, other in ((first, second), (first, third), (second, third)):
        assert not any(one.get_parameter(n).equal(other.get_parameter(n)) for n in matrices)


def test_members_are_reproducible_from_the_seed() -> None:
    one, same, other = (
        lb.bayesianize(CASES["cnn"].build(), lb.Ensemble(members=2, seed=seed), seed=0).state_dict()
        for seed in (3, 3, 4)
    )
    assert all(tensor.equal(same[name]) for name, tensor in one.items())
    assert not one["network.networks.1.0.weight"].equal(other["network.networks.1.0.weight"])


def test_frozen_parameters_are_kept_in_every_member() -> None:
    """A frozen backbone is not trained, so a random one would stay random."""
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
    assert pred.outputs is not None
    assert pred.outputs.equal(outputs)
    assert pred.samples == members
    torch.testing.assert_close(pred.probs, outputs.softmax(-1).mean(0))
    cut = bnn.predict(x, memory_budget=1)
    torch.testing.assert_close(cut.probs, pred.probs)


def test_each_member_has_its_own_batchnorm_statistics() -> None:
    bnn, x = lb.bayesianize(CASES["cnn"].build(), lb.Ensemble(members=2)), CASES["cnn"].example()
    members = copy.deepcopy(members_of(bnn))
    lb.elbo_loss(bnn, x, torch.zeros(4, dtype=torch.long), num_data=4)
    for member, alone in zip(members_of(bnn), members, strict=True):
        alone(x)
        assert member.get_buffer("1.running_mean").equal(alone.get_buffer("1.running_mean"))
    assert bnn.refresh_batchnorm([x, 2 * x]) == 4
    for member in members_of(bnn):
        with torch.no_grad():
            means = [member.get_submodule("0")(batch).mean((0, 2, 3)) for batch in (x, 2 * x)]
        torch.testing.assert_close(member.get_buffer("1.running_mean"), torch.stack(means).mean(0))


@pytest.mark.parametrize("members", [1, 3])
def test_an_ensemble_is_not_a_single_network(members: int) -> None:
    bnn, x = lb.bayesianize(CASES["mlp"].build(), lb.Ensemble(members=members)), CASES["mlp"].example()
    with pytest.raises(lb.LeanBayesError, match="members"):
        bnn.predict(x, rule="mean")
    with pytest.raises(lb.LeanBayesError, match="use a member"):
        bnn.to_deterministic()
    with pytest.raises(lb.LeanBayesError, match="number of members"):
        bnn.predict(x, samples=members + 1)


def test_each_call_of_an_ensemble_runs_one_member() -> None:
    bnn, x = lb.bayesianize(CASES["mlp"].build(), lb.Ensemble(members=3)), CASES["mlp"].example()
    with torch.no_grad():
        assert len({tuple(bnn(x).flatten().tolist()) for _ in range(20)}) == 3


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [lb.Deterministic(), lb.Ensemble(members=2), lb.MCDropout(0.2), lb.MeanField()])
def test_baselines_learn(method: Any) -> None:
    from sklearn.datasets import load_iris

    data = load_iris()
    x = F.layer_norm(torch.tensor(data.data, dtype=torch.float32).T, (150,)).T
    y = torch.tensor(data.target)
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), method)
    before = (bnn.predict(x).label == y).float().mean().item()
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.02)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        losses.append(lb.elbo_loss(bnn, x, y, num_data=150, temperature=0.1))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    accuracy = (bnn.predict(x).label == y).float().mean().item()
    assert accuracy > max(0.9, before)
