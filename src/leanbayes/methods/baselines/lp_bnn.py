"""LP-BNN (Franchi et al. 2023): a BatchEnsemble whose input factors come from small variational autoencoders."""

import copy
import math
from dataclasses import dataclass

from torch import Tensor, nn

from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.rank_one_network import RankOneNetwork, check_members
from leanbayes.model.method import Method, register_method
from leanbayes.posteriors import LatentFactors


@register_method("lp-bnn")
@dataclass(frozen=True)
class LPBNN(Method):
    """Latent-posterior network: a BatchEnsemble whose input factors are random, with few latent variables.

    For each layer a small variational autoencoder reads the input factors r of a member, samples latent variables, and
    returns the factors that the layer uses. The loss of the autoencoders takes the place of the KL. Output factors and
    weights are deterministic.

    Paper: Franchi et al. (2023), "Encoding the Latent Posterior of Bayesian Neural Networks for Uncertainty
    Quantification".

    Attributes:
        members: number of members.
        latent: number of latent variables of a member in a layer.
        factor_std: std of the initial factors around 1. Use a small one for a trained network.
        init_std: initial std of the latent variables.
        samples: number of Monte Carlo samples of a prediction.
        seed: seed of the initial factors and autoencoders.

    Example:
        >>> bnn = lb.fit(network, lb.LPBNN(members=4), train_set, epochs=30)
    """

    members: int = 4
    latent: int = 32
    factor_std: float = 0.5
    init_std: float = 0.1
    samples: int = 32
    seed: int = 0
    chooses_parameters = True

    def __post_init__(self) -> None:
        check_members(self.members, self.factor_std)
        if not 1 <= self.latent <= 1 << 12:
            raise LeanBayesError(f"latent={self.latent} must be at least 1 and at most {1 << 12:,}.")
        if not 0 < self.init_std < math.inf:
            raise LeanBayesError(f"init_std={self.init_std} must be a positive number.")
        if self.samples < 1:
            raise LeanBayesError(f"samples={self.samples} must be at least 1.")

    def selected(self, network: nn.Module) -> str:
        """Return which parameters of the prepared network are Bayesian: the input factors."""
        return r"^factors\.\d+\.inputs$"

    def prepare(self, network: nn.Module) -> nn.Module:
        """Add the factors of all members to a copy of the network."""
        made = RankOneNetwork(copy.deepcopy(network), self.members, counted=False)
        made.training = network.training
        return made.initialize("normal", self.factor_std, self.seed)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> LatentFactors:
        """Let the autoencoders read the initial factors."""
        return LatentFactors(layout, mean, self.latent, self.init_std, self.seed)
