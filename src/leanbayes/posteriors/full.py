"""A Gaussian with a full covariance over a few weights, such as those of the last layer. All others are deterministic.

It stores n² numbers for n Bayesian weights, so it is for some thousand of them at most.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior


class FullPosterior(Posterior):
    """w = μ + R·ε at the chosen positions, with the covariance R·Rᵀ, and w = μ elsewhere.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: Mean of each weight.
        root: R, a lower triangular matrix with one row per chosen position.
        prior: The prior of the weights.
        index: The chosen positions in increasing order.
    """

    factorized = False
    sizes_vary = True
    index: Tensor
    root: Tensor

    def __init__(self, layout: Layout, mean: Tensor, root: Tensor, prior: BoundPrior, index: Tensor) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.prior = prior
        self.register_buffer("index", index.to(torch.int64))
        self.register_buffer("root", root.to(mean.dtype).contiguous())
        self._cache_random_slots()

    def _cache_random_slots(self) -> None:
        """Find the slots with a Bayesian weight; a compiled graph cannot read the index."""
        counts = torch.bincount(self.layout.slots_of(self.index), minlength=len(self.layout)).tolist()
        self._random = [count > 0 for count in counts]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._cache_random_slots()

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def variance(self) -> Tensor:
        """Return the diagonal of the covariance, 0 for deterministic weights."""
        return self._placed(self.root.square().sum(1))

    def sample(self, key: Tensor) -> Tensor:
        """Return μ + R·ε."""
        return self.mu + self._placed(self.root @ noise.normal(self.root.new_empty(len(self.root)), key))

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q ‖ prior) = ½[tr(S⁻¹Σ) + (μ - m)ᵀS⁻¹(μ - m) - n + log|S| - log|Σ|] for the prior N(m, S)."""
        terms = self.prior.normal_terms(self.index)
        assert terms is not None
        loc, scale = terms.loc, torch.as_tensor(terms.scale, dtype=self.mu.dtype, device=self.mu.device)
        mean = self.mu[self.index]
        distance = mean if loc is None else mean - loc
        squares = (self.root.square().sum(1) + distance.square()) / scale.square()
        return (0.5 * (squares - 1) + scale.log() - self.root.diagonal().log()).sum()

    def random_slots(self) -> Sequence[bool]:
        """Return for each slot whether it has a Bayesian weight."""
        return self._random

    @property
    def random_weights(self) -> int:
        """The number of Bayesian weights."""
        return len(self.index)

    def _placed(self, values: Tensor) -> Tensor:
        """Return a flat vector with one value per Bayesian weight at its position, and zeros elsewhere."""
        return values.new_zeros(self.layout.numel).index_add(0, self.index, values)

    def from_file(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check the positions and the shape of the matrix."""
        index, root = tensors.get("index"), tensors.get("root")
        if index is None or root is None or "mu" not in tensors:
            return tensors
        if tensors["mu"].shape != (self.layout.numel,) or index.dim() != 1 or root.shape != (len(index), len(index)):
            raise ValueError(f"a covariance of shape {tuple(root.shape)} does not fit {tuple(index.shape)} positions")
        inside = index.dtype == torch.int64 and (index.diff() > 0).all() and len(index) <= self.layout.numel
        if not inside or (len(index) and not 0 <= index[0] <= index[-1] < self.layout.numel):
            raise ValueError("the positions do not increase, or lie beyond the weights of the network")
        return tensors

    def extra_repr(self) -> str:
        """Add the kind of the covariance, and the prior."""
        return f"{super().extra_repr()}, full covariance, prior={self.prior}"
