"""Replace active weights by inactive ones in place, together with the state that the optimizers hold for them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core.gaussian import inverse_softplus
from leanbayes.core.parts import overwrite, whole
from leanbayes.core.ranking import highest
from leanbayes.posteriors.subspace.blocks import Blocks


@torch.no_grad()
def replace_weights(
    posterior: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    share: float,
    removal: Tensor,
    addition: Tensor,
    block: tuple[int, int] = (1, 1),
    by_precision: bool = False,
    new_std: float | None = None,
) -> None:
    """Replace ⌊share·k⌋ of the k active weights (or blocks) of each layer by inactive ones.

    Ties go to the first weight in the layout. No more weights are removed than there are inactive ones. A new weight
    starts with μ = 0, the mean σ of the remaining weights of its layer (or `new_std`), and an optimizer state of zeros.

    Args:
        posterior: The sparse posterior, which changes in place, or a unit of a sharded one. Then all processes must
            call this with the same scores.
        optimizers: The optimizers whose state moves with the weights.
        share: The fraction of active weights to replace.
        removal: One score per active weight. The lowest are removed.
        addition: One score per weight of the flat vector. The inactive weights with the highest scores are added.
        block: The outputs and inputs per block.
        by_precision: Whether σ of new weights is that of the mean 1/σ², the curvature that the engine "ivon" stores.
        new_std: σ of new weights. None means the mean of their layer.
    """
    former = whole(posterior.index).long()
    index = former.clone()
    rho = whole(posterior.rho).clone() if len(posterior.entries()) > 1 else None
    places, start, first = [], 0, 0
    for slot, count in zip(posterior.layout, posterior.counts, strict=True):
        own, here = slice(first, first + count), slice(start, start + slot.numel)
        active = former[own] - start
        removed, added = _choose(Blocks(slot, block), share, active, removal[own], addition[here])
        if len(removed):
            index[first + removed] = start + added
            if rho is not None:
                stay = torch.ones(count, dtype=torch.bool, device=rho.device).index_fill_(0, removed, False)
                sigma = nn.functional.softplus(rho[own])[stay]
                typical = sigma.square().reciprocal().mean().rsqrt() if by_precision else sigma.mean()
                rho[first + removed] = inverse_softplus(typical if new_std is None else sigma.new_tensor(new_std))
            places.append(first + removed)
        start, first = start + slot.numel, first + count
    if not places:
        return
    replaced, order = torch.cat(places), index.argsort()  # layers are in order, so this sorts within each layer
    posterior.move_to(index[order])
    for parameter in posterior.entries():
        values = whole(parameter).index_fill(0, replaced, 0.0) if rho is None or parameter is posterior.mu else rho
        overwrite(parameter, values[order])
        for tensor in _state_of(parameter, optimizers):
            overwrite(tensor, whole(tensor).index_fill(0, replaced, 0.0)[order])


def _choose(blocks: Blocks, share: float, active: Tensor, removal: Tensor, addition: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of one layer's active weights to remove, and the positions of the weights to add."""
    count = len(active) // blocks.size
    number = min(int(share * count), blocks.count - count)
    if number <= 0:
        return active[:0], active[:0]
    if blocks.size == 1:  # the same as below, without a dense vector of removal scores
        return highest(-removal, number), highest(addition.index_fill(0, active, -torch.inf), number)
    zeros = torch.zeros_like(addition)
    is_active = blocks.sums(zeros.index_fill(0, active, 1.0)) > 0
    by_block = blocks.sums(zeros.index_copy(0, active, removal.to(zeros.dtype)))
    lowest = highest(-by_block.masked_fill(~is_active, torch.inf), number)
    is_removed = torch.zeros_like(is_active).index_fill_(0, lowest, True)
    added = highest(blocks.sums(addition).masked_fill(is_active, -torch.inf), number)
    return is_removed[blocks.of(active)].nonzero()[:, 0], blocks.positions(added)


def _state_of(parameter: nn.Parameter, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield the tensors with one entry per element of the parameter, such as momenta, and its gradient."""
    state = [value for optimizer in optimizers for value in optimizer.state.get(parameter, {}).values()]
    for tensor in [*state, parameter.grad]:
        if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape == parameter.shape:
            yield tensor
