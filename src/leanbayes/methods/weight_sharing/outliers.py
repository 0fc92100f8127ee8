"""Outliers, which share with no other weight: those with an extreme mean or a large gradient (section 4.1)."""

import torch
from torch import Tensor

from leanbayes.core.ranking import highest, part_of
from leanbayes.errors import LeanBayesError


def above(mean: Tensor, threshold: float) -> Tensor:
    """Return a mask of the weights with |μ| > τ."""
    return mean.abs() > threshold


def top_share(values: Tensor, share: float) -> Tensor:
    """Return a mask of the ⌊share·n⌋ weights with the largest |value|, the first ones among equals."""
    if not 0 <= share <= 1:
        raise LeanBayesError(f"The share of outliers must be a fraction between 0 and 1, not {share}.")
    marked = torch.zeros_like(values, dtype=torch.bool)
    number = int(part_of(share, values.numel()))
    return marked.index_fill_(0, highest(values.abs(), number), True) if number else marked


def find_outliers(
    mean: Tensor, gradient: Tensor | None, threshold: float | None = 0.2, gradient_share: float = 0.01
) -> Tensor:
    """Return a mask of the weights with |μ| > τ (None: no limit), and of a share with the largest |gradient|."""
    marked = torch.zeros_like(mean, dtype=torch.bool) if threshold is None else above(mean, threshold)
    return marked if gradient is None else marked | top_share(gradient, gradient_share)
