"""Priors and their KL, compared with torch.distributions, expected scales and numerical integration."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_cases import CASES
from scipy.integrate import quad
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal, kl_divergence

import leanbayes as lb
from leanbayes.posteriors import MeanFieldPosterior

PRIORS = {
    "one scale": lb.Normal(scale=0.3),
    "gain": lb.Normal(scale=0.3, gain=2.0),
    "fan_in": lb.Normal(scale="fan_in", gain=1.5),
    "std": lb.Normal(scale="std", gain=0.5),
    "pretrained": lb.Normal(scale=0.2, center="pretrained"),
    "pretrained, std": lb.Normal(scale="std", center="pretrained"),
}


def moved(net: nn.Module, prior: Any, **kwargs: Any) -> lb.BayesianModel:
    """Return a model whose means differ from the network, and whose stds are all different."""
    bnn = lb.bayesianize(net, lb.MeanField(prior=prior, **kwargs))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in bnn.posterior.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return bnn


def reference(bnn: lb.BayesianModel, net: nn.Module, prior: lb.Normal) -> list[tuple[Normal, Normal]]:
    """Return posterior and prior of every parameter in fp64, from the settings only."""
    pairs = []
    means = bnn.layout.split(bnn.posterior.mean().detach().double())
    stds = bnn.layout.split(bnn.posterior.variance().detach().double().sqrt())
    for slot, mean, std in zip(bnn.layout, means, stds, strict=True):
        start = net.get_parameter(slot.name).detach().double()
        by_name = {"fan_in": slot.fan_in**-0.5, "std": start.std().item()}
        scale = prior.gain * (by_name[prior.scale] if isinstance(prior.scale, str) else prior.scale)
        center = start if prior.center == "pretrained" else torch.zeros_like(start)
        pairs.append((Normal(mean, std), Normal(center, torch.full_like(center, scale))))
    return pairs


def layer_scale(layer: nn.Module, prior: lb.Normal) -> list[float]:
    """Return the scales of the prior for a network of one layer."""
    bnn = lb.bayesianize(layer.double(), lb.MeanField(prior=prior))
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    terms = bnn.posterior.prior.normal_terms()
    assert terms is not None
    assert isinstance(terms.scale, Tensor)
    assert terms.scale.shape == bnn.posterior.mean().shape
    return terms.scale.unique().tolist()


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (nn.Linear(7, 3), 7),
        (nn.Conv1d(4, 6, 5), 4 * 5),
        (nn.Conv2d(4, 6, (3, 2)), 4 * 6),
        (nn.Conv2d(4, 6, 3, groups=2), 2 * 9),
        (nn.Conv3d(2, 3, 2), 2 * 8),
        (nn.ConvTranspose2d(4, 6, 3), 4 * 9),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), 2 * 9),
        (nn.Embedding(11, 3), 1),
        (nn.Bilinear(3, 4, 5), 3 * 4),
        (nn.LSTMCell(5, 5), 5),
    ],
    ids=str,
)
def test_fan_in_scale_is_gain_over_root_fan_in(layer: nn.Module, fan_in: int) -> None:
    assert layer_scale(layer, lb.Normal(scale="fan_in", gain=1.5)) == pytest.approx(
        [1.5 / math.sqrt(fan_in)], rel=1e-12
    )


def test_std_scale_is_gain_times_the_std_of_the_layer() -> None:
    layer = nn.Linear(5, 4).double()
    assert layer_scale(layer, lb.Normal(scale="std", gain=0.5)) == pytest.approx([0.5 * layer.weight.std().item()])


def test_std_scale_of_equal_weights_falls_back_to_fan_in() -> None:
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight)
    assert layer_scale(layer, lb.Normal(scale="std")) == pytest.approx([0.5])


@pytest.mark.parametrize("values", [{"scale": 2}, {"scale": 2, "gain": 1}, {"scale": 1.0, "gain": 2}])
def test_scale_and_gain_can_be_integers(values: dict[str, Any]) -> None:
    layer = nn.Linear(3, 2)
    whole = lb.bayesianize(layer, lb.MeanField(prior=lb.Normal(**values)))
    real = lb.bayesianize(layer, lb.MeanField(prior=lb.Normal(scale=2.0)))
    assert torch.equal(whole.kl(), real.kl())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", CASES)
def test_kl_and_log_prob_equal_torch_distributions(name: str, prior: str, dtype: torch.dtype) -> None:
    net, tolerance = CASES[name].build().to(dtype), 1e-5 if dtype == torch.float32 else 1e-12
    bnn = moved(net, PRIORS[prior])
    assert bnn.kl_kind == "exact"
    pairs = reference(bnn, net, PRIORS[prior])
    expected = sum(kl_divergence(q, p).sum() for q, p in pairs)
    torch.testing.assert_close(bnn.kl().double(), expected, rtol=tolerance, atol=0)
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    log_prob = bnn.posterior.prior.log_prob(bnn.posterior.mean())
    torch.testing.assert_close(
        log_prob.double(), sum(p.log_prob(q.mean).sum() for q, p in pairs), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("prior", PRIORS)
def test_kl_gradients_equal_autograd(prior: str) -> None:
    net = CASES["mlp"].build().double()
    bnn = moved(net, PRIORS[prior])
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    mu, rho = (p.detach().clone().requires_grad_() for p in (bnn.posterior.mu, bnn.posterior.rho))
    priors = [p for _, p in reference(bnn, net, PRIORS[prior])]
    flat = Normal(torch.cat([p.mean.flatten() for p in priors]), torch.cat([p.stddev.flatten() for p in priors]))
    expected = kl_divergence(Normal(mu, nn.functional.softplus(rho)), flat).sum()
    for got, want in zip(torch.autograd.grad(bnn.kl(), [bnn.posterior.mu, bnn.posterior.rho]),
                         torch.autograd.grad(expected, [mu, rho]), strict=True):  # fmt: skip
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@given(cuts=st.lists(st.integers(1, 23), unique=True, max_size=8).map(sorted))
@settings(max_examples=20, deadline=None)
def test_kl_does_not_depend_on_how_weights_are_cut_into_layers(cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(24, generator=generator, dtype=torch.float64)
    spans = list(zip([0, *cuts], [*cuts, 24], strict=True))
    net = nn.ParameterList([nn.Parameter(weights[a:b].clone()) for a, b in spans])
    method = lb.MeanField(prior=lb.Normal(0.7), init_std=0.2, relative=False)
    kl = lb.bayesianize(net, method, select=".").kl()
    expected = kl_divergence(Normal(weights, 0.2), Normal(torch.zeros_like(weights), 0.7)).sum()
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=0)


# -- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
@pytest.mark.parametrize("prior", [*PRIORS.values(), lb.ScaleMixture()], ids=[*PRIORS, "mixture"])
def test_the_loss_adds_exactly_the_kl(prior: Any, rule: str) -> None:
    bnn = moved(CASES["mlp"].build().double(), prior, rule=rule)
    x, y = CASES["mlp"].example().double(), torch.tensor([0, 1, 2, 0])
    for num_data, temperature, samples in ((50, 1.0, 1), (1000, 1.0, 3), (50, 0.25, 2)):
        with bnn.frozen(3):
            warm = lb.elbo_loss(bnn, x, y, num_data=num_data, temperature=temperature, samples=samples)
            cold = lb.elbo_loss(bnn, x, y, num_data=num_data, temperature=0.0, samples=samples)
            torch.testing.assert_close((warm - cold) * num_data, temperature * bnn.kl(), rtol=1e-9, atol=0)


# -- the scale mixture ------------------------------------------------------------------------------------------------

MIXTURE = lb.ScaleMixture(pi=0.3, wide=0.8, narrow=0.05)


def mixture_of(prior: lb.ScaleMixture) -> MixtureSameFamily:
    scales = torch.tensor([prior.wide, prior.narrow], dtype=torch.float64)
    shares = torch.tensor([prior.pi, 1 - prior.pi], dtype=torch.float64)
    return MixtureSameFamily(Categorical(shares), Normal(torch.zeros_like(scales), scales))


def test_mixture_log_prob_equals_torch_distributions() -> None:
    bnn = moved(nn.Linear(40, 30).double(), MIXTURE)
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    for factor in (1e-6, 1.0, 100.0):  # in the tails both densities underflow
        weights = factor * bnn.posterior.mean()
        expected = mixture_of(MIXTURE).log_prob(weights).sum()
        torch.testing.assert_close(bnn.posterior.prior.log_prob(weights), expected, rtol=1e-10, atol=0)


def test_mixture_kl_is_unbiased() -> None:
    bnn = lb.bayesianize(nn.Linear(3, 2).double(), lb.MeanField(prior=MIXTURE, init_std=0.5))
    assert bnn.kl_kind == "monte-carlo"
    mixture = mixture_of(MIXTURE)
    exact = 0.0
    for mean, std in zip(bnn.posterior.mean().tolist(), bnn.posterior.variance().sqrt().tolist(), strict=True):
        q = Normal(torch.tensor(mean, dtype=torch.float64), std)

        def integrand(w: float, q: Normal = q) -> float:
            at = torch.tensor(w, dtype=torch.float64)
            return float(q.log_prob(at).exp() * (q.log_prob(at) - mixture.log_prob(at)))

        exact += quad(
            integrand, mean - 10 * std, mean + 10 * std, points=[0.0] if abs(mean) < 10 * std else None, limit=200
        )[0]
    with torch.no_grad():
        samples = torch.stack([bnn.kl(torch.Generator().manual_seed(seed)) for seed in range(4000)])
    error = samples.std() / math.sqrt(len(samples))
    assert abs(samples.mean() - exact) < 4 * error  # four standard errors, on fixed seeds
    assert error < 0.05 * abs(exact)


def test_mixture_kl_gradient_equals_autograd() -> None:
    bnn = moved(nn.Linear(5, 4).double(), MIXTURE)
    assert isinstance(bnn.posterior, MeanFieldPosterior)
    mu, rho = (p.detach().clone().requires_grad_() for p in (bnn.posterior.mu, bnn.posterior.rho))
    with bnn.frozen(2):
        kl, weights = bnn.kl(), bnn.posterior.sample(bnn.next_draw().key).detach()
    epsilon = (weights - mu.detach()) / nn.functional.softplus(rho.detach())
    std = nn.functional.softplus(rho)
    drawn = mu + std * epsilon
    expected = (Normal(mu, std).log_prob(drawn) - mixture_of(MIXTURE).log_prob(drawn)).sum()
    torch.testing.assert_close(kl, expected, rtol=1e-9, atol=1e-9)
    for got, want in zip(torch.autograd.grad(kl, [bnn.posterior.mu, bnn.posterior.rho]),
                         torch.autograd.grad(expected, [mu, rho]), strict=True):  # fmt: skip
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    "method", [lb.Deterministic(), lb.Ensemble(2), lb.MCDropout(0.1)], ids=lambda m: type(m).__name__
)
def test_methods_without_random_weights_have_an_exact_kl_of_zero(method: Any) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    assert (bnn.kl_kind, bnn.kl().item()) == ("exact", 0.0)
