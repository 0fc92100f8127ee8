"""SWA and SWAG against the mean and covariance of the weights that a training passes through, by NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network_cases import seeded
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.posteriors import LowRankPosterior
from leanbayes.training import Recipe

NETWORK = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))
X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
DATA = TensorDataset(X, Y)


def collected(method: lb.SWAG, steps: int = 12) -> tuple[lb.BayesianModel, np.ndarray]:
    """Train in an own loop, and return the weights after each step."""
    bnn = lb.bayesianize(NETWORK(), method)
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.5)
    training = lb.Training(bnn, steps=steps, num_data=96, optimizers=[optimizer])
    bnn.method.start(training)
    weights = []
    for training.step in range(steps):
        part = slice(8 * training.step, 8 * training.step + 8)
        loss = lb.elbo_loss(bnn, X[part], Y[part], num_data=96)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights.append(bnn.posterior.mean().detach().double().numpy().copy())
        bnn.method.after_step(training)
    return bnn, np.array(weights)


def expected(weights: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance by the formulas of the paper (Maddox et al. 2019, section 3.3)."""
    mean = weights.mean(0)
    diagonal = (weights**2).mean(0) - mean**2
    if not rank:
        return mean, np.diag(diagonal)
    running = np.cumsum(weights, 0) / np.arange(1, len(weights) + 1)[:, None]
    differences = (weights - running)[-rank:]
    return mean, 0.5 * (np.diag(diagonal) + differences.T @ differences / (len(differences) - 1))


@pytest.mark.parametrize(("rank", "snapshots"), [(0, 12), (3, 12), (20, 12), (20, 4)])
def test_the_gaussian_is_that_of_the_weights(rank: int, snapshots: int) -> None:
    bnn, weights = collected(lb.SWAG(rank=rank, snapshots=snapshots))
    weights = weights[12 // snapshots - 1 :: 12 // snapshots]
    assert len(weights) == snapshots
    mean, covariance = expected(weights, rank)
    posterior = bnn.posterior
    np.testing.assert_allclose(posterior.mean().detach(), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(posterior.variance().detach(), covariance.diagonal(), rtol=2e-3, atol=1e-9)
    keys = (torch.tensor([seed, 0]) for seed in range(20_000))
    samples = torch.stack([posterior.sample(key).detach() for key in keys]).double().numpy()
    error = np.abs(np.cov(samples.T, bias=True) - covariance).max()
    assert error < 0.05 * covariance.max()
    assert np.abs(samples.mean(0) - mean).max() < 0.05 * covariance.max() ** 0.5
    off = ~np.eye(len(mean), dtype=bool)
    if rank:  # the test can fail: the weights are correlated
        assert np.abs(covariance[off]).max() > 0.1 * covariance.max()


def test_the_scale_is_a_factor_of_the_covariance() -> None:
    one, two = (collected(lb.SWAG(scale=scale))[0].posterior.variance() for scale in (1.0, 4.0))
    torch.testing.assert_close(4 * one, two)


def test_before_the_end_it_is_the_current_network() -> None:
    bnn = lb.bayesianize(NETWORK().eval(), lb.SWAG())
    torch.testing.assert_close(bnn(X), NETWORK().eval()(X))
    assert bnn.posterior.random_weights == sum(p.numel() for p in NETWORK().parameters())
    assert "0 collected, not finished" in repr(bnn.posterior)


def test_each_sample_has_the_statistics_of_its_own_weights(tmp_path: Path) -> None:
    """Against a loop over plain networks, each of which sees all batches."""
    bnn, _ = collected(lb.SWAG(samples=5, snapshots=6, rank=4))
    bnn.eval()
    shared = bnn.predict(X, keep_outputs=True).outputs
    batches = X.split(32)
    assert bnn.refresh_batchnorm(batches) == 6  # one norm for each sample, and one for the mean and the training
    found = bnn.predict(X, keep_outputs=True).outputs
    assert found is not None
    assert shared is not None
    assert len(found) == 5
    for number, outputs in enumerate([*found, bnn.predict(X, rule="mean", keep_outputs=True).outputs]):
        network = NETWORK().eval()
        first, norm, *_ = network.children()
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        key = torch.tensor([number, 0])
        weights = bnn.posterior.mean() if number == 5 else bnn.posterior.sample(key)
        nn.utils.vector_to_parameters(weights.detach(), network.parameters())
        hidden = [first(part) for part in batches]
        with torch.no_grad():
            norm.running_mean.copy_(torch.stack([h.mean(0) for h in hidden]).mean(0))
            norm.running_var.copy_(torch.stack([h.var(0) for h in hidden]).mean(0))
            expected = network(X)
        torch.testing.assert_close(outputs.view_as(expected), expected, rtol=1e-4, atol=1e-5)
        plain = bnn.to_deterministic() if number == 5 else bnn.member(number)
        torch.testing.assert_close(plain.eval()(X), expected, rtol=1e-4, atol=1e-5)
    assert (found - shared).abs().max() > 1e-3  # the test can fail: the statistics matter
    lb.save(bnn, tmp_path / "swag.safetensors")
    again = lb.load(tmp_path / "swag.safetensors", NETWORK())
    assert torch.equal(again.predict(X).probs, bnn.predict(X).probs)
    three = bnn.predict(X, 3, generator=torch.Generator().manual_seed(1)).probs
    torch.testing.assert_close(three, found[:3].softmax(2).mean(0))
    with pytest.raises(lb.LeanBayesError, match="from 1 to 5"):
        bnn.predict(X, 6)


def test_networks_without_statistics_have_any_number_of_samples() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))
    bnn = lb.bayesianize(network, lb.SWAG(samples=5))
    assert bnn.members is None
    assert [name for name in bnn.state_dict() if name.startswith("network.")] == []


