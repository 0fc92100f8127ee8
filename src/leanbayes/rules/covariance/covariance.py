"""The rule `covariance`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leanbayes.core.noise import NoiseSource
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule, register_rule
from leanbayes.rules.covariance.weighted_layers import CovarianceWeight


@register_rule
class Covariance(Rule):
    """Full covariances instead of samples."""

    name = "covariance"
    random = False
    needs_factorized = True
    needs_weights = True

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the mean and variance of each parameter."""
        self.check(posterior)
        layout, source = posterior.layout, NoiseSource(key)
        variance, kl = posterior.variance_and_kl(key) if with_kl else (posterior.variance(), None)
        means, variances = layout.split(posterior.mean()), layout.split(variance)
        parts = zip(means, variances, layout, posterior.random_slots(), strict=True)
        return [CovarianceWeight(m, v, source, slot.name) if random else m for m, v, slot, random in parts], kl
