"""A sparse posterior: only the active positions of the flat vector are stored, all other weights are exactly zero.

The positions may be exchanged for others of the same layer, in place: tensors stay where they are, so that optimisers,
compiled graphs and DistributedDataParallel go on with them.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes import gaussian
from leanbayes.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior
from leanbayes.sparsity import positions
from leanbayes.sparsity.weights import Pattern, SparseWeight


class SparsePointPosterior(Posterior):
    """All mass on one sparse weight vector: a number and a position for each active weight."""

    index: Tensor

    def __init__(self, layout: Layout, index: Tensor, mean: Tensor, block: tuple[int, int] = (1, 1)) -> None:
        """Take the active positions in increasing order, the weights there, and the blocks that they come in."""
        super().__init__(layout)
        self.block = block
        small = layout.numel <= torch.iinfo(torch.int32).max
        self.register_buffer("index", index.to(torch.int32 if small else torch.int64))
        self.mu = nn.Parameter(mean)
        self._known: tuple[Tensor, int, list[Pattern]] | None = None  # index, its version, and the patterns of slots

    @property
    def counts(self) -> list[int]:
        """How many weights of each slot are active."""
        return torch.bincount(self.layout.slots_of(self.index), minlength=len(self.layout)).tolist()

    def entries(self) -> list[nn.Parameter]:
        """Return the parameters with one number an active weight."""
        return [self.mu]

    def spread(self, values: Tensor) -> Tensor:
        """Put one number an active weight at its position in the flat vector of zeros."""
        return values.new_zeros(self.layout.numel).index_put_((self.index,), values)

    def mean(self) -> Tensor:
        """Return μ."""
        return self.spread(self.mu)

    def variance(self) -> Tensor:
        """Return zeros."""
        return self.mu.new_zeros(self.layout.numel)

    def sample(self, key: Tensor) -> Tensor:
        """Return the point, whatever the key."""
        return self.mean()

    def draw(self, key: Tensor) -> Sequence[Any]:
        """Return the point for each slot."""
        return self.centre()

    def centre(self) -> Sequence[Any]:
        """Return μ for each slot, sparse where that pays."""
        return self._weights(self.mu)

    def _weights(self, active: Tensor) -> Sequence[Any]:
        """One value per slot; on a CPU without gradients, those of sparse layers are sparse."""
        if active.requires_grad or active.is_cuda or torch.compiler.is_compiling():
            return self.layout.split(self.spread(active))
        patterns = self._patterns()
        parts = active.split([len(pattern.positions) for pattern in patterns])
        weights = [SparseWeight(*both) for both in zip(patterns, parts, strict=True)]
        return [weight if weight.pattern.suits else weight.loc for weight in weights]

    def _patterns(self) -> list[Pattern]:
        """Where each slot has its active weights; kept until they change."""
        index, version = self.index, self.index._version
        if self._known is None or self._known[0] is not index or self._known[1] != version:
            starts = itertools.accumulate(self.layout.sizes, initial=0)
            parts = zip(self.layout, index.split(self.counts), starts, strict=False)
            self._known = (index, version, [Pattern(part - start, slot, self.block) for slot, part, start in parts])
        return self._known[2]

    @property
    def random_weights(self) -> int:
        """None is Bayesian."""
        return 0

    def kl(self, key: Tensor) -> Tensor:
        """Return 0: a point has no finite KL, and is trained without one."""
        return torch.zeros((), device=key.device)

    def to_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write the positions as the gaps between them."""
        return {**tensors, "index": positions.encode(tensors["index"])}

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read the positions, which must be as many as this posterior has."""
        if "index" not in tensors:
            return tensors
        index = positions.decode(tensors["index"], len(self.index), self.layout.numel)
        return {**tensors, "index": index.to(self.index.dtype)}


class SubspacePosterior(SparsePointPosterior):
    """Mean-field within a subspace: w_i ~ N(μ_i, softplus(ρ_i)²) at active positions; the KL is that of these."""

    def __init__(
        self,
        layout: Layout,
        index: Tensor,
        mean: Tensor,
        std: Tensor,
        prior: BoundPrior,
        block: tuple[int, int] = (1, 1),
    ) -> None:
        """Take the active positions in increasing order, mean and std of the weights there, and their blocks."""
        super().__init__(layout, index, mean, block)
        self.rho = nn.Parameter(gaussian.inverse_softplus(std))
        self.prior = prior

    def entries(self) -> list[nn.Parameter]:
        """Return the parameters with one number an active weight."""
        return [self.mu, self.rho]

    def std(self) -> Tensor:
        """Return σ = softplus(ρ) of the active weights."""
        return F.softplus(self.rho)

    @property
    def random_weights(self) -> int:
        """The active ones are Bayesian."""
        return len(self.index)

    def variance(self) -> Tensor:
        """Return σ²."""
        return self.spread(self.std().square())

    def sample(self, key: Tensor) -> Tensor:
        """Draw μ + σ·ε."""
        return self.spread(gaussian.draw(self.mu, self.rho, key))

    def draw(self, key: Tensor) -> Sequence[Any]:
        """Draw μ + σ·ε for each slot, sparse where that pays."""
        return self._weights(gaussian.draw(self.mu, self.rho, key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Draw σ·ε."""
        return self.spread(gaussian.draw(torch.zeros_like(self.mu), self.rho, key))

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior."""
        return "monte-carlo" if self.prior.normal_terms(self.index) is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """KL(q ‖ prior) of the active weights, or log q(w) - log p(w) at one draw where there is no closed form."""
        terms = self.prior.normal_terms(self.index)
        if terms is None:
            return self._log_ratio(gaussian.draw(self.mu, self.rho, key))
        return gaussian.normal_kl(self.mu, self.std(), terms)

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Draw and KL in one pass over the active weights."""
        terms = self.prior.normal_terms(self.index)
        if terms is None:
            active = gaussian.draw(self.mu, self.rho, key)
            kl = self._log_ratio(active)
        else:
            active, kl = gaussian.draw_and_kl(self.mu, self.rho, key, terms)
        return self.spread(active), kl

    def variance_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Variance and KL in one pass over the active weights."""
        terms = self.prior.normal_terms(self.index)
        if terms is None:
            return super().variance_and_kl(key)
        active, kl = gaussian.variance_and_kl(self.mu, self.rho, terms)
        return self.spread(active), kl

    def perturbation_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Perturbation and KL: that of a draw around 0, and then what the distance of μ adds."""
        terms = self.prior.normal_terms(self.index)
        if terms is None:
            return super().perturbation_and_kl(key)
        around_zero = gaussian.NormalTerms(None, terms.scale)
        active, kl = gaussian.draw_and_kl(torch.zeros_like(self.mu), self.rho, key, around_zero)
        return self.spread(active), kl + gaussian.mean_kl(self.mu, terms)

    def _log_ratio(self, active: Tensor) -> Tensor:
        return gaussian.log_density(active - self.mu, self.std()) - self.prior.log_prob(active, self.index)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho
