"""Correlated posteriors: rules that read variances only refuse them, and `sample` and `mean` work."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from network_cases import seeded
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.posteriors import MeanFieldPosterior

REFUSED = ("local", "flipout", "moments", "covariance")
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(5) % 3


@seeded
def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


class OneFactor(lb.Posterior):
    """w = μ + a·z with one standard normal z for all weights."""

    factorized = False

    def __init__(self, layout: Layout, mean: Tensor) -> None:
        super().__init__(layout)
        self.mu, self.factor = nn.Parameter(mean), nn.Parameter(torch.full_like(mean, 0.1))

    def mean(self) -> Tensor:
        return self.mu

    def variance(self) -> Tensor:
        return self.factor.square()

    def sample(self, key: Tensor) -> Tensor:
        return self.mu + self.factor * noise.normal(self.mu[:1], key)

    def kl(self, key: Tensor) -> Tensor:
        return 0.5 * (self.mu.square().sum() + self.factor.square().sum())


@dataclass(frozen=True)
class OneFactorMethod(lb.Method):
    rule: str = "sample"
    samples: int = 3

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> OneFactor:
        return OneFactor(layout, mean)


METHODS: dict[str, Any] = {
    "tied sharing": lambda rule: lb.WeightSharing(8, minimum=2, sampling="tied", rule=rule, samples=3),
    "one factor": OneFactorMethod,
}


@pytest.fixture(params=METHODS)
def make(request: pytest.FixtureRequest) -> Any:
    return METHODS[request.param]


def check_message(error: pytest.ExceptionInfo[lb.UnsupportedOperation], rule: str) -> None:
    message = str(error.value)
    assert message.startswith(f"The rule {rule!r} ")
    assert message.endswith("are correlated: use the rule 'sample' or 'mean'.")
    assert message.count(".") == 1  # one sentence


@pytest.mark.parametrize("rule", REFUSED)
def test_rules_that_read_variances_only_are_refused(make: Any, rule: str) -> None:
    bnn = lb.bayesianize(network(), make("sample"))
    assert not bnn.posterior.factorized
    with pytest.raises(lb.UnsupportedOperation) as error, bnn.using(rule):
        raise AssertionError("the rule was not refused")
    check_message(error, rule)
    with pytest.raises(lb.UnsupportedOperation) as error:
        bnn.predict(X, rule=rule)
    check_message(error, rule)
    assert bnn.rule == "sample"
    with pytest.raises(lb.UnsupportedOperation) as error:
        lb.bayesianize(network(), make(rule))
    check_message(error, rule)


@pytest.mark.parametrize("rule", REFUSED)
def test_a_rule_refuses_a_posterior_that_is_exchanged_later(make: Any, rule: str) -> None:
    bnn = lb.bayesianize(network(), lb.MeanField(rule=rule))
    bnn.posterior = lb.bayesianize(network(), make("sample")).posterior
    with pytest.raises(lb.UnsupportedOperation) as error:
        bnn(X)
    check_message(error, rule)


def test_one_pass_is_not_exported(make: Any) -> None:
    bnn = lb.bayesianize(network(), make("sample"))
    with pytest.raises(lb.UnsupportedOperation) as error:
        lb.export_program(bnn, X)
    check_message(error, "moments")


def test_samples_and_the_mean_work(make: Any) -> None:
    bnn = lb.bayesianize(network(), make("sample"))
    lb.elbo_loss(bnn, X, Y, num_data=100).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.posterior.parameters() if p.requires_grad)
    bnn.eval()
    assert bnn.predict(X).samples == 3
    with torch.no_grad():
        outputs = torch.stack([bnn(X) for _ in range(5)])
        assert outputs.std(0).max() > 0
        with bnn.using("mean"):
            torch.testing.assert_close(bnn(X), bnn.to_deterministic()(X))


def test_one_noise_is_shared_by_all_weights() -> None:
    bnn = lb.bayesianize(network(), OneFactorMethod())
    with torch.no_grad():
        samples = torch.stack([bnn.posterior.sample(noise.make_key(seed)) for seed in range(5)])
    z = (samples - bnn.posterior.mean()) / 0.1
    torch.testing.assert_close(z, z[:, :1].expand_as(z), rtol=0, atol=1e-4)


def test_posteriors_are_factorized_by_default() -> None:
    bnn = lb.bayesianize(network(), lb.MeanField())
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    assert bnn.posterior.factorized
    for sampling in ("independent", "hierarchical"):
        assert lb.bayesianize(network(), lb.WeightSharing(8, minimum=2, sampling=sampling)).posterior.factorized
