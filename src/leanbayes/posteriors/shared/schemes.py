"""The sampling schemes of a shared posterior: how the weights of one code get their noise."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core import noise

Sampling = Literal["independent", "hierarchical", "tied"]
_MEAN, _STD, _BLEND = range(1 << 29, (1 << 29) + 3)  # streams of noise that no rule uses


class CodedWeights(Protocol):
    """What a scheme reads of a shared posterior."""

    @property
    def mu(self) -> Tensor:
        """Means of the codes."""
        ...

    @property
    def rho(self) -> Tensor:
        """ρ of the Gaussian codes."""
        ...

    @property
    def factors(self) -> Tensor:
        """What the scheme stores for each Gaussian code."""
        ...

    @property
    def blended(self) -> Tensor:
        """Positions of the blended weights."""
        ...

    def expand(self, values: Tensor) -> Tensor:
        """Return the value of each weight's code."""
        ...

    def codes_std(self) -> Tensor:
        """Return σ of all codes."""
        ...

    def blends(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the blended weights."""
        ...

    def mean(self) -> Tensor:
        """Return the mean of each weight."""
        ...

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and std of each weight."""
        ...


class Scheme:
    """How a shared posterior samples. A blended weight has its own noise under all schemes.

    Attributes:
        factorized: Whether the weights are independent.
        has_factors: Whether `factors` stores anything.
    """

    factorized: ClassVar[bool] = True
    has_factors: ClassVar[bool] = False

    def factors(self, covariance: Tensor) -> Tensor:
        """Return what is stored of the covariances of (μ, σ) over the members of each Gaussian code."""
        return covariance.new_zeros(0, 3)

    def weight_stds(self, std: Tensor, factors: Tensor) -> Tensor:
        """Return the std of the weights of each Gaussian code, given σ of the code."""
        return std

    def multiplicities(self, counts: Tensor) -> Tensor:
        """Return how often the KL counts each code, given the number of its weights."""
        return counts

    def sample(self, weights: CodedWeights, key: Tensor) -> Tensor:
        """Return one sample of all weights."""
        raise NotImplementedError  # abstract

    def perturbation(self, weights: CodedWeights, key: Tensor) -> Tensor:
        """Return a sample minus the mean."""
        return self.sample(weights, key) - weights.mean()


class Independent(Scheme):
    """Each weight has its own noise: w = m_c + σ_c·ε."""

    def sample(self, weights: CodedWeights, key: Tensor) -> Tensor:
        mean, std = weights.moments()
        return torch.addcmul(mean, std, noise.normal(mean, key))

    def perturbation(self, weights: CodedWeights, key: Tensor) -> Tensor:
        std = weights.moments()[1]
        return std * noise.normal(std, key)


class Hierarchical(Scheme):
    """Each weight first draws its own (μ, σ) ~ N((m_c, σ_c), Σ_c) and then w = μ + σ·ε: Var[w] = σ_c² + tr Σ_c.

    The KL is that of the Gaussian with this variance, a lower bound of the true KL.
    """

    has_factors = True

    def factors(self, covariance: Tensor) -> Tensor:
        """Return (a, b, c) of the Cholesky factor of each Σ_c: (a·z₁, b·z₁ + c·z₂) is a sample of N(0, Σ_c)."""
        xx, xy, yy = covariance[:, 0, 0], covariance[:, 0, 1], covariance[:, 1, 1]
        a = xx.clamp_min(0).sqrt()
        b = torch.where(a > 0, xy / a, 0.0)
        return torch.stack([a, b, (yy - b.square()).clamp_min(0).sqrt()], 1)

    def weight_stds(self, std: Tensor, factors: Tensor) -> Tensor:
        return (std.square() + factors.square().sum(1)).sqrt()

    def sample(self, weights: CodedWeights, key: Tensor) -> Tensor:
        mean, std = weights.moments()
        return mean + self._noise(weights, std, key)

    def perturbation(self, weights: CodedWeights, key: Tensor) -> Tensor:
        return self._noise(weights, weights.moments()[1], key)

    def _noise(self, weights: CodedWeights, std: Tensor, key: Tensor) -> Tensor:
        """Return δμ + (σ + δσ)·ε with (δμ, δσ) ~ N(0, Σ_c); std: of each weight, read for the blended ones."""
        code_std, *factors = (weights.expand(part) for part in (F.softplus(weights.rho), *weights.factors.unbind(1)))
        if len(weights.blended):
            code_std = code_std.index_copy(0, weights.blended, std[weights.blended])
            factors = [factor.index_fill(0, weights.blended, 0.0) for factor in factors]
        a, b, c = factors
        z_mean, z_std = noise.normal(std, key, _MEAN), noise.normal(std, key, _STD)
        return a * z_mean + (code_std + b * z_mean + c * z_std) * noise.normal(std, key)


class Tied(Scheme):
    """A code is sampled once for all its weights, which are one random variable: the KL counts it once."""

    factorized = False

    def multiplicities(self, counts: Tensor) -> Tensor:
        return counts.clamp_max(1)

    def sample(self, weights: CodedWeights, key: Tensor) -> Tensor:
        codes = torch.addcmul(weights.mu, weights.codes_std(), noise.normal(weights.mu, key))
        values = weights.expand(codes)
        if not len(weights.blended):
            return values
        mean, variance = weights.blends()
        blends = torch.addcmul(mean, variance.sqrt(), noise.normal(mean, key, _BLEND))
        return values.index_copy(0, weights.blended, blends)


SCHEMES: Mapping[Sampling, Scheme] = {"independent": Independent(), "hierarchical": Hierarchical(), "tied": Tied()}
