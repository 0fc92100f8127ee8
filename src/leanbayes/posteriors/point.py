"""A single point: no uncertainty in the weights. It carries the deterministic network, dropout and ensembles."""

import torch
from torch import Tensor, nn

from leanbayes.layout import Layout
from leanbayes.posteriors.base import Posterior


class PointPosterior(Posterior):
    """All mass on one weight vector, which may be empty when the network keeps its own parameters."""

    def __init__(self, layout: Layout, mean: Tensor) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean) if len(layout) else None

    def mean(self) -> Tensor:
        """Return the point."""
        return torch.zeros(0) if self.mu is None else self.mu

    def variance(self) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(self.mean())

    def sample(self, key: Tensor) -> Tensor:
        """Return the point, whatever the key."""
        return self.mean()

    def kl(self, key: Tensor) -> Tensor:
        """Return 0: a point has no finite KL, and is trained without one."""
        return torch.zeros((), device=key.device)
