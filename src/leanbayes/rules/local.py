"""`local`: local reparameterization (Kingma et al. 2015): sample the outputs of a layer, not its weights.

y ~ N(x·μ + b, x²·σ²), independent for each output. For a linear layer on (batch, features) this equals one weight
sample per example. For a convolution it does not: neighboring pixels share their weights, but here they do not share
their noise, so every later average loses uncertainty. Train and predict with the same rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from leanbayes.core import gaussian
from leanbayes.core.noise import NoiseSource
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import PassContext, Rule, register_rule
from leanbayes.rules.random_weight import LinearUse, RandomWeight, move_noise, noise_position, restart_noise


class LocalWeight(RandomWeight):
    """A Gaussian weight that adds noise to the outputs; `noise_part` is its variance."""

    rule = "local"

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Compute the mean and variance of the outputs, and sample them."""
        loc = use.call(function, use.inputs, self.loc, bias=True)
        variance = use.call(function, [x * x for x in use.inputs], self.noise_part, bias=False)
        return gaussian.reparameterize(loc, variance, self.noise.key, self.noise.next_stream())

    def scaled(self, factor: Tensor | float) -> "LocalWeight":
        """Multiply by a constant."""
        return self.like(self.loc * factor, self.noise_part * factor**2)


@register_rule
class Local(Rule):
    """Independent noise on the outputs of each layer, for each example and position."""

    name = "local"
    shared_noise = False
    per_example = True
    needs_factorized = True

    def begin(self, values: Sequence[Any], context: PassContext) -> None:
        """Use the same noise for every call with this sample."""
        restart_noise(values)

    def position(self, values: Sequence[Any]) -> int:
        """Return the number of noise streams used so far."""
        return noise_position(values)

    def move_to(self, values: Sequence[Any], position: int) -> None:
        """Continue with the noise stream after `position`."""
        move_noise(values, position)

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the mean and variance of each parameter."""
        self.check(posterior)
        layout, source = posterior.layout, NoiseSource(key)
        variance, kl = posterior.variance_and_kl(key) if with_kl else (posterior.variance(), None)
        means, variances = layout.split(posterior.mean()), layout.split(variance)
        slots = zip(means, variances, layout, posterior.random_slots(), strict=True)
        return [LocalWeight(m, v, source, slot.name) if random else m for m, v, slot, random in slots], kl
