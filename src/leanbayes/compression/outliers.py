"""Weights that share with none: those with an extreme mean, and those with a large gradient (section 4.1)."""

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.ranking import highest, part_of


def above(mean: Tensor, threshold: float) -> Tensor:
    """Mark the weights with |μ| > τ."""
    return mean.abs() > threshold


def top_share(values: Tensor, share: float) -> Tensor:
    """Mark exactly ⌊share·n⌋ weights: those with the largest |value|, the first among equals."""
    if not 0 <= share <= 1:
        raise LeanBayesError(f"A share of outliers must lie between 0 and 1, and not be {share}.")
    marked = torch.zeros_like(values, dtype=torch.bool)
    number = int(part_of(share, values.numel()))
    return marked.index_fill_(0, highest(values.abs(), number), True) if number else marked


def find_outliers(
    mean: Tensor, gradient: Tensor | None, threshold: float | None = 0.2, gradient_share: float = 0.01
) -> Tensor:
    """Mark weights with |μ| > τ (None: no limit), and a share of all weights with the largest |gradient|."""
    marked = torch.zeros_like(mean, dtype=torch.bool) if threshold is None else above(mean, threshold)
    return marked if gradient is None else marked | top_share(gradient, gradient_share)
