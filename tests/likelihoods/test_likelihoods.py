"""Likelihoods against torch.distributions, in double precision."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributions, nn

import leanbayes as lb
from leanbayes.core import config

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
seeds = st.integers(0, 2**32)
few = settings(max_examples=25, deadline=None)


def randn(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randint(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def check(likelihood: Any, output: Tensor, y: Tensor, log_probs: Tensor, observations: int) -> None:
    likelihood.check_shape(output, y)
    likelihood.check_values(output, y)
    total, count = likelihood.nll(output, y)
    torch.testing.assert_close(total, -log_probs.sum(), rtol=1e-10, atol=1e-10)
    assert int(count) == observations


# -- classes ----------------------------------------------------------------------------------------------------------


@few
@given(shapes, st.integers(1, 5), st.sampled_from(["first", "last"]), seeds)
def test_categorical_counts_every_position(shape: tuple[int, ...], classes: int, dim: str, seed: int) -> None:
    batch, *positions = shape
    logits = randn(seed, batch, *positions, classes)
    y = randint(seed, classes, batch, *positions)
    expected = distributions.Categorical(logits=logits).log_prob(y)
    if dim == "first":
        check(lb.Categorical(), logits.movedim(-1, 1), y, expected, y.numel())
    else:
        check(lb.Categorical(class_dim=-1), logits, y, expected, y.numel())


@few
@given(st.sampled_from([-100, -1, 0, 255]), seeds)
def test_ignored_pixels_do_not_count(ignore: int, seed: int) -> None:
    logits = randn(seed, 2, 4, 3, 5)
    y = randint(seed, 4, 2, 3, 5)
    y[randn(seed + 1, 2, 3, 5) > 1] = ignore
    kept = y != ignore
    per_pixel = distributions.Categorical(logits=logits.movedim(1, -1)).log_prob(y.where(kept, 0))
    expected = per_pixel[kept].sum()
    check(lb.Categorical(ignore_index=ignore), logits, y, expected, max(int(kept.sum()), 1))


@pytest.mark.parametrize("samples", [1, 2])
def test_loss_of_a_batch_without_labels_is_finite(samples: int) -> None:
    bnn = lb.bayesianize(nn.Conv2d(3, 4, 1), lb.MeanField())
    y = torch.full((2, 5, 5), -100)
    loss = lb.elbo_loss(bnn, torch.randn(2, 3, 5, 5), y, num_data=10, samples=samples)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in bnn.parameters())


def test_kl_of_a_batch_without_labels_is_bounded() -> None:
    bnn = lb.bayesianize(nn.Conv2d(3, 4, 1), lb.MeanField())
    x, kl = torch.randn(2, 3, 5, 5), bnn.kl().item()
    unlabeled = lb.elbo_loss(bnn, x, torch.full((2, 5, 5), -100), num_data=10).item()
    assert unlabeled <= kl / 10 * (1 + 1e-5)  # no more than for one labeled pixel per image


# -- yes and no -------------------------------------------------------------------------------------------------------


@few
@given(shapes, seeds)
def test_bernoulli_sums_the_outputs_of_an_example(shape: tuple[int, ...], seed: int) -> None:
    logits, y = randn(seed, *shape), randint(seed, 2, *shape)
    expected = distributions.Bernoulli(logits=logits).log_prob(y.double())
    check(lb.Bernoulli(), logits, y, expected, shape[0])
    check(lb.Bernoulli(), logits, y.double(), expected, shape[0])
    check(lb.Bernoulli(), logits, y.bool(), expected, shape[0])


# -- real numbers -----------------------------------------------------------------------------------------------------


@few
@given(shapes, st.floats(1e-3, 1e3), st.booleans(), seeds)
def test_gaussian_is_the_log_density(shape: tuple[int, ...], std: float, learned: bool, seed: int) -> None:
    likelihood = lb.Gaussian(std, learned=learned)
    assert likelihood.std.item() == pytest.approx(std, rel=1e-5)
    likelihood.double()
    mean, y = randn(seed, *shape), randn(seed + 1, *shape)
    expected = distributions.Normal(mean, likelihood.std.detach()).log_prob(y)
    check(likelihood, mean, y, expected, shape[0])
    assert len(list(likelihood.parameters())) == learned


@few
@given(shapes, st.floats(1e-8, 1.0), seeds)
def test_heteroscedastic_splits_the_last_dimension(shape: tuple[int, ...], least: float, seed: int) -> None:
    mean, raw, y = (randn(seed + i, *shape) for i in range(3))
    std = (nn.functional.softplus(raw) + least).sqrt()
    expected = distributions.Normal(mean, std).log_prob(y)
    output = torch.cat([mean, raw], dim=-1)
    check(lb.HeteroscedasticGaussian(min_variance=least), output, y, expected, shape[0])


def test_heteroscedastic_is_finite_at_extreme_outputs() -> None:
    output = torch.tensor([[0.0, -1e4], [0.0, 1e4]])
    total, _ = lb.HeteroscedasticGaussian().nll(output, torch.ones(2, 1))
    assert total.isfinite()


@pytest.mark.parametrize("start", [0.1, 1.0])
def test_learned_noise_finds_that_of_the_data(start: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(400, 1, generator=generator)
    residual = y - x @ torch.linalg.lstsq(x, y).solution
    bnn = lb.bayesianize(nn.Linear(3, 1), lb.MeanField(lb.Normal(1.0)), likelihood=lb.Gaussian(start, learned=True))
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.03, betas=(0.9, 0.99))
    for _ in range(600):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=400).backward()
        optimizer.step()
    assert isinstance(bnn.likelihood, lb.Gaussian)
    assert bnn.likelihood.std.item() == pytest.approx(residual.std().item(), rel=0.05)


def test_fixed_noise_stays() -> None:
    bnn = lb.bayesianize(nn.Linear(3, 1), lb.MeanField(), likelihood=lb.Gaussian(0.5))
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
    lb.elbo_loss(bnn, torch.randn(4, 3), torch.randn(4, 1), num_data=4).backward()
    optimizer.step()
    assert isinstance(bnn.likelihood, lb.Gaussian)
    assert bnn.likelihood.std.item() == pytest.approx(0.5)


# -- precision and settings -------------------------------------------------------------------------------------------

HALF_CASES: list[tuple[Any, int, Tensor]] = [
    (lb.Categorical(), 4, randint(1, 4, 6)),
    (lb.Bernoulli(), 4, randint(1, 2, 6, 4)),
    (lb.Gaussian(0.3), 4, randn(1, 6, 4).float()),
    (lb.HeteroscedasticGaussian(), 4, randn(1, 6, 2).float()),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("likelihood", "width", "y"), HALF_CASES)
def test_half_precision_outputs_are_scored_in_single_precision(
    likelihood: Any, width: int, y: Tensor, dtype: torch.dtype
) -> None:
    output = randn(0, 6, width).to(dtype)
    total, _ = likelihood.nll(output, y)
    assert total.dtype == torch.float32
    assert total == likelihood.nll(output.float(), y).total


def test_noise_of_a_half_precision_model_is_scored_in_single_precision() -> None:
    likelihood = lb.Gaussian(0.3).to(torch.bfloat16)
    output, y = randn(0, 6, 4).to(torch.bfloat16), randn(1, 6, 4).float()
    expected = -distributions.Normal(output.double(), 0.3).log_prob(y.double()).sum()
    assert likelihood.nll(output, y).total.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "likelihood",
    [
        lb.Categorical(),
        lb.Categorical(ignore_index=255, class_dim=-1),
        lb.Bernoulli(),
        lb.Gaussian(0.25),
        lb.Gaussian(2.0, learned=True),
        lb.HeteroscedasticGaussian(1e-3),
    ],
)
def test_settings_survive_encoding(likelihood: Any) -> None:
    again = config.decode(config.encode(likelihood))
    assert type(again) is type(likelihood)
    assert again.settings == likelihood.settings
    output = randn(0, 3, 4).float()
    y = {lb.Categorical: torch.tensor([0, 3, 1]), lb.HeteroscedasticGaussian: output[:, :2]}.get(
        type(likelihood), output.abs().clamp_max(1)
    )
    assert again.nll(output, y).total.item() == likelihood.nll(output, y).total.item()
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in likelihood.parameters()]
