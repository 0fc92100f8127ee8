"""The deterministic posterior: no uncertainty in the weights. Deterministic networks, dropout and ensembles use it."""

import torch
from torch import Tensor, nn

from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import Posterior


class PointPosterior(Posterior):
    """All mass on one weight vector, which is empty if the network keeps its own parameters."""

    def __init__(self, layout: Layout, mean: Tensor) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean) if len(layout) else None

    def mean(self) -> Tensor:
        """Return the weights."""
        return torch.zeros(0) if self.mu is None else self.mu

    def variance(self) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(self.mean())

    def sample(self, key: Tensor) -> Tensor:
        """Return the weights, for any key."""
        return self.mean()

    def kl(self, key: Tensor) -> Tensor:
        """Return 0: the KL of a point mass is infinite, so training leaves it out."""
        return torch.zeros((), device=key.device)

    def extra_repr(self) -> str:
        """Return the number of weights, if it stores any."""
        return "the network holds all weights" if self.mu is None else f"{self.layout.numel:,} deterministic weights"
