"""Posteriors of rank-1 factors (Dusenberry et al. 2020): a mixture with one Gaussian or Cauchy per member.

The factors of all members are one flat vector, each stored minus 1. Given a member, its factors are independent. The KL
of the mixture is at most the mean over members of their KLs, and that bound is what `kl` returns.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian, noise
from leanbayes.core.layout import Layout
from leanbayes.posteriors.base import DiagonalGaussian, Posterior
from leanbayes.posteriors.mean_field import MeanFieldPosterior
from leanbayes.priors import BoundPrior

_MOST = 1e6  # takes the place of an infinite standard Cauchy, whose gradient would be NaN


class GaussianFactors(MeanFieldPosterior):
    """Factors N(μ, softplus(ρ)²), with a Gaussian prior."""

    factorized = False  # the weights that the factors multiply are correlated

    def __init__(self, layout: Layout, mean: Tensor, std: Tensor, prior: BoundPrior, members: int) -> None:
        super().__init__(layout, mean, std, prior)
        self.members = members

    def kl(self, key: Tensor) -> Tensor:
        """Return the mean over members of KL(q_k ‖ prior)."""
        return super().kl(key) / self.members

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample of the factors of all members, and the KL."""
        sample, kl = super().sample_and_kl(key)
        return sample, kl / self.members

    def diagonal_gaussian(self) -> DiagonalGaussian | None:
        """Return None: the KL of a mixture is not that of independent Gaussian weights."""
        return None


class CauchyFactors(Posterior):
    """Factors Cauchy(μ, softplus(ρ)), with a Cauchy prior around 0.

    A Cauchy distribution has no mean and no variance: `mean` returns μ, and `variance` the squared scale. Factors are
    clamped to ±limit, because an extreme one spoils the statistics of BatchNorm for all members. If those of the prior
    are clamped too, `kl` is an upper bound of the KL.
    """

    factorized = False

    def __init__(
        self, layout: Layout, mean: Tensor, scale: Tensor, prior_scale: float, members: int, limit: float
    ) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.rho = nn.Parameter(gaussian.inverse_softplus(scale))
        self.prior_scale, self.members, self.limit = prior_scale, members, limit

    def mean(self) -> Tensor:
        """Return μ, the median."""
        return self.mu

    def variance(self) -> Tensor:
        """Return the squared scale, because there is no variance."""
        return F.softplus(self.rho).square()

    def sample(self, key: Tensor) -> Tensor:
        """Return μ + γ·ε, where ε is the ratio of two standard normals, which is a standard Cauchy."""
        epsilon = noise.normal(self.mu, key) / noise.normal(self.mu, key, stream=1)
        epsilon = epsilon.nan_to_num(0.0, _MOST, -_MOST)  # one normal in ten million is 0 on a CPU
        # Factors are stored minus 1.
        return torch.addcmul(self.mu, F.softplus(self.rho), epsilon).clamp(-self.limit - 1, self.limit - 1)

    def kl(self, key: Tensor) -> Tensor:
        """Return the mean over members of KL(q_k ‖ prior) = Σ log ((γ + s)² + μ²) / (4γs) (Chyzak and Nielsen 2019)."""
        scale, prior = F.softplus(self.rho), self.prior_scale
        terms = ((scale + prior).square() + self.mu.square()).log() - scale.log()
        return (terms.sum() - terms.numel() * math.log(4 * prior)) / self.members

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho

    def extra_repr(self) -> str:
        """Add the prior."""
        return f"{super().extra_repr()}, prior=Cauchy({self.prior_scale})"
