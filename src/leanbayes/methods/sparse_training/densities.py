"""The number of active weights per layer, for a given density of the whole network."""

import math
from collections.abc import Sequence
from typing import Literal

from leanbayes.core.layout import Layout
from leanbayes.core.ranking import part_of
from leanbayes.errors import LeanBayesError

Densities = Literal["erk", "uniform"]


def active_counts(layout: Layout, density: float, densities: Densities) -> list[int]:
    """Distribute round(density·n) active weights over the layers, at least one per layer.

    Args:
        layout: The layers.
        density: The fraction of all weights that are active.
        densities: "erk" (Erdős-Rényi kernel: Mocanu et al. 2018, Evci et al. 2020) makes a layer's density proportional
            to the sum of its dimensions over their product, so that small layers are dense. "uniform" keeps the first
            layer dense and gives all others the same density.
    """
    total = round(part_of(density, layout.numel))
    if total < len(layout):
        raise LeanBayesError(
            f"density={density} leaves {total} of {layout.numel} weights for {len(layout)} layers, which need at "
            "least one each: increase it."
        )
    if densities == "erk":
        ratios = [sum(slot.shape) / slot.numel if len(slot.shape) > 1 else 1.0 for slot in layout]
    else:
        ratios = [math.inf] + [1.0] * (len(layout) - 1)
        if layout.sizes[0] + len(layout) - 1 > total:
            raise LeanBayesError(
                f"density={density} leaves {total} weights, but densities='uniform' keeps the first layer dense, which "
                f"has {layout.sizes[0]}: increase it, or use densities='erk'."
            )
    return _round_to_total(_shares(layout.sizes, ratios, total), total)


def _shares(sizes: Sequence[int], ratios: Sequence[float], total: int) -> list[float]:
    """Find the factor ε for which all min(n, max(1, ε·ratio·n)) add up to the total, by bisection."""

    def shares(factor: float) -> list[float]:
        return [min(size, max(1.0, factor * ratio * size)) for size, ratio in zip(sizes, ratios, strict=True)]

    low, high = 0.0, 1 / min(ratios)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(shares(middle)) < total else (low, middle)
    return shares(high)


def _round_to_total(shares: Sequence[float], total: int) -> list[int]:
    """Round to integers with the given sum: the largest remainders are rounded up, the first of equal ones first."""
    shares = [round(share, 3) for share in shares]  # layers of one shape must tie, despite rounding errors
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number], number))
    for number in order[: total - sum(counts)]:
        counts[number] += 1
    return counts
