"""A chain of weights and of masks of nodes (mBNN, Kong et al. 2023).

A node is an input of a layer. Its mask is 1 or 0, and 0 sets all its weights to zero in the network. They stay in the
chain, where only the prior moves them. All weights have independent Cauchy distributions around 0 as their prior.
"""

import itertools

import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.posteriors.input_groups import InputGroups
from leanbayes.posteriors.subspace.collected import CollectedPosterior


class MaskedPosterior(CollectedPosterior):
    """The weights of the chain and the mask of each node; after `finish` the masked weights that were collected.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: The flat weights to start from.
        scale: The scale of the Cauchy prior.

    Attributes:
        nodes: The inputs of all layers.
        mask: Whether each node is active; empty after `finish`.
    """

    mask: Tensor

    def __init__(self, layout: Layout, mean: Tensor, scale: float) -> None:
        super().__init__(layout, mean)
        self.scale = scale
        self.nodes = InputGroups(layout)
        self.register_buffer("mask", torch.ones(self.nodes.total, dtype=torch.bool, device=mean.device))

    @property
    def is_finished(self) -> bool:
        """Whether only the collected weights are left."""
        return self.mask.numel() == 0 < self.nodes.total

    def masked_layers(self) -> list[slice]:
        """Return the places of the nodes that have masks: the inputs of all layers but the first, at least two each.

        The first layer reads the data, which are not nodes. Biases and norms have no masks, if they are Bayesian.
        """
        ends = itertools.accumulate(self.nodes.counts)
        places = [slice(end - count, end) for end, count in zip(ends, self.nodes.counts, strict=True)]
        matrices = [place for slot, place in zip(self.layout, places, strict=True) if len(slot.shape) > 1]
        return [place for place in matrices[1:] if place.stop - place.start > 1]

    def masked(self, mask: Tensor) -> Tensor:
        """Return the weights of the chain, 0 for those of nodes that are not active in a mask."""
        return self.mu * self.nodes.expand(mask.to(self.mu.dtype))

    def current(self) -> Tensor:
        """Return the weights of the active nodes, and 0 for all others."""
        return self.masked(self.mask)

    def energy(self) -> Tensor:
        """Return the negative log prior of all weights of the chain, up to a constant: Σ log(1 + (w/s)²)."""
        return (self.mu / self.scale).square().log1p().sum()

    def collect(self) -> None:
        """Add the current weights. Vectors that are collected may have different zeros."""
        if not len(self.members):
            self.begin(torch.arange(self.layout.numel, device=self.mu.device))
        super().collect()

    @torch.no_grad()
    def finish(self) -> None:
        """Drop the masks, and store the weights that are active in any of the collected vectors."""
        used = (self.members != 0).any(0)
        self.index, self.members = self.index[used], self.members[:, used]
        super().finish()
        self.mask = self.mask[:0].clone()

    def extra_repr(self) -> str:
        """Add the number of active nodes."""
        active = "" if self.is_finished else f", {int(self.mask.sum()):,} of {self.nodes.total:,} nodes active"
        return f"{super().extra_repr()}{active}"

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the positions, and check the shapes."""
        if not {"index", "members", "mu", "mask"} <= tensors.keys():
            return tensors
        count = tensors["mask"].numel()
        shaped = tensors["mask"].shape == (count,) and tensors["mask"].dtype == torch.bool
        if not shaped or count not in (0, self.nodes.total):
            raise ValueError(f"there are masks of {count} nodes, not of {self.nodes.total}")
        return self.decoded(tensors, finished=count == 0)
