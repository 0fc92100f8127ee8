"""Selection of the highest of many values, the same in every run."""

from fractions import Fraction

import torch
from torch import Tensor


def highest(values: Tensor, number: int) -> Tensor:
    """Return the indices of the highest values in descending order; ties go to the first. NaN counts as 0."""
    values = values.nan_to_num(0.0, torch.inf, -torch.inf)
    # topk does not specify which of equal values it takes, and sorting all values takes ten times as long.
    candidates = (values >= values.topk(number).values[-1]).nonzero()[:, 0]
    return candidates[values[candidates].argsort(descending=True, stable=True)[:number]]


def part_of(share: float, number: int) -> Fraction:
    """Return share·number exactly for a decimal fraction: 0.29 of 100 is 29, although 0.29 * 100 is slightly less."""
    return Fraction(float(share)).limit_denominator(10**9) * number