@pytest.mark.parametrize("rule", ["local", "flipout", "moments", "adjoint", "covariance"])
def test_rules_that_read_variances_refuse_it(rule: str) -> None:
    bnn, _ = collected(lb.SWAG())
    with pytest.raises(lb.LeanBayesError, match=r"correlated|independent"):
        bnn.predict(X, rule=rule)


@pytest.mark.parametrize("cyclic", [False, True])
def test_fit_collects_in_the_last_part(cyclic: bool, tmp_path: Path) -> None:
    settings: Any = {"epochs": 4, "batch_size": 16, "optimizer": "sgd", "progress": False, "device": "cpu"}
    method = lb.SWAG(share=0.5, snapshots=5, cyclic=cyclic)
    rates: list[float] = []

    def record(step: int, values: dict[str, float]) -> None:
        rates.append(values.get("train/lr", float("nan")))

    bnn = lb.fit(NETWORK(), method, DATA, out=tmp_path, log_every=1, on_log=record, **settings)
    assert isinstance(bnn.posterior, LowRankPosterior)
    assert bnn.posterior.count == 5
    last = [rate for rate in rates if rate == rate][-10:]
    assert last == pytest.approx(5 * [0.02, 0.01] if cyclic else 10 * [0.02])
    other = lb.load(tmp_path / "model.safetensors", NETWORK())
    assert torch.equal(bnn.predict(X, 3).probs, other.predict(X, 3).probs)
    assert bnn.predict(X).mutual_information.max() > 0


def test_a_stopped_run_collects_the_same_weights(tmp_path: Path) -> None:
    settings: Any = {"epochs": 4, "batch_size": 16, "optimizer": "sgd", "progress": False, "device": "cpu"}
    method = lb.SWAG(share=0.5, snapshots=5)
    whole = lb.fit(NETWORK(), method, DATA, **settings)

    class Stop(Exception):
        pass

    def stop(step: int, values: dict[str, float]) -> None:
        if step == 18:
            raise Stop

    more: Any = {"log_every": 1, "checkpoint_steps": 1}
    with pytest.raises(Stop):
        lb.fit(NETWORK(), method, DATA, out=tmp_path, on_log=stop, **more, **settings)
    resumed = lb.fit(NETWORK(), method, DATA, out=tmp_path, **more, **settings)
    assert torch.equal(resumed.posterior.variance(), whole.posterior.variance())
    assert torch.equal(resumed.posterior.mean(), whole.posterior.mean())


@pytest.mark.parametrize("average", [0.9, "equal"])
def test_an_average_of_the_recipe_does_not_move_the_mean(average: Any) -> None:
    settings: Any = {"epochs": 2, "batch_size": 16, "optimizer": "sgd", "progress": False, "device": "cpu"}
    method = lb.SWAG(pretrain=False, snapshots=3)
    expected, found = (lb.fit(NETWORK(), method, DATA, average=one, **settings) for one in (None, average))
    assert torch.equal(found.posterior.mean(), expected.posterior.mean())


# -- SWA --------------------------------------------------------------------------------------------------------------


def test_swa_is_the_mean_of_the_weights_of_all_steps() -> None:
    """Without momentum and noise, SWAG with as many snapshots as steps collects what SWA averages."""
    settings: Any = {"epochs": 4, "batch_size": 16, "optimizer": "sgd", "progress": False, "device": "cpu"}
    swa = lb.fit(NETWORK(), lb.SWA(share=0.5), DATA, **settings).to_deterministic()
    swag = lb.fit(NETWORK(), lb.SWAG(share=0.5, snapshots=1000), DATA, **settings).to_deterministic()
    for ours, theirs in zip(swa.parameters(), swag.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_cosines_between_two_rates() -> None:
    constant = Recipe(warmup=0.0, lr_high=0.2, lr_low=0.2)
    assert [constant.lr_factor(step, 7) for step in range(7)] == pytest.approx([0.2] * 7)
    cyclic = Recipe(warmup=0.0, cycles=2)
    found = [cyclic.lr_factor(step, 8) for step in range(8)]
    assert found == pytest.approx(2 * [0.5 * (1 + np.cos(np.pi * part / 4)) for part in range(4)])
    falling = Recipe(warmup=0.5, lr_high=0.8, lr_low=0.4)
    assert [falling.lr_factor(step, 8) for step in (0, 1, 4, 6)] == pytest.approx([0.2, 0.4, 0.8, 0.6])


MISTAKES: dict[str, tuple[Any, str]] = {
    "rank": (lambda: lb.SWAG(rank=1), "rank=1"),
    "snapshots": (lambda: lb.SWAG(snapshots=1), "at least 2"),
    "share": (lambda: lb.SWA(share=0.0), "share=0.0"),
    "rate": (lambda: lb.SWAG(lr_fraction=2.0), "lr_fraction=2.0"),
    "scale": (lambda: lb.SWAG(scale=0.0), "positive"),
    "steps": (lambda: collected(lb.SWAG(), steps=1), "at least two steps"),
    "again": (lambda: collected(lb.SWAG())[0].posterior.collect(), "already"),  # type: ignore[operator]
    "average": (lambda: Recipe(average="unequal"), "average"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_one_sentence(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(lb.LeanBayesError, match=words):
        call()
