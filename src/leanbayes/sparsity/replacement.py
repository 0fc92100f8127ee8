"""Exchanging active weights for inactive ones: in place, together with what the optimisers know of them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from leanbayes.gaussian import inverse_softplus
from leanbayes.posteriors import SparsePointPosterior, SubspacePosterior
from leanbayes.ranking import highest
from leanbayes.sparsity.blocks import Blocks


@torch.no_grad()
def replace_weights(
    posterior: SparsePointPosterior,
    optimisers: Sequence[torch.optim.Optimizer],
    share: float,
    scores: Tensor,
    wishes: Tensor,
    block: tuple[int, int] = (1, 1),
) -> None:
    """Drop ⌊share·k⌋ of the k active weights of each layer, or blocks of them, and add as many that were inactive.

    scores: one an active weight; the lowest go. wishes: one a weight of the flat vector; the inactive ones with the
    highest come. Among equals the first in the layout is taken. Never are more dropped than there are inactive ones.
    A new weight has μ = 0, the mean σ of those of its layer that stay, and an optimiser state of zeros.
    """
    fresh = posterior.index.clone()
    rho = posterior.rho if isinstance(posterior, SubspacePosterior) else None
    places, start, first = [], 0, 0
    for slot, count in zip(posterior.layout, posterior.counts, strict=True):
        own, here = slice(first, first + count), slice(start, start + slot.numel)
        dropped, added = _exchange(
            Blocks(slot, block), share, posterior.index[own].long() - start, scores[own], wishes[here]
        )
        if len(dropped):
            fresh[first + dropped] = (start + added).to(fresh.dtype)
            if rho is not None:
                stay = torch.ones(count, dtype=torch.bool, device=rho.device).index_fill_(0, dropped, False)
                sigma = nn.functional.softplus(rho[own])
                rho[first + dropped] = inverse_softplus((sigma * stay).sum() / (count - len(dropped)))
            places.append(first + dropped)
        start, first = start + slot.numel, first + count
    if not places:
        return
    replaced, order = torch.cat(places), fresh.argsort()  # layers lie in order, so this sorts inside each
    posterior.index.copy_(fresh[order])
    posterior.mu[replaced] = 0.0
    for parameter in posterior.entries():
        parameter.copy_(parameter[order])
        for tensor in _known_of(parameter, optimisers):
            tensor[replaced] = 0.0
            tensor.copy_(tensor[order])


def _exchange(blocks: Blocks, share: float, active: Tensor, scores: Tensor, wishes: Tensor) -> tuple[Tensor, Tensor]:
    """Choose in one layer: the places of what goes among its active weights, and the positions of what comes."""
    count = len(active) // blocks.size
    number = min(int(share * count), blocks.count - count)
    if number <= 0:
        return active[:0], active[:0]
    if blocks.size == 1:  # the same as below, without a number for each weight
        return highest(-scores, number), highest(wishes.index_fill(0, active, -torch.inf), number)
    none = torch.zeros_like(wishes)
    held = blocks.sums(none.index_fill(0, active, 1.0)) > 0
    by_block = blocks.sums(none.index_copy(0, active, scores.to(none.dtype)))
    gone = torch.zeros_like(held).index_fill_(0, highest(-by_block.masked_fill(~held, torch.inf), number), True)
    come = highest(blocks.sums(wishes).masked_fill(held, -torch.inf), number)
    return gone[blocks.of(active)].nonzero()[:, 0], blocks.positions(come)


def _known_of(parameter: nn.Parameter, optimisers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Find the tensors with a number for each of the parameter's: momenta and the like, and a gradient left behind."""
    known = [value for optimiser in optimisers for value in optimiser.state.get(parameter, {}).values()]
    for tensor in [*known, parameter.grad]:
        if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape == parameter.shape:
            yield tensor
