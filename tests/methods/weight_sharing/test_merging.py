"""Merging components: distance compared with eigh, moments, limits, and independence of the order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_cases import random_mixture
from torch import Tensor

from leanbayes.methods.weight_sharing import merging
from leanbayes.methods.weight_sharing.merging import MergeLimits, combine, combine_as_printed, merge, wasserstein2
from leanbayes.methods.weight_sharing.mixture import Mixture


def root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT


def second_moment(mixture: Mixture) -> Tensor:
    outer = mixture.mean[:, :, None] * mixture.mean[:, None]
    return (mixture.mass[:, None, None] * (mixture.covariance + outer)).sum(0)


def all_pairs(mixture: Mixture) -> Tensor:
    number = len(mixture)
    left, right = torch.triu_indices(number, number, 1)
    return wasserstein2(mixture[left], mixture[right])


@given(st.integers(0, 10_000), st.sampled_from([1.0, 1e-5]))
@settings(max_examples=60, deadline=None)
def test_the_distance_equals_that_from_eigh(seed: int, scale: float) -> None:
    a, b = random_mixture(5, seed, scale), random_mixture(5, seed + 1, scale)
    half = root(a.covariance)
    inner = a.covariance + b.covariance - 2 * root(half @ b.covariance @ half)
    expected = (a.mean - b.mean).square().sum(1) + inner.diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(wasserstein2(a, b), expected, rtol=1e-6, atol=1e-9 * scale**2)


def test_the_distance_to_itself_is_zero() -> None:
    mixture = random_mixture(50, 1)
    assert (wasserstein2(mixture, mixture) <= 1e-12).all()


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_merging_preserves_the_moments(seed: int) -> None:
    a, b = random_mixture(1, seed), random_mixture(1, seed + 1)
    both, merged = Mixture(*(torch.cat(parts) for parts in zip(*map(vars_of, (a, b)), strict=True))), combine(a, b)
    torch.testing.assert_close(merged.mass.sum(), both.mass.sum())
    torch.testing.assert_close(merged.mass @ merged.mean, both.mass @ both.mean)
    torch.testing.assert_close(second_moment(merged), second_moment(both))


def vars_of(mixture: Mixture) -> tuple[Tensor, Tensor, Tensor]:
    return mixture.mean, mixture.covariance, mixture.mass


def test_equal_components_merge_unchanged_but_not_as_printed() -> None:
    one = random_mixture(3, 5)
    torch.testing.assert_close(combine(one, one).covariance, one.covariance)
    torch.testing.assert_close(combine_as_printed(one, one).covariance, 1.5 * one.covariance)


def test_the_printed_equations() -> None:
    a, b = random_mixture(4, 6), random_mixture(4, 7)
    half, apart = root(a.covariance), a.mean - b.mean
    expected = 0.5 * (a.covariance + b.covariance) + apart[:, :, None] * apart[:, None] / 8
    expected = expected + 0.5 * root(half @ b.covariance @ half)
    torch.testing.assert_close(combine_as_printed(a, b).covariance, expected)


@given(st.integers(1, 60), st.integers(0, 10_000), st.floats(0, 3), st.sampled_from(["moments", "paper"]))
@settings(max_examples=40, deadline=None)
def test_the_order_of_components_does_not_matter(
    count: int, seed: int, distance: float, rule: merging.MergeRule
) -> None:
    mixture, gradient = random_mixture(count, seed), torch.rand(count, dtype=torch.float64)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    limits = MergeLimits(distance, gradient=0.7, variance=4.0)
    merged, numbers = merge(mixture, limits, gradient, rule)
    other, renumbered = merge(mixture[order], limits, gradient[order], rule)
    for ours, theirs in zip(vars_of(merged), vars_of(other), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(numbers[order], renumbered)


@given(st.integers(2, 60), st.integers(0, 10_000), st.floats(0, 3))
@settings(max_examples=40, deadline=None)
def test_merging_ends_without_pairs_and_preserves_the_moments(count: int, seed: int, distance: float) -> None:
    mixture = random_mixture(count, seed)
    merged, numbers = merge(mixture, MergeLimits(distance))
    assert not len(merged) > 1 or float(all_pairs(merged).min()) >= distance
    torch.testing.assert_close(merged.mass.sum(), mixture.mass.sum())
    torch.testing.assert_close(merged.mass @ merged.mean, mixture.mass @ mixture.mean)
    torch.testing.assert_close(second_moment(merged), second_moment(mixture))
    members = torch.zeros_like(merged.mass).index_add_(0, numbers, mixture.mass)
    torch.testing.assert_close(members, merged.mass)
    sums = torch.zeros_like(merged.mean).index_add_(0, numbers, mixture.mass[:, None] * mixture.mean)
    torch.testing.assert_close(sums / merged.mass[:, None], merged.mean)


def test_the_chunk_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = random_mixture(80, 3)
    whole, numbers = merge(mixture, MergeLimits(0.8))
    monkeypatch.setattr(merging, "_PAIRS", 5)
    parts, other = merge(mixture, MergeLimits(0.8))
    assert torch.equal(whole.mean, parts.mean)
    assert torch.equal(numbers, other)
    assert len(whole) < 80


def pair(gap: float = 0.0, wider: float = 1.0) -> Mixture:
    mean = torch.tensor([[0.0, 1.0], [gap, 1.0]], dtype=torch.float64)
    covariance = torch.eye(2, dtype=torch.float64).expand(2, 2, 2) * torch.tensor([1.0, wider])[:, None, None]
    return Mixture(mean, 1e-4 * covariance.double(), torch.tensor([3.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("limits", "gradients", "count"),
    [
        (MergeLimits(1e-3), (0.0, 0.0), 1),
        (MergeLimits(1e-5), (0.0, 0.0), 2),
        (MergeLimits(0.0), (0.0, 0.0), 2),
        (MergeLimits(1e-3, gradient=0.5), (0.4, 0.6), 2),
        (MergeLimits(1e-3, gradient=0.5, differences=True), (0.4, 0.6), 1),
        (MergeLimits(1e-3, gradient=0.1, differences=True), (0.4, 0.6), 2),
        (MergeLimits(1e-3, variance=2.1e-4), (0.0, 0.0), 2),
        (MergeLimits(1e-3, variance=2.3e-4), (0.0, 0.0), 1),
        (MergeLimits(1e-3, variance=1e-4, differences=True), (0.0, 0.0), 1),
    ],
)
def test_limits(limits: MergeLimits, gradients: tuple[float, float], count: int) -> None:
    merged, _ = merge(pair(0.01, 1.1), limits, torch.tensor(gradients))
    assert len(merged) == count
