"""The cost of a step in machine-independent counts: bytes moved, kernels, stored numbers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checks import count_cost
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.counters import Cost, PeakMemory


def mlp(depth: int = 3, width: int = 2048) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def step_costs(net: nn.Module, x: Tensor, classes: int, rule: str) -> tuple[Cost, Cost]:
    """Return the cost of a deterministic training step (forward and backward), and of a Bayesian one."""
    y = torch.randint(classes, (len(x),))
    bnn = lb.bayesianize(net, lb.MeanField(rule=rule))
    steps: list[Callable[[], None]] = [
        lambda: F.cross_entropy(net(x), y).backward(),
        lambda: lb.elbo_loss(bnn, x, y, num_data=10_000).backward(),
    ]
    plain, bayesian = (count_cost(step) for step in steps)
    return plain, bayesian


def test_bytes_of_a_step_on_an_mlp() -> None:
    plain, bayesian = step_costs(mlp(), torch.randn(64, 2048), 2048, "sample")
    assert bayesian.bytes <= 12 * plain.bytes  # bayesian-torch 33, a plain local reparameterization 15


def test_bytes_of_a_step_on_a_small_cnn() -> None:
    plain, bayesian = step_costs(cnn(), torch.randn(64, 1, 28, 28), 10, "sample")
    assert bayesian.bytes <= 2.5 * plain.bytes  # bayesian-torch 3.5, a plain local reparameterization 4


@pytest.mark.parametrize(("rule", "mlp_ratio", "cnn_ratio"), [("local", 12, 3.8), ("flipout", 16, 2.7)])
def test_bytes_of_a_step_with_other_rules(rule: str, mlp_ratio: float, cnn_ratio: float) -> None:
    plain, bayesian = step_costs(mlp(), torch.randn(64, 2048), 2048, rule)
    assert bayesian.bytes <= mlp_ratio * plain.bytes  # bayesian-torch flipout 33
    plain, bayesian = step_costs(cnn(), torch.randn(64, 1, 28, 28), 10, rule)
    assert bayesian.bytes <= cnn_ratio * plain.bytes


@pytest.mark.parametrize("depth", [2, 40])
def test_kernels_of_a_step_do_not_grow_with_the_number_of_layers(depth: int) -> None:
    plain, bayesian = step_costs(mlp(depth, 16), torch.randn(4, 16), 16, "sample")
    assert bayesian.kernels <= plain.kernels + 60


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
def test_two_numbers_are_stored_per_bayesian_weight(rule: str) -> None:
    net = cnn()
    bnn = lb.bayesianize(net, lb.MeanField(rule=rule))
    bnn(torch.randn(2, 1, 28, 28))
    stored = sum(t.numel() for t in [*bnn.parameters(), *bnn.buffers()])
    deterministic = sum(p.numel() for p in net.parameters()) - bnn.layout.numel
    assert bnn.posterior.size() == 2 * bnn.layout.numel + 1  # and the scale of the prior
    assert stored == 2 * bnn.layout.numel + deterministic + 3  # and the two numbers of the noise stream


def test_a_sample_is_freed_after_its_forward_pass() -> None:
    bnn = lb.bayesianize(mlp(2, 512), lb.MeanField())
    x = torch.randn(1, 512)
    with torch.no_grad(), PeakMemory() as memory:
        for _ in range(5):
            bnn(x)
    weights = 4 * bnn.layout.numel
    assert memory.peak_bytes < 3.2 * weights  # σ, noise and weights of one sample


def test_a_prediction_does_not_compute_the_kl() -> None:
    bnn = lb.bayesianize(mlp(2, 512), lb.MeanField())
    x = torch.randn(1, 512)
    weights = 4 * bnn.layout.numel

    @torch.no_grad()
    def forward(rule: str) -> int:
        with bnn.using(rule):
            return count_cost(lambda: bnn(x)).bytes

    sampling = forward("sample") - forward("mean")
    assert sampling < 8.1 * weights  # σ 2, noise 2, μ + σε 4
    cost = count_cost(lambda: bnn.predict(x, samples=3))
    assert cost.bytes < 3 * (sampling + 2 * weights) + 0.1 * weights
    assert "aten.log" not in cost.by_op
    assert "aten.dot" not in cost.by_op


def test_samples_share_one_kl() -> None:
    bnn = lb.bayesianize(mlp(2, 64), lb.MeanField())
    x, y = torch.randn(2, 64), torch.zeros(2, dtype=torch.long)
    cost = count_cost(lambda: lb.elbo_loss(bnn, x, y, num_data=100, samples=4).backward())
    assert cost.by_op["aten.dot"].kernels == 2  # μ·μ and σ·σ, once
