"""What mean-field posteriors have in common, whether they store all weights or only the active ones."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.posteriors.base import DiagonalGaussian, Posterior
from leanbayes.priors import BoundPrior


class GaussianWeights(Posterior):
    """Independent weights w_i ~ N(μ_i, softplus(ρ_i)²), with one entry of μ and ρ per stored weight.

    A subclass creates `mu`, `rho` and `prior`, and overrides `_positions` and `_place` if it stores some weights only.
    """

    caches_moments = True
    mu: nn.Parameter
    rho: nn.Parameter
    prior: BoundPrior

    def _positions(self) -> Tensor | None:
        """Return the positions of the stored weights in the flat vector, None for all."""
        return None

    def _place(self, values: Tensor) -> Tensor:
        """Return the flat vector, given one value per stored weight."""
        return values

    def std(self) -> Tensor:
        """Return σ = softplus(ρ) of the stored weights."""
        return F.softplus(self.rho)

    def variance(self) -> Tensor:
        """Return σ²."""
        return self._place(self.std().square())

    def sample(self, key: Tensor) -> Tensor:
        """Return μ + σ·ε."""
        return self._place(gaussian.draw(self.mu, self.rho, key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Return σ·ε."""
        return self._place(gaussian.draw(torch.zeros_like(self.mu), self.rho, key))

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior, else Monte Carlo."""
        return "monte-carlo" if self.prior.normal_terms(self._positions()) is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """Return KL(q ‖ prior) of the stored weights, or log q(w) - log p(w) at one sample without a closed form."""
        terms = self.prior.normal_terms(self._positions())
        if terms is None:
            return self._log_ratio(gaussian.draw(self.mu, self.rho, key))
        return gaussian.normal_kl(self.mu, self.std(), terms)

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a sample and the KL, from one pass over the stored weights."""
        terms = self.prior.normal_terms(self._positions())
        if terms is None:
            weights = gaussian.draw(self.mu, self.rho, key)
            kl = self._log_ratio(weights)
        else:
            weights, kl = gaussian.draw_and_kl(self.mu, self.rho, key, terms)
        return self._place(weights), kl

    def variance_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variance and the KL, from one pass over the stored weights."""
        terms = self.prior.normal_terms(self._positions())
        if terms is None:
            return super().variance_and_kl(key)
        variance, kl = gaussian.variance_and_kl(self.mu, self.rho, terms)
        return self._place(variance), kl

    def perturbation_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return σ·ε and the KL: that of a zero mean, plus the term of μ."""
        terms = self.prior.normal_terms(self._positions())
        if terms is None:
            return super().perturbation_and_kl(key)
        zero_mean = gaussian.NormalTerms(None, terms.scale)
        perturbation, kl = gaussian.draw_and_kl(torch.zeros_like(self.mu), self.rho, key, zero_mean)
        return self._place(perturbation), kl + gaussian.mean_kl(self.mu, terms)

    def _log_ratio(self, weights: Tensor) -> Tensor:
        log_q = gaussian.log_density(weights - self.mu, self.std())
        return log_q - self.prior.log_prob(weights, self._positions())

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho

    def diagonal_gaussian(self) -> DiagonalGaussian | None:
        """Return μ, ρ and the prior, if that is Gaussian."""
        terms = self.prior.normal_terms(self._positions())
        return None if terms is None else DiagonalGaussian(self.mu, self.rho, terms)

    def extra_repr(self) -> str:
        """Add the prior."""
        return f"{super().extra_repr()}, prior={self.prior}"
