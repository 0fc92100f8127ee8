"""The plain network: the bar for quality and the unit of cost."""

from dataclasses import dataclass

from leanbayes.bayesian import Method
from leanbayes.config import configurable


@configurable
@dataclass(frozen=True)
class Deterministic(Method):
    """Keep the network as it is; its one draw is itself."""

    rule = "mean"
    samples = 1
    bayesian_weights = False
