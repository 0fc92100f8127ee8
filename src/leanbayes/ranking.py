"""The highest of many values, the same in every run, and how many a share of them is."""

from fractions import Fraction

import torch
from torch import Tensor


def highest(values: Tensor, number: int) -> Tensor:
    """Return the places of the highest values, from the highest on; the first among equals. NaN counts as 0."""
    values = values.nan_to_num(0.0, torch.inf, -torch.inf)
    # Which of equal values topk takes is not said, and sorting all of them takes ten times as long.
    candidates = (values >= values.topk(number).values[-1]).nonzero()[:, 0]
    return candidates[values[candidates].argsort(descending=True, stable=True)[:number]]


def part_of(share: float, number: int) -> Fraction:
    """share·n, of the fraction that was meant: 0.29 of 100 are 29, where 0.29 * 100 is a little less."""
    return Fraction(float(share)).limit_denominator(10**9) * number
