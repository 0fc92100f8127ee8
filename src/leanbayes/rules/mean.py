"""`mean`: the network at the posterior mean, without noise."""

from collections.abc import Sequence

from torch import Tensor

from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule


class Mean(Rule):
    """The mean weights; a plain deterministic network."""

    name = "mean"
    random = False

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Tensor], Tensor | None]:
        """Return the means."""
        return posterior.layout.split(posterior.mean()), posterior.kl(key) if with_kl else None
