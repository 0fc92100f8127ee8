"""The one-line representations of random values and rules."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.rules import RULES
from leanbayes.rules.covariance import Covariances

SHAPE = r"shape=\(2, 3\), dtype=torch\.float32, device=cpu"


def model(rule: str) -> lb.BayesianModel:
    network = nn.Sequential(nn.Linear(3, 2))
    return lb.bayesianize(network, lb.MeanField(init_std=0.25, relative=False, rule=rule))


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ("local", rf"LocalWeight\('0\.weight', {SHAPE}, mean_std=0\.25\)"),
        ("covariance", rf"CovarianceWeight\('0\.weight', {SHAPE}, mean_std=0\.25\)"),
        ("flipout", rf"FlipoutWeight\('0\.weight', {SHAPE}, mean_perturbation=0\.\d+\)"),
        ("moments", rf"Moments\({SHAPE}, mean_std=0\.25\)"),
    ],
)
def test_weights(rule: str, pattern: str) -> None:
    bnn: Any = model(rule)
    with bnn.drawn():
        assert re.fullmatch(pattern, repr(bnn.network[0].weight))


def test_outputs() -> None:
    for rule, kind in (("moments", "Moments"), ("covariance", "Covariances")):
        output = model(rule)(torch.ones(4, 3))
        std = output.variance.sqrt().mean().item()
        assert repr(output) == f"{kind}(shape=(4, 2), dtype=torch.float32, device=cpu, mean_std={std:.3g})"


def test_std_includes_common_noise() -> None:
    value = lb.Moments(torch.zeros(1, 4), torch.full((1, 4), 9.0), torch.full((1, 1, 1), 4.0))
    assert repr(value).endswith("mean_std=5)")


def test_repr_keeps_the_gradient_of_the_variance() -> None:
    independent = torch.ones(2, 4, requires_grad=True)
    value = lb.Moments(torch.zeros(2, 4), independent, torch.ones(3, 2, 1))
    repr(value)
    value.variance.sum().backward()
    assert independent.grad is not None
    assert torch.equal(independent.grad, torch.ones(2, 4))


def test_values_without_numbers_have_no_std() -> None:
    meta = torch.empty(3, device="meta")
    assert repr(lb.Moments(meta, meta)) == "Moments(shape=(3,), dtype=torch.float32, device=meta)"
    texts = []

    def record(x: Tensor) -> Tensor:
        texts.append(repr(lb.Moments(x, x)))
        return x

    torch.vmap(record)(torch.ones(5, 2))
    assert texts == ["Moments(shape=(2,), dtype=torch.float32, device=cpu)"]


def test_repr_compiles_into_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        values: list[Any] = [lb.Moments(x, x * x), Covariances(x, torch.diag_embed(x))]
        return x + sum(repr(value).count("shape") for value in values)

    x = torch.ones(2, 3)
    torch.compiler.reset()
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), x + 2)


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    rule = RULES[name]
    assert re.fullmatch(rf"{type(rule).__name__}\(.*\)", repr(rule))


def test_the_settings_of_a_rule_are_shown() -> None:
    assert repr(RULES["moments"]) == "MomentPropagation(correlation='common', activations='exact', maps='auto')"
