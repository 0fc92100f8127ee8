"""Sparse posteriors: only the active positions of the flat vector are stored, all other weights are exactly zero.

Positions can be exchanged for others of the same layer in place: the tensors stay the same objects, so that optimizers,
compiled graphs and DistributedDataParallel keep working.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.core.layout import Layout
from leanbayes.posteriors import positions
from leanbayes.posteriors.base import Posterior
from leanbayes.posteriors.gaussian_weights import GaussianWeights
from leanbayes.posteriors.subspace.sparse_weight import Pattern, SparseWeight
from leanbayes.priors import BoundPrior


class SparsePointPosterior(Posterior):
    """All mass on one sparse weight vector: a value and a position per active weight.

    Args:
        layout: The place of each parameter in the flat vector.
        index: The active positions in increasing order.
        mean: The weights there.
        block: The shape (outputs, inputs) of the blocks that active weights form.
    """

    index: Tensor

    def __init__(self, layout: Layout, index: Tensor, mean: Tensor, block: tuple[int, int] = (1, 1)) -> None:
        super().__init__(layout)
        self.block = block
        small = layout.numel <= torch.iinfo(torch.int32).max
        self.register_buffer("index", index.to(torch.int32 if small else torch.int64))
        self.mu = nn.Parameter(mean)
        self._known: tuple[Tensor, int, list[Pattern]] | None = None  # index, its version, and the pattern of each slot

    @property
    def counts(self) -> list[int]:
        """The number of active weights of each slot."""
        return torch.bincount(self.layout.slots_of(self.index), minlength=len(self.layout)).tolist()

    def entries(self) -> list[nn.Parameter]:
        """Return the parameters with one value per active weight."""
        return [self.mu]

    def move_to(self, index: Tensor) -> None:
        """Replace the active positions by others of the same layers, given in increasing order."""
        self.index.copy_(index)

    def pieces(self, removal: Tensor, addition: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """Yield this posterior with the scores of an exchange. A sharded one consists of several pieces."""
        yield self, removal, addition

    def scatter(self, values: Tensor) -> Tensor:
        """Return a flat vector with one value per active weight at its position, and zeros elsewhere."""
        return values.new_zeros(self.layout.numel).index_put_((self.index,), values)

    def mean(self) -> Tensor:
        """Return μ."""
        return self.scatter(self.mu)

    def variance(self) -> Tensor:
        """Return zeros."""
        return self.mu.new_zeros(self.layout.numel)

    def sample(self, key: Tensor) -> Tensor:
        """Return the weights, for any key."""
        return self.mean()

    def draw(self, key: Tensor) -> Sequence[Any]:
        """Return the weights of each slot."""
        return self.center()

    def center(self) -> Sequence[Any]:
        """Return μ for each slot, sparse if that can be faster."""
        return self._weights(self.mu)

    def _weights(self, active: Tensor) -> Sequence[Any]:
        """Return one value per slot. On a CPU without gradients, the values of sparse layers are sparse."""
        if active.requires_grad or active.is_cuda or torch.compiler.is_compiling():
            return self.layout.split(self.scatter(active))
        patterns = self._patterns()
        parts = active.split([len(pattern.positions) for pattern in patterns])
        weights = [SparseWeight(*both) for both in zip(patterns, parts, strict=True)]
        return [weight if weight.pattern.suits else weight.loc for weight in weights]

    def _patterns(self) -> list[Pattern]:
        """Return the positions of the active weights of each slot, cached until they change."""
        index, version = self.index, self.index._version
        if self._known is None or self._known[0] is not index or self._known[1] != version:
            starts = itertools.accumulate(self.layout.sizes, initial=0)
            parts = zip(self.layout, index.split(self.counts), starts, strict=False)
            self._known = (index, version, [Pattern(part - start, slot, self.block) for slot, part, start in parts])
        return self._known[2]

    @property
    def random_weights(self) -> int:
        """0: no weight is Bayesian."""
        return 0

    def kl(self, key: Tensor) -> Tensor:
        """Return 0: the KL of a point mass is infinite, so training leaves it out."""
        return torch.zeros((), device=key.device)

    def extra_repr(self) -> str:
        """Return the number of weights, the density, and the blocks if there are any."""
        return f"{self.layout.numel:,} deterministic weights, {self._sparsity()}"

    def _sparsity(self) -> str:
        density = f"density={len(self.index) / max(self.layout.numel, 1):.3g}"
        return density if self.block == (1, 1) else f"{density} in blocks of {self.block[0]}x{self.block[1]}"

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode the positions by their gaps."""
        return {**tensors, "index": positions.encode(tensors["index"])}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Decode the positions, as many as this posterior has."""
        if "index" not in tensors:
            return tensors
        index = positions.decode(tensors["index"], len(self.index), self.layout.numel)
        return {**tensors, "index": index.to(self.index.dtype)}


class SubspacePosterior(GaussianWeights, SparsePointPosterior):
    """Mean-field on a subspace: w_i ~ N(μ_i, softplus(ρ_i)²) at the active positions. The KL is that of these weights.

    Args:
        layout: The place of each parameter in the flat vector.
        index: The active positions in increasing order.
        mean: Means of the weights there.
        std: Their stds.
        prior: The prior of the weights.
        block: The shape (outputs, inputs) of the blocks that active weights form.
    """

    def __init__(
        self,
        layout: Layout,
        index: Tensor,
        mean: Tensor,
        std: Tensor,
        prior: BoundPrior,
        block: tuple[int, int] = (1, 1),
    ) -> None:
        SparsePointPosterior.__init__(self, layout, index, mean, block)
        self.rho = nn.Parameter(gaussian.inverse_softplus(std))
        self.prior = prior

    def entries(self) -> list[nn.Parameter]:
        """Return the parameters with one value per active weight."""
        return [self.mu, self.rho]

    def stored(self) -> tuple[Tensor, Tensor]:
        """Return μ and σ of the active weights."""
        return self.mu, self.std()

    def at_index(self, values: Tensor) -> Tensor:
        """Return the values of the active weights, given one per weight."""
        return values[self.index]

    @property
    def random_weights(self) -> int:
        """The number of active weights, which are all Bayesian."""
        return len(self.index)

    def draw(self, key: Tensor) -> Sequence[Any]:
        """Return μ + σ·ε for each slot, sparse if that can be faster."""
        return self._weights(gaussian.draw(self.mu, self.rho, key))

    def _positions(self) -> Tensor:
        return self.index

    def _place(self, values: Tensor) -> Tensor:
        return self.scatter(values)

    def extra_repr(self) -> str:
        """Return the number of weights, the density, the number of Bayesian weights, and the prior."""
        return f"{Posterior.extra_repr(self)}, {self._sparsity()}, prior={self.prior}"
