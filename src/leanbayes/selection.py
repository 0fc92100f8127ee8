"""Choosing the weights with the highest scores: exactly as many as a share of all allows, the same in every run."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout
from leanbayes.ranking import highest, part_of

Per = Literal["weight", "row", "layer"]


def check_rate(rate: float) -> None:
    """Refuse what is no share."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise LeanBayesError(f"rate={rate!r} must be a share of the weights, from 0 to 1.")


def count_of(rate: float, numel: int) -> int:
    """Return k = ⌊rate·n⌋."""
    check_rate(rate)
    return int(part_of(rate, numel))


def top(layout: Layout, scores: Tensor, rate: float, per: Per = "weight") -> Tensor:
    """Return the positions of the ⌊rate·n⌋ highest of n scores, in increasing order; the first among equals.

    per: choose single weights, exactly so many; or whole rows (outputs of a layer) or whole layers by their mean score,
    from the highest on, all that still fit: at most so many. Then a weight of what is chosen counts most.
    """
    if per not in get_args(Per):
        raise LeanBayesError(f"per={per!r} is unknown: use 'weight', 'row' or 'layer'.")
    if not scores.isfinite().all():
        raise LeanBayesError("The sensitivity of some weights is NaN or infinite: look for NaN in data and network.")
    number = count_of(rate, layout.numel)
    if rate > 0 and number == 0:
        raise LeanBayesError(f"rate={rate} of {layout.numel} weights is less than one weight: raise it, or use 0.")
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
            f"rate={rate} leaves {number} weights, and the smallest {per} has {smallest}: raise it, or use 'weight'."
        )
    return torch.cat(chosen).sort().values


def _positions(layout: Layout, device: torch.device) -> Sequence[Tensor]:
    """Positions of each slot in the flat vector, in the order of memory."""
    return torch.arange(layout.numel, device=device).split(layout.sizes)


def _rows(layout: Layout, device: torch.device) -> list[Tensor]:
    """Positions of each entry of the slots' first dimensions."""
    parts = layout.split(torch.arange(layout.numel, device=device))
    return [row.flatten() for part in parts for row in (part if part.dim() else part[None])]
