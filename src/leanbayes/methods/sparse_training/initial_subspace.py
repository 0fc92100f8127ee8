"""The active weights that a sparse training starts with."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.posteriors.subspace.blocks import Blocks

InitialSubspace = Literal["random", "magnitude"]
Importance = Callable[[Tensor, Tensor], Tensor]  # of μ and σ


def initial_subspace(
    layout: Layout,
    mean: Tensor,
    variance: Tensor | None,
    counts: Sequence[int],
    block: tuple[int, int],
    subspace: InitialSubspace,
    seed: int,
    importance: Importance,
) -> tuple[Tensor, Tensor]:
    """Choose the initial active positions, and return them with the flat weights to start from.

    In layers that an earlier posterior has variances for, the weights with the highest importance(μ, σ) stay active and
    unchanged. If the layer has room for more, random weights fill it.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: The flat weights.
        variance: The variances of an earlier posterior, nan for parameters it does not have, or None.
        counts: The number of active weights per layer, which is rounded to whole blocks.
        block: The outputs and inputs per block.
        subspace: How weights are chosen in layers without an earlier posterior.
        seed: The seed of random choices.
        importance: The importance of weights with given μ and σ.
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that the choice does not depend on the device
    chosen, scaled, start = [], mean.clone(), 0
    for slot, wanted in zip(layout, counts, strict=True):
        part, blocks = slice(start, start + slot.numel), Blocks(slot, block)
        count = max(1, round(wanted / blocks.size))
        earlier = None if variance is None or variance[part].isnan().any() else variance[part]
        if earlier is None and subspace == "magnitude":
            best = blocks.sums(mean[part].abs()).argsort(descending=True, stable=True)
        else:
            best = torch.randperm(blocks.count, generator=generator, device="cpu").to(mean.device)
        if earlier is not None:
            scores = importance(mean[part], earlier.sqrt())
            inactive = (mean[part] == 0) & (earlier == 0)
            sums = blocks.sums(scores.masked_fill(inactive, float(scores.min())))
            sums = sums.masked_fill(blocks.sums(inactive.float()) == blocks.size, -torch.inf)
            best = best[sums[best].argsort(descending=True, stable=True)]
        elif subspace == "random":
            scaled[part] /= math.sqrt(count / blocks.count)
        chosen.append(blocks.positions(best[:count]).sort().values + start)
        start += slot.numel
    return torch.cat(chosen), scaled
