"""`sample`: draw all weights once for the whole batch (Blundell et al. 2015). The default."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule


class Sample(Rule):
    """One draw for the batch; works with every operation, at the cost of one pass over the weights."""

    name = "sample"

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Draw, and take the KL in the same pass."""
        if with_kl:
            flat, kl = posterior.sample_and_kl(key)
            return posterior.layout.split(flat), kl
        return posterior.draw(key), None
