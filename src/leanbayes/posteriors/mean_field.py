"""The mean-field Gaussian: w_i ~ N(μ_i, softplus(ρ_i)²), independent (Blundell et al. 2015)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes import gaussian
from leanbayes.layout import Layout
from leanbayes.posteriors.base import Posterior
from leanbayes.priors import BoundPrior


class MeanFieldPosterior(Posterior):
    """Two numbers a weight: μ and ρ, each one flat vector."""

    def __init__(self, layout: Layout, mean: Tensor, std: Tensor, prior: BoundPrior) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.rho = nn.Parameter(gaussian.inverse_softplus(std))
        self.prior = prior

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def std(self) -> Tensor:
        """Return σ = softplus(ρ)."""
        return F.softplus(self.rho)

    def variance(self) -> Tensor:
        """Return σ²."""
        return self.std().square()

    def sample(self, key: Tensor) -> Tensor:
        """Draw μ + σ·ε."""
        return gaussian.draw(self.mu, self.rho, key)

    def std_of_draws(self) -> Tensor | None:
        """Return σ."""
        return gaussian.std_of_draws(self.rho)

    def perturbation(self, key: Tensor) -> Tensor:
        """Draw σ·ε."""
        return gaussian.draw(torch.zeros_like(self.mu), self.rho, key)

    @property
    def kl_kind(self) -> str:
        """Exact for a Gaussian prior."""
        return "monte-carlo" if self.prior.normal_terms() is None else "exact"

    def kl(self, key: Tensor) -> Tensor:
        """KL(q ‖ prior), or log q(w) - log p(w) at one draw where there is no closed form."""
        terms = self.prior.normal_terms()
        if terms is None:
            return self._log_ratio(self.sample(key))
        return gaussian.normal_kl(self.mu, self.std(), terms)

    def sample_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Draw and KL in one pass over the weights."""
        terms = self.prior.normal_terms()
        if terms is None:
            weights = self.sample(key)
            return weights, self._log_ratio(weights)
        return gaussian.draw_and_kl(self.mu, self.rho, key, terms)

    def variance_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Variance and KL in one pass over the weights."""
        terms = self.prior.normal_terms()
        if terms is None:
            return super().variance_and_kl(key)
        return gaussian.variance_and_kl(self.mu, self.rho, terms)

    def perturbation_and_kl(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Perturbation and KL: that of a draw around 0, and then what the distance of μ adds."""
        terms = self.prior.normal_terms()
        if terms is None:
            return super().perturbation_and_kl(key)
        around_zero = gaussian.NormalTerms(None, terms.scale)
        perturbation, kl = gaussian.draw_and_kl(torch.zeros_like(self.mu), self.rho, key, around_zero)
        return perturbation, kl + gaussian.mean_kl(self.mu, terms)

    def _log_ratio(self, weights: Tensor) -> Tensor:
        return gaussian.log_density(weights - self.mu, self.std()) - self.prior.log_prob(weights)

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield ρ."""
        yield self.rho
