"""The Bayesian last layer: its bound against samples, its moments against closed forms, and training."""

from typing import Any

import pytest
import torch
from network_cases import seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.model.method import Training

NETWORK = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def closed_form(bnn: lb.BayesianModel, network: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the logits by hand: m = Wφ + b, v = φ²·σ_W² + σ_b²."""
    features = network[:2](x)
    variances = bnn.weight_variances()
    return network(x), features.square() @ variances["2.weight"].T + variances["2.bias"]


def test_the_loss_of_classes_is_the_bound_of_the_paper() -> None:
    network = NETWORK().double().eval()
    bnn = lb.bayesianize(network, lb.VBLL(init_std=0.5))
    assert [slot.name for slot in bnn.layout] == ["2.weight", "2.bias"]
    x = X[:7].double()
    mean, variance = closed_form(bnn, network, x)  # type: ignore[arg-type]
    bound = ((mean + variance / 2).logsumexp(1) - mean.gather(1, Y[:7, None])[:, 0]).mean()
    loss = lb.elbo_loss(bnn, x, Y[:7], num_data=90, temperature=1.0)
    torch.testing.assert_close(loss, bound + bnn.kl() / 90)
    noise = torch.randn(200_000, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples = mean.detach() + variance.detach().sqrt() * noise
    expected = nn.functional.cross_entropy(samples.movedim(0, -1), Y[:7, None].expand(-1, 200_000))
    assert expected < bound.item() < expected + 0.05


def test_ignored_labels_do_not_count() -> None:
    bnn = lb.bayesianize(NETWORK(), lb.VBLL())
    y = Y[:4].clone()
    y[2:] = -100
    ours = lb.elbo_loss(bnn, X[:4], y, num_data=90, temperature=0.0)
    torch.testing.assert_close(ours, lb.elbo_loss(bnn, X[:2], y[:2], num_data=90, temperature=0.0))


def test_regression_has_the_exact_expected_loss() -> None:
    network = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))().double()
    bnn = lb.bayesianize(network, lb.VBLL(init_std=0.3), likelihood=lb.Gaussian(0.5))
    x, y = X.double(), X[:, :1].double()
    mean, variance = closed_form(bnn, network, x)  # type: ignore[arg-type]
    target = torch.distributions.Normal(mean, 0.5)
    expected = (-target.log_prob(y) + variance / (2 * 0.25)).mean()
    loss = lb.elbo_loss(bnn, x, y, num_data=90, temperature=1.0)
    torch.testing.assert_close(loss, expected + bnn.kl() / 90)
    prediction = bnn.predict(x)
    torch.testing.assert_close(prediction.epistemic_variance, variance)


def test_fit_learns_and_predicts_in_one_pass() -> None:
    settings: Any = {"epochs": 30, "batch_size": 16, "lr": 0.02, "temperature": 0.1}
    bnn = lb.fit(NETWORK(), lb.VBLL(), TensorDataset(X, Y), progress=False, device="cpu", **settings)
    prediction = bnn.predict(X)
    assert prediction.samples == 1
    assert (prediction.label == Y).float().mean() > 0.7
    near, far = bnn.predict(X[:1]).mutual_information, bnn.predict(30 * X[:1]).mutual_information
    assert prediction.mutual_information.max() > 0
    assert near.isfinite().all()
    assert far.isfinite().all()


def test_hooks_need_nothing() -> None:
    bnn = lb.bayesianize(NETWORK(), lb.VBLL())
    bnn.method.start(Training(bnn, 1, 1))
    assert bnn.posterior.variance().min() > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lb.bayesianize(nn.Conv2d(1, 1, 1), lb.VBLL()), "no linear layer"),
        (lambda: lb.bayesianize(NETWORK().requires_grad_(False), lb.VBLL()), "frozen"),
        (lambda: lb.VBLL(init_std=0.0), "positive"),
    ],
)
def test_mistakes_get_one_sentence(call: Any, words: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=words):
        call()
