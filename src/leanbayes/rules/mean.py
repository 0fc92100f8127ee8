"""`mean`: the network at the posterior mean, without noise."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule


class Mean(Rule):
    """The mean weights; a plain deterministic network."""

    name = "mean"
    random = False

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the means."""
        return posterior.centre(), posterior.kl(key) if with_kl else None
