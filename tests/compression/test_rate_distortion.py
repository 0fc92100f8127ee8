"""A price on bits: the cheapest codes against all costs, closed forms against torch, and what a price buys."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from compression_cases import plane
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import leanbayes as lb
from leanbayes.compression.rate_distortion import (
    Priced,
    best_codes,
    cheapest,
    code_lengths,
    entropy_constrained,
    settle,
)
from leanbayes.compression.sharing import Sharing, SharingSettings, share_weights
from leanbayes.compression.tiles import Tiles


def weights(count: int = 5000, seed: int = 0) -> tuple[Tensor, Tensor]:
    points = plane(count, seed).double()
    return points[:, 0], points[:, 1]


def some_codes(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return weights(count, seed)


def all_costs(mean: Tensor, std: Tensor, code_mean: Tensor, code_std: Tensor, lengths: Tensor) -> Tensor:
    """KL(code ‖ weight) + length, (n, K)."""
    codes, own = Normal(code_mean, code_std), Normal(mean[:, None], std[:, None])
    return kl_divergence(codes, own) + lengths


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(1, 3000),
    number=st.integers(1, 60),
    seed=st.integers(0, 99),
    price=st.sampled_from([0.0, 0.03, 1.0, 30.0]),
)
def test_the_cheapest_codes_are_those_of_all_costs(count: int, number: int, seed: int, price: float) -> None:
    mean, std = weights(count, seed)
    centres, stds = some_codes(number, seed + 1)
    lengths = price * torch.rand(number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
    labels = cheapest(Tiles(torch.stack([mean, std], 1)), centres, stds, lengths)
    costs = all_costs(mean, std, centres, stds, lengths)
    chosen = costs.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(chosen, costs.amin(1), rtol=1e-4, atol=1e-4)


def test_the_best_codes_have_no_slope_and_the_cost_is_the_sum() -> None:
    mean, std = weights(500)
    labels = torch.arange(500) % 7
    found = best_codes(mean, std, labels, 9, 0.2)  # two codes have nobody
    assert len(found.mean) == 7
    parameters = [part.clone().requires_grad_() for part in (found.mean, found.std)]
    codes = Normal(parameters[0][labels], parameters[1][labels])
    loss = kl_divergence(codes, Normal(mean, std)).sum()
    for slope in torch.autograd.grad(loss, parameters):
        torch.testing.assert_close(slope * found.std, torch.zeros_like(slope), rtol=0, atol=1e-7)
    share = torch.bincount(labels) / 500
    bits = -500 * (share * share.log2()).sum()
    assert found.cost == pytest.approx(float(loss.detach() + 0.2 * bits), rel=1e-6)


def test_the_cost_falls_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, std = weights()
    costs: list[float] = []

    def watched(*args: Any) -> Priced:
        found = best_codes(*args)
        costs.append(found.cost)
        return found

    monkeypatch.setattr("leanbayes.compression.rate_distortion.best_codes", watched)
    centres, stds = some_codes(50)
    tiles = Tiles(torch.stack([mean, std], 1))
    settle(tiles, mean, std, centres, stds, torch.zeros_like(centres), 0.3)
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


def test_codes_have_enough_members() -> None:
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
        centre = torch.stack([sharing.mean[0], sharing.std[0]])
        apart = torch.stack([mean[member], std[member]], 1).double() - centre
        torch.testing.assert_close(sharing.covariance[0], (apart.T @ apart / len(apart)).float(), rtol=1e-3, atol=1e-12)


def test_bad_prices() -> None:
    mean, std = weights(100)
    with pytest.raises(lb.LeanBayesError, match="not negative"):
        entropy_constrained(mean, std, *some_codes(3), -1.0)
    with pytest.raises(lb.LeanBayesError, match="none here has one"):
        entropy_constrained(mean, 0 * std, *some_codes(3), 1.0)
    with pytest.raises(lb.LeanBayesError, match="its own 1/σ²"):
        share_weights(mean, std, SharingSettings(2, metric="sensitivity", bit_price=0.1), sensitivity=std)
