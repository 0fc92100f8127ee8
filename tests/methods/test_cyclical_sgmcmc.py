"""Cyclical SGMCMC: the stationary distribution of a Gaussian target, and members in one file."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from network_cases import seeded
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.training.record import read_record

NETWORK = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))
X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
DATA = TensorDataset(X, Y)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "temperature"), [(0.0, False, 1.0), (0.9, False, 1.0), (0.9, True, 1.0), (0.5, True, 0.25)]
)
def test_the_weights_have_the_variance_of_a_gaussian_target(
    momentum: float, nesterov: bool, temperature: float
) -> None:
    """Example i measures weight i: with the weight decay λ the target is N(0, T/(c² + Nλ)) for each weight."""
    size, c, decay = 100, 2.0, 0.02
    network = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(network.weight)
    x, y = c * torch.eye(size), torch.zeros(size, 1)
    steps = 3000
    method = lb.CyclicalSGMCMC(cycles=1, per_cycle=1, exploration=0.0, temperature=temperature)
    bnn = lb.bayesianize(network, method, likelihood=lb.Gaussian(1.0), seed=0)
    # The mean loss has the slope (c²/N)·w, so a rate of 0.1·N/c² takes tenths of it away per step without momentum.
    rate = 0.05 * (1 - momentum) * size / (c**2 + size * decay)
    parameters = [p for p in bnn.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    training = lb.Training(bnn, steps, size, optimizers=[optimizer])
    method.start(training)
    squares, weight = [], bnn.network.networks[-1].weight  # type: ignore[union-attr, index]
    for training.step in range(steps):
        optimizer.zero_grad()
        weight.grad = (c**2 / size) * weight.detach()  # of `lb.elbo_loss`, which the first step checks
        if training.step == 5:
            by_hand, weight.grad = weight.grad, None
            lb.elbo_loss(bnn, x, y, num_data=size).backward()
            torch.testing.assert_close(weight.grad, by_hand)
        optimizer.step()
        method.after_step(training)
        if training.step > 300:
            squares.append(weight.detach().square().mean())
    expected = temperature / (c**2 + size * decay)
    assert torch.stack(squares).mean().item() == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_new_cycle_does_not_amplify_the_noise_of_the_last_one(nesterov: bool) -> None:
    """Against the authors' form, whose momentum is a change of the weights: it does not grow with the learning rate."""
    steps, cycles, size, n, beta, c = 400, 4, 2000, 500, 0.9, 3.0
    method = lb.CyclicalSGMCMC(cycles=cycles, per_cycle=1, exploration=0.5)
    network = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(network.weight)
    bnn = lb.bayesianize(network, method, likelihood=lb.Gaussian(1.0), seed=0)
    optimizer = torch.optim.SGD([p for p in bnn.parameters() if p.requires_grad], 0.1, beta, nesterov=nesterov)
    training = lb.Training(bnn, steps, n, optimizers=[optimizer])
    weight = bnn.network.networks[-1].weight  # type: ignore[union-attr, index]
    generator = torch.Generator().manual_seed(1)
    theirs, momentum = torch.zeros(size), torch.zeros(size)
    ours_stds, their_stds = [], []
    for training.step in range(steps):
        share = training.step * cycles / steps % 1.0
        optimizer.param_groups[0]["lr"] = rate = 0.05 * (1 + math.cos(math.pi * share))
        weight.grad = c * weight.detach()
        optimizer.step()
        method.after_step(training)
        std = math.sqrt(2 * (1 - beta) * rate / n) if share >= 0.5 else 0.0
        momentum = beta * momentum - rate * c * theirs + std * torch.randn(size, generator=generator)
        theirs = theirs + momentum
        ours_stds.append(weight.detach().std())
        their_stds.append(theirs.std())
    ours, wanted = torch.stack(ours_stds), torch.stack(their_stds)
    assert 0.5 * wanted.max() < ours.max() < 1.5 * wanted.max()


