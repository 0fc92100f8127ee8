"""The mean-field Gaussian: w_i ~ N(μ_i, softplus(ρ_i)²), independent (Blundell et al. 2015)."""

from torch import Tensor, nn

from leanbayes.core import gaussian
from leanbayes.core.layout import Layout
from leanbayes.posteriors.gaussian_weights import GaussianWeights
from leanbayes.priors import BoundPrior


class MeanFieldPosterior(GaussianWeights):
    """Two numbers per weight, μ and ρ, each stored as one flat vector."""

    def __init__(self, layout: Layout, mean: Tensor, std: Tensor, prior: BoundPrior) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(mean)
        self.rho = nn.Parameter(gaussian.inverse_softplus(std))
        self.prior = prior

    def mean(self) -> Tensor:
        """Return μ."""
        return self.mu

    def reusable_std(self) -> Tensor | None:
        """Return σ, or None if a kernel computes it."""
        return gaussian.reusable_std(self.rho)
