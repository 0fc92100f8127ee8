"""One variance per row: compared with torch.distributions, weight by weight, in double precision."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributions, nn

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.core.layout import Layout, Slot
from leanbayes.methods import VDP
from leanbayes.posteriors import RowPosterior
from leanbayes.priors import Prior

few = settings(max_examples=10, deadline=None, derandomize=True)
KEY = noise.make_key(3)
PRIORS: dict[str, Prior] = {
    "one scale": lb.Normal(0.3),
    "scale per layer": lb.Normal("fan_in", gain=0.7),
    "around the weights": lb.Normal("std", center="pretrained"),
    "mixture": lb.ScaleMixture(),
}


def layout_of(*shapes: tuple[int, ...], orders: tuple[tuple[int, ...], ...] | None = None) -> Layout:
    orders = orders or tuple(tuple(range(len(shape))) for shape in shapes)
    pairs = enumerate(zip(shapes, orders, strict=True))
    return Layout([Slot((f"w{number}",), shape, order, torch.float64, 3) for number, (shape, order) in pairs])


LAYOUT = layout_of((3, 4), (2, 3, 2, 2), (5,), (), orders=((1, 0), (0, 2, 3, 1), (0,), ()))  # unusual memory orders


def make(layout: Layout = LAYOUT, prior: Prior | None = None, seed: int = 0) -> RowPosterior:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(layout.numel, generator=generator, dtype=torch.float64)
    std = 0.1 + torch.rand(layout.numel, generator=generator, dtype=torch.float64)
    center = mean + 0.1 * torch.randn(layout.numel, generator=generator, dtype=torch.float64)
    return RowPosterior(layout, mean, std, (prior or lb.Normal(0.3)).bind(layout, center))


def stds_by_hand(posterior: RowPosterior) -> list[Tensor]:
    """Return the stds of each slot, row by row."""
    rest, parts = list(F.softplus(posterior.rho)), []
    for slot in posterior.layout:
        rows = [rest.pop(0) for _ in range(slot.shape[0] if slot.shape else 1)]
        parts.append(torch.stack([sigma.expand(slot.shape[1:]) for sigma in rows]).reshape(slot.shape))
    assert not rest
    return parts


def test_every_row_has_the_root_mean_square_of_its_stds() -> None:
    generator = torch.Generator().manual_seed(1)
    std = torch.rand(LAYOUT.numel, generator=generator, dtype=torch.float64)
    posterior = RowPosterior(LAYOUT, torch.zeros_like(std), std, lb.Normal().bind(LAYOUT, std))
    for ours, theirs in zip(LAYOUT.split(posterior.variance()), LAYOUT.split(std.square()), strict=True):
        rows = theirs if theirs.dim() < 2 else theirs.flatten(1).mean(1).view(-1, *[1] * (theirs.dim() - 1))
        torch.testing.assert_close(ours, rows.expand(ours.shape))
    assert posterior.rho.numel() == 3 + 2 + 5 + 1
    assert posterior.size() == LAYOUT.numel + 11


@few
@given(st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=4), st.integers(0, 99))
def test_moments_repeat_one_value_per_row(shapes: list[tuple[int, ...]], seed: int) -> None:
    posterior = make(layout_of(*shapes), seed=seed)
    for part, expected in zip(posterior.layout.split(posterior.std()), stds_by_hand(posterior), strict=True):
        assert torch.equal(part, expected)
    torch.testing.assert_close(posterior.variance(), posterior.std().square())
    assert posterior.mean() is posterior.mu
    per_row = posterior.row_sums(posterior.expand(torch.ones_like(posterior.rho)))
    torch.testing.assert_close(per_row.sum().item(), float(posterior.layout.numel))


@pytest.mark.parametrize("prior", ["one scale", "scale per layer", "around the weights"])
def test_kl_equals_that_of_single_weights(prior: str) -> None:
    posterior = make(prior=PRIORS[prior])
    assert posterior.kl_kind == "exact"
    terms: Any = posterior.prior.normal_terms()
    center = torch.zeros(LAYOUT.numel, dtype=torch.float64) if terms.loc is None else terms.loc
    scale = torch.as_tensor(terms.scale, dtype=torch.float64).expand(LAYOUT.numel)

    def by_weight() -> Tensor:
        q = distributions.Normal(posterior.mu, LAYOUT.join(stds_by_hand(posterior)))
        return distributions.kl_divergence(q, distributions.Normal(center, scale)).sum()

    results = [posterior.kl(KEY), posterior.sample_and_kl(KEY)[1], posterior.variance_and_kl(KEY)[1]]
    for result in [*results, posterior.perturbation_and_kl(KEY)[1]]:
        torch.testing.assert_close(result, by_weight(), rtol=1e-12, atol=0)
    ours = torch.autograd.grad(posterior.kl(KEY), [posterior.mu, posterior.rho])
    theirs = torch.autograd.grad(by_weight(), [posterior.mu, posterior.rho])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_equation_12() -> None:
    """-½ Σ_n (j log σ_n² - ‖μ_n‖² - j σ_n²), which lacks the constant -½ per weight, for a prior N(0, 1)."""
    layout = layout_of((4, 6))
    posterior = make(layout, lb.Normal(1.0))
    variance, rows = F.softplus(posterior.rho).square(), posterior.mu.view(4, 6)
    printed = -0.5 * (6 * variance.log() - rows.square().sum(1) - 6 * variance).sum()
    torch.testing.assert_close(posterior.kl(KEY), printed - 0.5 * layout.numel, rtol=1e-12, atol=0)


def test_kl_of_a_mixture_is_sampled() -> None:
    posterior = make(prior=PRIORS["mixture"])
    assert posterior.kl_kind == "monte-carlo"
    weights, kl = posterior.sample_and_kl(KEY)
    log_q = distributions.Normal(posterior.mu, posterior.std()).log_prob(weights).sum()
    torch.testing.assert_close(kl, log_q - posterior.prior.log_prob(weights), rtol=1e-12, atol=0)


def test_samples_have_these_moments_and_independent_noise() -> None:
    posterior = make()
    with torch.no_grad():
        samples = torch.stack([posterior.sample(noise.make_key(1, index)) for index in range(20_000)])
        mean, std = posterior.mean(), posterior.std()
    assert ((samples.mean(0) - mean).abs() < 5 * std / 20_000**0.5).all()
    torch.testing.assert_close(samples.std(0), std, rtol=0.03, atol=0)
    correlation = torch.corrcoef(samples.T) - torch.eye(LAYOUT.numel)
    assert correlation.abs().max() < 0.04


def test_gradients_of_a_sample() -> None:
    posterior = make()
    weights = posterior.sample(KEY)
    epsilon = ((weights - posterior.mu) / posterior.std()).detach()
    slope = torch.linspace(-1, 1, LAYOUT.numel, dtype=torch.float64)
    of_mu, of_rho = torch.autograd.grad(weights @ slope, [posterior.mu, posterior.rho])
    by_hand = torch.autograd.grad((posterior.mu + posterior.std() * epsilon) @ slope, [posterior.rho])[0]
    torch.testing.assert_close(of_mu, slope)
    torch.testing.assert_close(of_rho, by_hand, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["sample", "flipout", "local", "mean"])
def test_all_rules_train_it(rule: str) -> None:
    network: Any = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    bnn = lb.bayesianize(network.to(memory_format=torch.channels_last), VDP(variance="row"))
    bnn.rule = rule
    assert isinstance(bnn.posterior, RowPosterior)
    assert bnn.posterior.rho.numel() == 3 + 4
    assert bnn.scale_parameters() == [bnn.posterior.rho]
    lb.elbo_loss(bnn, torch.randn(5, 1, 4, 4), torch.randint(4, (5,)), num_data=50).backward()
    assert bnn.posterior.rho.grad is not None
    assert (bnn.posterior.rho.grad != 0).all()


def test_it_converts_from_and_to_other_posteriors() -> None:
    first = lb.bayesianize(nn.Linear(6, 3).double(), lb.MeanField(init_std=0.2))
    with torch.no_grad():
        first.posterior.get_parameter("rho").add_(torch.linspace(0, 1, 18, dtype=torch.float64))
    rows = lb.bayesianize(first, VDP(variance="row"))
    expected = first.posterior.variance().view(3, 6).mean(1, keepdim=True).expand(3, 6)
    torch.testing.assert_close(rows.posterior.variance().view(3, 6), expected)
    again = lb.bayesianize(rows, lb.MeanField())
    torch.testing.assert_close(again.posterior.variance(), rows.posterior.variance())
    torch.testing.assert_close(again.posterior.mean(), first.posterior.mean())


def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    network = nn.Linear(6, 3)
    bnn = lb.bayesianize(network, VDP(variance="row", rule="sample"))
    with torch.no_grad():
        bnn.posterior.get_parameter("rho").add_(torch.arange(3.0))
    lb.save(bnn, tmp_path / "model.safetensors")
    again = lb.load(tmp_path / "model.safetensors", nn.Linear(6, 3))
    assert again.method == bnn.method
    assert torch.equal(again.posterior.variance(), bnn.posterior.variance())
