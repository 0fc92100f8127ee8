"""Multiplicative noise of a fixed size: w_i = μ_i (1 + α·ε_i). ABNN has it in normalization layers."""

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import Posterior


class MultiplicativePosterior(Posterior):
    """One number per weight, μ. The std α·|μ| is not trained, and there is no KL.

    Args:
        layout: The place of each parameter in the flat vector.
        mean: μ of each weight.
        noise_std: α, the std of the noise relative to the weight.
    """

    caches_moments = True

    def __init__(self, layout: Layout, mean: Tensor, noise_std: float) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.noise_std = noise_std

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def variance(self) -> Tensor:
        """Return α²μ²."""
        return (self.noise_std * self.mu).square()

    def sample(self, key: Tensor) -> Tensor:
        """Return μ + α·μ·ε."""
        return torch.addcmul(self.mu, self.mu, noise.normal(self.mu, key), value=self.noise_std)

    def kl(self, key: Tensor) -> Tensor:
        """Return 0: the size of the noise is given, so training only moves μ."""
        return torch.zeros((), device=key.device)

    def extra_repr(self) -> str:
        """Add the size of the noise."""
        return f"{super().extra_repr()}, noise_std={self.noise_std}"
