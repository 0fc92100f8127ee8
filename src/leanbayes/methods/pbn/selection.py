"""Select the weights with the highest scores: a given fraction of all weights, the same in every run."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.core.ranking import highest, part_of
from leanbayes.errors import LeanBayesError

Per = Literal["weight", "row", "layer"]


def check_rate(rate: float) -> None:
    """Raise an error for a rate that is not a fraction."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise LeanBayesError(f"rate={rate!r} must be a fraction of the weights, from 0 to 1.")


def count_of(rate: float, numel: int) -> int:
    """Return ⌊rate·n⌋."""
    check_rate(rate)
    return int(part_of(rate, numel))


def top(layout: Layout, scores: Tensor, rate: float, per: Per = "weight") -> Tensor:
    """Return the positions of the ⌊rate·n⌋ highest of n scores, in increasing order.

    Args:
        layout: The place of each parameter in the flat vector.
        scores: One score per weight. Ties go to the first weight in the layout.
        rate: The fraction of all weights to select.
        per: Select single weights, exactly ⌊rate·n⌋ of them; or whole rows (outputs of a layer) or whole layers in
            order of their mean score, each if it still fits, at most ⌊rate·n⌋ weights in all.
    """
    if per not in get_args(Per):
        raise LeanBayesError(f"per={per!r} is unknown: use 'weight', 'row' or 'layer'.")
    if not scores.isfinite().all():
        raise LeanBayesError("The sensitivity of some weights is NaN or infinite: check data and network for NaN.")
    number = count_of(rate, layout.numel)
    if rate > 0 and number == 0:
        raise LeanBayesError(f"rate={rate} of {layout.numel} weights is less than one weight: increase it, or use 0.")
    if number == 0:
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    if per == "weight":
        return highest(scores, number).sort().values
    parts = _rows(layout, scores.device) if per == "row" else list(_positions(layout, scores.device))
    chosen, left = [], number
    means = torch.stack([scores[part].mean() for part in parts])
    for place in means.argsort(descending=True, stable=True).tolist():
        if len(parts[place]) <= left:
            chosen.append(parts[place])
            left -= len(parts[place])
    if not chosen:
        smallest = min(map(len, parts))
        raise LeanBayesError(
            f"rate={rate} allows {number} weights, but the smallest {per} has {smallest}: increase it, or use 'weight'."
        )
    return torch.cat(chosen).sort().values


def _positions(layout: Layout, device: torch.device) -> Sequence[Tensor]:
    """Return the positions of each slot in the flat vector, in memory order."""
    return torch.arange(layout.numel, device=device).split(layout.sizes)


def _rows(layout: Layout, device: torch.device) -> list[Tensor]:
    """Return the positions of each row, an entry of a slot's first dimension."""
    parts = layout.split(torch.arange(layout.numel, device=device))
    return [row.flatten() for part in parts for row in (part if part.dim() else part[None])]
