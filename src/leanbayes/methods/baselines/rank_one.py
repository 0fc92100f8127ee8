"""Rank-1 Bayesian networks (Dusenberry et al. 2020): a mixture of Gaussian or Cauchy rank-1 factors."""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from leanbayes.core.config import check_choices
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.rank_one_network import BAYESIAN_FACTORS, RankOneNetwork, check_members
from leanbayes.model.method import Method, register_method
from leanbayes.posteriors import CauchyFactors, GaussianFactors, Posterior
from leanbayes.priors import Normal

FactorDistribution = Literal["gaussian", "cauchy"]


@register_method("rank-1")
@dataclass(frozen=True)
class RankOne(Method):
    """Rank-1 Bayesian network: the factors of a BatchEnsemble are random, and the weights are shared.

    Member k has the weights W ∘ s_k r_kᵀ, where r_k and s_k have their own means and scales, and a prior around 1. The
    posterior is the mixture of all members; a sample chooses a member, and then its factors. The KL is the mean of the
    members' KLs, an upper bound of the KL of the mixture. In training each example of a batch goes through one member.

    Paper: Dusenberry et al. (2020), "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors".

    Attributes:
        members: number of mixture components.
        distribution: distribution of the factors and of their prior, gaussian or cauchy.
        prior_scale: std of a Gaussian prior, or scale of a Cauchy prior.
        factor_std: std of the initial means of the factors around 1. Use a small one for a trained network.
        init_std: initial std or scale of the factors.
        limit: largest absolute value of a Cauchy factor, because very large ones spoil BatchNorm. The authors clamp at
            10, and draw factors for each example.
        samples: number of Monte Carlo samples of a prediction.
        seed: seed of the initial means of the factors.

    Example:
        >>> bnn = lb.fit(network, lb.RankOne(members=4), train_set, epochs=30)
    """

    members: int = 4
    distribution: FactorDistribution = "gaussian"
    prior_scale: float = 0.1
    factor_std: float = 0.1
    init_std: float = 1e-3
    limit: float = 2.0
    samples: int = 32
    seed: int = 0
    chooses_parameters = True

    def __post_init__(self) -> None:
        check_choices(self, distribution=FactorDistribution)
        check_members(self.members, self.factor_std)
        for name in ("prior_scale", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be a positive number.")
        if not 1 < self.limit < math.inf:
            raise LeanBayesError(f"limit={self.limit} must be a finite number above 1.")
        if self.samples < 1:
            raise LeanBayesError(f"samples={self.samples} must be at least 1.")

    def selected(self, network: nn.Module) -> str:
        """Return which parameters of the prepared network are Bayesian: the factors."""
        return BAYESIAN_FACTORS

    def prepare(self, network: nn.Module) -> nn.Module:
        """Add the factors of all members to a copy of the network."""
        made = RankOneNetwork(copy.deepcopy(network), self.members, counted=False)
        made.training = network.training
        return made.initialize("normal", self.factor_std, self.seed)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Posterior:
        """Set the means to the initial factors."""
        std = torch.full_like(mean, self.init_std)
        if self.distribution == "cauchy":
            return CauchyFactors(layout, mean, std, self.prior_scale, self.members, self.limit)
        return GaussianFactors(layout, mean, std, Normal(self.prior_scale).bind(layout, mean), self.members)
