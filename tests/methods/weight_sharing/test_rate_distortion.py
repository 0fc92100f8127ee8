"""A price on bits: cheapest codes compared with all costs, closed forms with torch, and the effect of the price."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_cases import plane
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import leanbayes as lb
from leanbayes.methods.weight_sharing.codebook import Sharing, SharingSettings, share_weights
from leanbayes.methods.weight_sharing.rate_distortion import (
    Priced,
    best_codes,
    cheapest,
    code_lengths,
    entropy_constrained,
    settle,
)
from leanbayes.methods.weight_sharing.tiles import Tiles


def weights(count: int = 5000, seed: int = 0) -> tuple[Tensor, Tensor]:
    points = plane(count, seed).double()
    return points[:, 0], points[:, 1]


def some_codes(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return weights(count, seed)


def all_costs(mean: Tensor, std: Tensor, code_mean: Tensor, code_std: Tensor, lengths: Tensor) -> Tensor:
    """Return KL(code ‖ weight) + length of all pairs (n, K)."""
    codes, own = Normal(code_mean, code_std), Normal(mean[:, None], std[:, None])
    return kl_divergence(codes, own) + lengths


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(1, 3000),
    number=st.integers(1, 60),
    seed=st.integers(0, 99),
    price=st.sampled_from([0.0, 0.03, 1.0, 30.0]),
)
def test_the_cheapest_codes_are_exact(count: int, number: int, seed: int, price: float) -> None:
    mean, std = weights(count, seed)
    centers, stds = some_codes(number, seed + 1)
    lengths = price * torch.rand(number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
    labels = cheapest(Tiles(torch.stack([mean, std], 1)), centers, stds, lengths)
    costs = all_costs(mean, std, centers, stds, lengths)
    chosen = costs.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(chosen, costs.amin(1), rtol=1e-4, atol=1e-4)


def test_the_best_codes_have_zero_gradient_and_the_cost_is_the_sum() -> None:
    mean, std = weights(500)
    labels = torch.arange(500) % 7
    found = best_codes(mean, std, labels, 9, 0.2)  # two codes are empty
    assert len(found.mean) == 7
    parameters = [part.clone().requires_grad_() for part in (found.mean, found.std)]
    codes = Normal(parameters[0][labels], parameters[1][labels])
    loss = kl_divergence(codes, Normal(mean, std)).sum()
    for slope in torch.autograd.grad(loss, parameters):
        torch.testing.assert_close(slope * found.std, torch.zeros_like(slope), rtol=0, atol=1e-7)
    share = torch.bincount(labels) / 500
    bits = -500 * (share * share.log2()).sum()
    assert found.cost == pytest.approx(float(loss.detach() + 0.2 * bits), rel=1e-6)


def test_the_cost_decreases_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, std = weights()
    costs: list[float] = []

    def recorded(*args: Any) -> Priced:
        found = best_codes(*args)
        costs.append(found.cost)
        return found

    monkeypatch.setattr("leanbayes.methods.weight_sharing.rate_distortion.best_codes", recorded)
    centers, stds = some_codes(50)
    tiles = Tiles(torch.stack([mean, std], 1))
    settle(tiles, mean, std, centers, stds, torch.zeros_like(centers), 0.3)
    assert len(costs) > 3
    assert all(later <= earlier + 1e-6 * abs(earlier) for earlier, later in pairwise(costs))


def entropy(counts: Tensor) -> float:
    return float((counts * code_lengths(counts)).sum() / counts.sum())


def test_a_higher_price_gives_fewer_bits_and_more_loss() -> None:
    mean, std = weights()
    found = [entropy_constrained(mean, std, *some_codes(60), price) for price in (0.0, 0.1, 0.5, 2.0)]
    bits = [entropy(one.counts) for one in found]
    losses = [
        float(kl_divergence(Normal(one.mean[one.labels], one.std[one.labels]), Normal(mean, std)).mean())
        for one in found
    ]
    assert bits == sorted(bits, reverse=True)
    assert losses == sorted(losses)
    assert bits[0] > bits[-1] + 2
    for one, loss, length, price in zip(found, losses, bits, (0.0, 0.1, 0.5, 2.0), strict=True):
        assert one.cost / len(mean) == pytest.approx(loss + price * length, rel=1e-6)


def test_codes_have_the_minimum_number_of_members() -> None:
    mean, std = weights(1000)
    assert int(entropy_constrained(mean, std, *some_codes(60), 0.0, 1).counts.min()) < 20
    assert int(entropy_constrained(mean, std, *some_codes(60), 0.0, 20).counts.min()) >= 20


def shared(price: float | None, layers: list[int] | None = None) -> tuple[Sharing, Tensor, Tensor]:
    mean, std = (part.float() for part in weights(20_000))
    choice = SharingSettings(60, threshold=0.05, border=None, steps=8, bit_price=price)
    return share_weights(mean, std, choice, layers=layers), mean, std


@pytest.mark.parametrize("layers", [None, [12_000, 8000]])
def test_sharing_with_a_price(layers: list[int] | None) -> None:
    plain, mean, std = shared(None, layers)
    precise, cheap = shared(0.0, layers)[0], shared(0.5, layers)[0]

    def loss(sharing: Sharing) -> float:
        loc, variance = sharing.weights(mean, std)
        return float(kl_divergence(Normal(loc, variance.sqrt()), Normal(mean, std)).mean())

    assert loss(precise) < loss(plain)
    assert loss(cheap) > loss(precise)
    assert entropy(cheap.counts) < entropy(precise.counts) - 1
    for sharing in (precise, cheap):
        assert torch.equal(torch.bincount(sharing.labels[sharing.labels >= 0]), sharing.counts)
        assert torch.equal(sharing.outliers, plain.outliers)
        assert not len(sharing.blended)
        member = sharing.labels == 0
        center = torch.stack([sharing.mean[0], sharing.std[0]])
        apart = torch.stack([mean[member], std[member]], 1).double() - center
        torch.testing.assert_close(sharing.covariance[0], (apart.T @ apart / len(apart)).float(), rtol=1e-3, atol=1e-12)


def test_invalid_prices_raise_an_error() -> None:
    mean, std = weights(100)
    with pytest.raises(lb.LeanBayesError, match="must not be negative"):
        entropy_constrained(mean, std, *some_codes(3), -1.0)
    with pytest.raises(lb.LeanBayesError, match="these have none"):
        entropy_constrained(mean, 0 * std, *some_codes(3), 1.0)
    with pytest.raises(lb.LeanBayesError, match="by its 1/σ²"):
        share_weights(mean, std, SharingSettings(2, metric="sensitivity", bit_price=0.1), sensitivity=std)
