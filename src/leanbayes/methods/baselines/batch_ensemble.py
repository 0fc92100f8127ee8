"""BatchEnsemble (Wen et al. 2020): members that share their weights and differ in rank-1 factors."""

from dataclasses import dataclass

from torch import nn

from leanbayes.core.config import check_choices
from leanbayes.methods.baselines.rank_one_network import FactorInit, RankOneNetwork, check_members
from leanbayes.model.method import Method, register_method


@register_method("batch-ensemble")
@dataclass(frozen=True)
class BatchEnsemble(Method):
    """BatchEnsemble: members that share all weights, and multiply the channels of each layer by their own factors.

    Member k has the weights W ∘ s_k r_kᵀ and its own biases. In training each example of a batch goes through one
    member, so a step costs as much as that of the plain network. A prediction takes one pass per member.

    Paper: Wen et al. (2020), "BatchEnsemble: An Alternative Approach to Efficient Ensemble and Lifelong Learning".

    Attributes:
        members: number of members.
        init: how the factors start: normal for N(1, factor_std²), signs for random signs.
        factor_std: std of the initial factors. Use a small one for a trained network.
        seed: seed of the initial factors.

    Example:
        >>> bnn = lb.fit(network, lb.BatchEnsemble(members=4), train_set, epochs=30)
    """

    members: int = 4
    init: FactorInit = "normal"
    factor_std: float = 0.5
    seed: int = 0
    bayesian_weights = False

    def __post_init__(self) -> None:
        check_choices(self, init=FactorInit)
        check_members(self.members, self.factor_std)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Add the factors of all members to the network."""
        made = RankOneNetwork(network, self.members, counted=True)
        return made.initialize(self.init, self.factor_std, self.seed)
