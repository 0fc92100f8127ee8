"""The codebook of a shared posterior: its codes, and which weight uses which."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """A codebook of C codes for n weights. The first G codes are Gaussians, the others are deterministic.

    An outlier is a code that only one weight has.

    Attributes:
        mean: Mean of each code (C).
        std: Std of the first G codes (G). The other codes are deterministic.
        covariance: Covariance of (μ, σ) over the members of each Gaussian code (G, 2, 2), 0 for an outlier.
        labels: The code of each weight (n), or C for a weight that is exactly zero.
        blended: Positions, in increasing order, of the weights that take a mixture of codes instead of their own (e).
        partners: The Gaussian codes in each mixture (e, B).
        alpha: The fractions of these codes (e, B).

    Example:
        >>> codes = Codes.without_blends(torch.tensor([-0.1, 0.1]), torch.tensor([0.02, 0.02]), torch.tensor([0, 1, 0]))
    """

    mean: Tensor
    std: Tensor
    covariance: Tensor
    labels: Tensor
    blended: Tensor
    partners: Tensor
    alpha: Tensor

    @classmethod
    def without_blends(cls, mean: Tensor, std: Tensor, labels: Tensor, covariance: Tensor | None = None) -> Self:
        """Return codes without mixtures, and with zero covariances if none are given."""
        positions = torch.zeros(0, dtype=torch.int64, device=mean.device)
        covariance = mean.new_zeros(len(std), 2, 2) if covariance is None else covariance
        return cls(mean, std, covariance, labels, positions, positions.view(0, 1), mean.new_zeros(0, 1))


def blend_moments(mean: Tensor, std: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of Σ α_k N(m_k, s_k²): m = Σ α m_k and s² = Σ α(s_k² + (m_k - m)²)."""
    center = (alpha * mean).sum(-1)
    return center, (alpha * (std.square() + (mean - center[..., None]).square())).sum(-1)
