"""`mean`: the network with the posterior mean of its weights, without noise."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule, register_rule


@register_rule
class Mean(Rule):
    """The mean of all weights: a deterministic network."""

    name = "mean"
    random = False

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the mean of each parameter."""
        return posterior.center(), posterior.kl(key) if with_kl else None