def test_a_regression_with_little_noise_is_stable() -> None:
    x = torch.linspace(-1, 1, 128)[:, None]
    data = TensorDataset(x, torch.sin(4 * x))
    network = seeded(lambda: nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))()
    method = lb.CyclicalSGMCMC(cycles=4, per_cycle=1)
    settings: Any = {"epochs": 60, "batch_size": 16, "lr": 0.002, "progress": False, "device": "cpu"}
    bnn = lb.fit(network, method, data, optimizer="sgd", likelihood=lb.Gaussian(0.1), **settings)
    assert (bnn.predict(x).mean - torch.sin(4 * x)).square().mean() < 0.15


def test_noise_repeats_and_exploration_has_none() -> None:
    def weights(seed: int, exploration: float, steps: int) -> torch.Tensor:
        method = lb.CyclicalSGMCMC(cycles=1, per_cycle=1, exploration=exploration)
        bnn = lb.bayesianize(NETWORK(), method, seed=seed)
        optimizer = torch.optim.SGD(bnn.parameters(), lr=0.1)
        training = lb.Training(bnn, 10, 96, optimizers=[optimizer])
        for training.step in range(steps):
            optimizer.step()  # without gradients
            method.after_step(training)
        return torch.nn.utils.parameters_to_vector(bnn.parameters())

    start = torch.nn.utils.parameters_to_vector(NETWORK().parameters())
    assert torch.equal(weights(0, 0.8, 8), start)
    assert not torch.equal(weights(0, 0.8, 9), start)
    assert torch.equal(weights(0, 0.0, 3), weights(0, 0.0, 3))
    assert not torch.equal(weights(0, 0.0, 3), weights(1, 0.0, 3))


def fit(method: lb.Method, **more: Any) -> lb.BayesianModel:
    settings: Any = {"epochs": 6, "batch_size": 16, "optimizer": "sgd", "progress": False, "device": "cpu"}
    return lb.fit(NETWORK(), method, DATA, **settings, **more)


def test_members_are_in_one_file_and_vote(tmp_path: Path) -> None:
    bnn = fit(lb.CyclicalSGMCMC(cycles=2, per_cycle=2), out=tmp_path)
    assert bnn.members == 4
    prediction = bnn.predict(X, keep_outputs=True)
    assert prediction.samples == 4
    assert prediction.outputs is not None
    alone = torch.stack([network.eval()(X) for network in bnn.network.networks])  # type: ignore[union-attr]
    torch.testing.assert_close(prediction.outputs, alone.detach())
    torch.testing.assert_close(prediction.probs, alone.softmax(-1).mean(0).detach())
    assert len({tuple(one.flatten().tolist()) for one in alone}) == 4
    other = lb.load(tmp_path / "model.safetensors", NETWORK())
    assert other.members == 4
    assert torch.equal(other.predict(X).probs, prediction.probs)
    rates = [entry["lr"] for entry in read_record(tmp_path)["history"]]
    assert max(rates[-3:]) > min(rates[:3])  # the second cycle starts high again


def test_a_stopped_run_ends_equal(tmp_path: Path) -> None:
    method = lb.CyclicalSGMCMC(cycles=2, per_cycle=2)
    whole = fit(method)

    class Stop(Exception):
        pass

    def stop(step: int, values: dict[str, float]) -> None:
        if step == 17:
            raise Stop

    more: Any = {"log_every": 1, "checkpoint_steps": 1, "out": tmp_path}
    with pytest.raises(Stop):
        fit(method, on_log=stop, **more)
    resumed = fit(method, **more)
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


MISTAKES: dict[str, tuple[Any, str]] = {
    "cycles": (lambda: lb.CyclicalSGMCMC(cycles=0), "at least 1"),
    "exploration": (lambda: lb.CyclicalSGMCMC(exploration=1.0), "less than 1"),
    "temperature": (lambda: lb.CyclicalSGMCMC(temperature=-1.0), "not negative"),
    "steps": (lambda: fit(lb.CyclicalSGMCMC(cycles=20, per_cycle=5)), "too few"),
    "optimizer": (
        lambda: lb.CyclicalSGMCMC(exploration=0.0).after_step(
            lb.Training(lb.bayesianize(NETWORK(), lb.CyclicalSGMCMC()), 100, 96)
        ),
        "torch.optim.SGD",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_one_sentence(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(lb.LeanBayesError, match=words):
        call()
