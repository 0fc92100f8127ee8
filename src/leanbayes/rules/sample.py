"""`sample`: sample all weights once for the whole batch (Blundell et al. 2015). This is the default rule."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule, register_rule


@register_rule
class Sample(Rule):
    """One sample of all weights for the batch. Supports every operation, and costs one pass over the weights."""

    name = "sample"

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return one sample of each parameter, with the KL from the same pass over the weights."""
        if with_kl:
            flat, kl = posterior.sample_and_kl(key)
            return posterior.layout.split(flat), kl
        return posterior.draw(key), None
