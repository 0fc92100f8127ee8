"""How many weights of each layer are active, so that a given share of all is."""

import math
from collections.abc import Sequence
from typing import Literal

from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout
from leanbayes.ranking import part_of

Densities = Literal["erk", "uniform"]


def active_counts(layout: Layout, density: float, densities: Densities) -> list[int]:
    """Share round(density·n) active weights out among the layers, at least one each and at most all of each.

    erk (Erdős–Rényi kernel: Mocanu et al. 2018, Evci et al. 2020): a layer's density is proportional to the sum of its
    dimensions over their product, so small layers are dense. uniform: the first layer is dense, all others are alike.
    """
    total = round(part_of(density, layout.numel))
    if total < len(layout):
        raise LeanBayesError(
            f"density={density} leaves {total} of {layout.numel} weights for {len(layout)} layers, which need at "
            "least one each: raise it."
        )
    if densities == "erk":
        ratios = [sum(slot.shape) / slot.numel if len(slot.shape) > 1 else 1.0 for slot in layout]
    else:
        ratios = [math.inf] + [1.0] * (len(layout) - 1)
        if layout.sizes[0] + len(layout) - 1 > total:
            raise LeanBayesError(
                f"density={density} leaves {total} weights, and the first layer, which densities='uniform' keeps "
                f"dense, has {layout.sizes[0]} alone: raise it, or use densities='erk'."
            )
    return _whole(_shares(layout.sizes, ratios, total), total)


def _shares(sizes: Sequence[int], ratios: Sequence[float], total: int) -> list[float]:
    """Find the factor ε for which all min(n, max(1, ε·ratio·n)) add up to the total, by bisection."""

    def shares(factor: float) -> list[float]:
        return [min(size, max(1.0, factor * ratio * size)) for size, ratio in zip(sizes, ratios, strict=True)]

    low, high = 0.0, 1 / min(ratios)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(shares(middle)) < total else (low, middle)
    return shares(high)


def _whole(shares: Sequence[float], total: int) -> list[int]:
    """Round to whole numbers with the same sum: the largest remainders go up, the first among equals."""
    shares = [round(share, 3) for share in shares]  # layers of one shape are equals, whatever the last bits say
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number], number))
    for number in order[: total - sum(counts)]:
        counts[number] += 1
    return counts
