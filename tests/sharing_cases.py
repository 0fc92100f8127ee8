"""Points and mixtures for tests of weight sharing."""

import torch
from torch import Tensor

from leanbayes.methods.weight_sharing.mixture import Mixture, regular


def plane(count: int, seed: int = 0) -> Tensor:
    """Return points (μ, σ) that are distributed as in a trained network."""
    generator = torch.Generator().manual_seed(seed)
    mean = 0.02 * torch.randn(count, generator=generator)
    return torch.stack([mean, torch.exp(0.5 * torch.randn(count, generator=generator) - 6)], 1)


def random_mixture(count: int, seed: int, scale: float = 1.0) -> Mixture:
    """Return components of random shapes."""
    generator = torch.Generator().manual_seed(seed)
    root = scale * torch.randn(count, 2, 2, generator=generator, dtype=torch.float64)
    mean = scale * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    mass = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    return Mixture(mean, regular(root @ root.mT, 1e-30), mass)
