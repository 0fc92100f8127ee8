"""The plain network: the bar for quality and the unit of cost."""

from dataclasses import dataclass

from leanbayes.config import configurable
from leanbayes.method import Method


@configurable
@dataclass(frozen=True)
class Deterministic(Method):
    """A plain network, for comparison; its one draw is itself."""

    rule = "mean"
    samples = 1
    bayesian_weights = False
