"""Hand-written forward and backward passes against torch.distributions and autograd in double precision."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from leanbayes.core import gaussian, noise
from leanbayes.core.gaussian import NormalTerms

KEY = noise.make_key(5, 3)


def parameters(numel: int = 37, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    mean = torch.randn(numel, generator=generator, dtype=dtype)
    rho = 3 * torch.randn(numel, generator=generator, dtype=dtype) - 2
    return mean.requires_grad_(), rho.requires_grad_()


def terms(kind: str, mean: Tensor) -> tuple[NormalTerms, Normal]:
    """Return a prior as `NormalTerms` and as a distribution of torch."""
    loc = torch.linspace(-1, 1, len(mean), dtype=mean.dtype) if "centered" in kind else None
    scale: float | Tensor = torch.linspace(0.05, 2, len(mean), dtype=mean.dtype) if "scales" in kind else 0.3
    zeros = torch.zeros_like(mean).detach()
    return NormalTerms(loc, scale), Normal(zeros if loc is None else loc, zeros + scale)


@given(st.floats(1e-12, 1e4))
def test_inverse_softplus_inverts(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    torch.testing.assert_close(F.softplus(gaussian.inverse_softplus(value)), value, rtol=1e-10, atol=0.0)
    single = gaussian.inverse_softplus(value.float())
    torch.testing.assert_close(F.softplus(single), value.float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", ["plain", "centered", "scales", "centered scales"])
def test_kl_equals_that_of_torch_distributions(kind: str) -> None:
    mean, rho = parameters()
    ours, prior = terms(kind, mean)
    expected = kl_divergence(Normal(mean, F.softplus(rho)), prior).sum()
    torch.testing.assert_close(gaussian.normal_kl(mean, F.softplus(rho), ours), expected)
    torch.testing.assert_close(gaussian.draw_and_kl(mean, rho, KEY, ours)[1], expected)


def test_kl_of_many_weights_is_accurate_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = 0.05 * torch.randn(5_000_000, generator=generator)
    sigma = 1e-3 * torch.rand(5_000_000, generator=generator) + 1e-5
    expected = kl_divergence(Normal(mean.double(), sigma.double()), Normal(0.0, 0.1)).sum()
    kl = gaussian.normal_kl(mean, sigma, NormalTerms(None, 0.1))
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", ["plain", "centered", "scales", "centered scales"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.7])
def test_gradients_equal_plain_autograd(kind: str, kl_weight: float) -> None:
    mean, rho = parameters()
    ours, prior = terms(kind, mean)
    upstream = torch.linspace(-2, 2, len(mean), dtype=mean.dtype)
    weights, kl = gaussian.draw_and_kl(mean, rho, KEY, ours)
    gradients = torch.autograd.grad((weights * upstream).sum() + kl_weight * kl, (mean, rho))

    sigma = F.softplus(rho)
    plain = mean + sigma * noise.normal(mean, KEY)
    torch.testing.assert_close(weights, plain)
    plain_kl = kl_divergence(Normal(mean, sigma), prior).sum()
    expected = torch.autograd.grad((plain * upstream).sum() + kl_weight * plain_kl, (mean, rho))
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("kind", ["plain", "centered", "scales", "centered scales"])
def test_variance_and_kl_equal_plain_autograd(kind: str) -> None:
    mean, rho = parameters()
    ours, prior = terms(kind, mean)
    upstream = torch.linspace(-2, 2, len(mean), dtype=mean.dtype)
    variance, kl = gaussian.variance_and_kl(mean, rho, ours)
    sigma = F.softplus(rho)
    plain_kl = kl_divergence(Normal(mean, sigma), prior).sum()
    torch.testing.assert_close((variance, kl), (sigma.square(), plain_kl))
    gradients = torch.autograd.grad((variance * upstream).sum() + 0.7 * kl, (mean, rho))
    expected = torch.autograd.grad((sigma.square() * upstream).sum() + 0.7 * plain_kl, (mean, rho))
    torch.testing.assert_close(gradients, expected)


def test_a_sample_without_kl_has_the_same_weights_and_gradients() -> None:
    mean, rho = parameters()
    with_kl, _ = gaussian.draw_and_kl(mean, rho, KEY, NormalTerms(None, 1.0))
    without = gaussian.draw(mean, rho, KEY)
    torch.testing.assert_close(with_kl, without)
    gradients = [torch.autograd.grad(w.square().sum(), (mean, rho)) for w in (with_kl, without)]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_two_samples_before_one_backward_keep_their_own_noise() -> None:
    mean, rho = parameters()
    keys = [noise.make_key(0, index) for index in (0, 1)]
    first, second = (gaussian.draw(mean, rho, key) for key in keys)
    (gradient,) = torch.autograd.grad((first * second).sum(), rho)
    sigma = F.softplus(rho)
    a, b = (mean + sigma * noise.normal(mean, key) for key in keys)
    (expected,) = torch.autograd.grad((a * b).sum(), rho)
    torch.testing.assert_close(gradient, expected)


def test_two_backward_passes_through_one_graph_are_equal() -> None:
    mean, rho = parameters()
    weights, kl = gaussian.draw_and_kl(mean, rho, KEY, NormalTerms(None, 1.0))
    loss = weights.square().sum() + kl
    once = torch.autograd.grad(loss, (mean, rho), retain_graph=True)
    twice = torch.autograd.grad(loss, (mean, rho))
    torch.testing.assert_close(once, twice, rtol=0, atol=0)


def test_samples_have_the_moments_of_the_posterior() -> None:
    mean, rho = parameters(5)
    samples = torch.stack([gaussian.draw(mean, rho, noise.make_key(1, i)) for i in range(20_000)]).detach()
    sigma = F.softplus(rho).detach()
    assert ((samples.mean(0) - mean) / sigma).abs().max() < 5 / math.sqrt(20_000)
    assert (samples.std(0) / sigma - 1).abs().max() < 5 / math.sqrt(40_000)


def test_reparameterize_equals_plain_autograd_and_is_finite_at_zero() -> None:
    loc = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    variance = torch.rand(3, 4, dtype=torch.float64)
    variance[0] = 0
    variance.requires_grad_()
    out = gaussian.reparameterize(loc, variance, KEY, 2)
    epsilon = noise.normal(loc, KEY, 2)
    torch.testing.assert_close(out, loc + variance.sqrt() * epsilon)
    gradients = torch.autograd.grad(out.square().sum(), (loc, variance))
    expected = torch.autograd.grad((loc + variance.sqrt() * epsilon).square().sum(), (loc, variance))
    assert torch.equal(gradients[1][0], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(gradients[0], expected[0])
    torch.testing.assert_close(gradients[1][1:], expected[1][1:])
