"""Entropy-constrained vector quantization (Chou, Lookabaugh and Gray 1989): codes with little loss and few bits.

A weight N(μ, σ²) with the code N(m, s²) costs KL(N(m, s²) ‖ N(μ, σ²)) nats and -log2 p bits, with p the fraction of the
weights that have this code. At the optimum of the ELBO, 1/σ² is the curvature of loss and prior, and to second order
this KL is the increase of the negative ELBO:
    ½[s² + (m - μ)²]/σ² - log s + constant.
A mean with a small σ is therefore kept more precisely, and the best code of a set of weights has a closed form.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.methods.weight_sharing.tiles import Bounds, Tiles, segment_sum

_ROUNDS = 100
_STABLE = 1e-4  # nats per weight that a round must gain
_MARGIN = 1e-5  # more than the rounding error of a bound in fp32, relative to σ²


@dataclass(frozen=True)
class Priced:
    """Codes, the number of weights of each, the label of each weight, and the total cost."""

    mean: Tensor
    std: Tensor
    counts: Tensor
    labels: Tensor
    cost: float


def entropy_constrained(
    mean: Tensor, std: Tensor, code_mean: Tensor, code_std: Tensor, price: float, minimum: int = 1
) -> Priced:
    """Minimize Σ KL + price·bits over labels and codes, from the given codes, until the cost converges.

    Args:
        mean: μ of each weight.
        std: σ of each weight.
        code_mean: Initial means of the codes.
        code_std: Initial stds of the codes.
        price: Nats per bit.
        minimum: The smallest number of members of a code. Smaller codes are removed, and the rest is optimized again.
    """
    if not (math.isfinite(price) and price >= 0):
        raise LeanBayesError(f"bit_price={price} must not be negative or infinite.")
    if not (std > 0).all():
        raise LeanBayesError("bit_price needs weights with σ > 0, and these have none: leave bit_price out.")
    tiles = Tiles(torch.stack([mean, std], 1))
    code_mean, code_std = code_mean.double(), code_std.double()
    bits = torch.zeros_like(code_mean)
    while True:
        found = settle(tiles, mean, std, code_mean, code_std, bits, price)
        kept = found.counts >= min(minimum, int(found.counts.max()))
        if kept.all():
            return found
        code_mean, code_std, bits = found.mean[kept], found.std[kept], code_lengths(found.counts[kept])


def settle(
    tiles: Tiles, mean: Tensor, std: Tensor, code_mean: Tensor, code_std: Tensor, bits: Tensor, price: float
) -> Priced:
    """Alternate between the cheapest code of each weight and the best codes for these labels. The cost decreases."""
    last = math.inf
    for _ in range(_ROUNDS):
        labels = cheapest(tiles, code_mean, code_std, price * bits)
        found = best_codes(mean, std, labels, len(code_mean), price)
        if last - found.cost <= _STABLE * len(mean):
            break
        code_mean, code_std, bits, last = found.mean, found.std, code_lengths(found.counts), found.cost
    return found


def code_lengths(counts: Tensor) -> Tensor:
    """Return the bits of a label: -log2 of the fraction of the weights that have it."""
    return math.log2(max(1, int(counts.sum()))) - counts.double().log2()


def best_codes(mean: Tensor, std: Tensor, labels: Tensor, count: int, price: float) -> Priced:
    """Return the best codes for these labels: means weighted by 1/σ², and s² = 1/mean(1/σ²). Empty ones are removed."""
    used, labels = _renumbered(labels, count)
    mean, std = mean.double(), std.double()
    counts = torch.bincount(labels, minlength=used)
    precision = std.square().reciprocal()
    total = segment_sum(precision, labels, used)
    center = segment_sum(precision * mean, labels, used) / total
    width = (counts / total).sqrt()
    apart = (precision * (mean - center[labels]).square()).sum()
    loss = 0.5 * apart - (counts * width.log()).sum() + std.log().sum()
    cost = float(loss + price * (counts * code_lengths(counts)).sum())
    return Priced(center, width, counts, labels, cost)


def _renumbered(labels: Tensor, count: int) -> tuple[int, Tensor]:
    """Renumber the labels without unused numbers, and return how many are used."""
    used = torch.bincount(labels, minlength=count) > 0
    return int(used.sum()), (used.cumsum(0) - 1)[labels]


def cheapest(tiles: Tiles, code_mean: Tensor, code_std: Tensor, lengths: Tensor) -> Tensor:
    """Return the cheapest code of each weight. The result is exact. `lengths` are nats in addition to the KL."""
    codes = [part.float() for part in (code_mean, code_std.square(), lengths - code_std.log())]
    labels = torch.empty_like(tiles.order)
    for block in tiles.search(len(code_mean), _bounds(code_mean, code_std, lengths)).blocks(tiles.size):
        near, square, rest = (part[block.items][..., None] for part in codes)
        rest = rest.masked_fill(~block.valid[..., None], torch.inf)
        # σ² times the cost, without terms that all codes share.
        costs = (tiles.x[block.tiles][:, None] - near).square_().add_(square).mul_(0.5)
        costs.addcmul_(tiles.y[block.tiles].square()[:, None], rest)
        labels[block.tiles] = block.items.gather(1, costs.argmin(1))
    return tiles.unsorted(labels)


def _bounds(code_mean: Tensor, code_std: Tensor, lengths: Tensor) -> Bounds:
    """Return bounds of -σ²·cost over a box of μ and σ, with σ²·cost = ½(m-μ)² + ½(s²-σ²) - σ²·log(s/σ) + σ²·length.

    σ²·cost is convex in σ², with the minimum at σ = s·e^-length.
    """
    center, width, length = code_mean.float(), code_std.float(), lengths.float()
    turn = (code_std * (-lengths).exp()).float()

    def bounds(low: Tensor, high: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        mean, std, extra = center[items], width[items], length[items]

        def cost(apart: Tensor, sigma: Tensor) -> Tensor:
            square = sigma.square()
            return 0.5 * (apart.square() + std.square() - square) + square * (extra - (std / sigma).log())

        (x0, y0), (x1, y1) = low.unbind(1), high.unbind(1)
        nearest = torch.maximum(x0 - mean, mean - x1).clamp_min(0)
        farthest = torch.maximum((mean - x0).abs(), (mean - x1).abs())
        least = cost(nearest, torch.clamp(turn[items], y0, y1))
        most = torch.maximum(cost(farthest, y0), cost(farthest, y1))
        return _MARGIN * y1.square() - least * (1 - _MARGIN), -most

    return bounds
