"""`local`: local reparameterisation (Kingma et al. 2015): draw the outputs of a layer, not its weights.

y ~ N(x·μ + b, x²·σ²), independent for each output. For a linear layer on (batch, features) that is what a weight
draw per example would give. In a convolution it is not: neighbouring pixels share their weights, and here they do
not share their noise, so uncertainty is lost in every later average. Train and predict with the same rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from leanbayes import gaussian
from leanbayes.noise import NoiseSource
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule
from leanbayes.rules.weights import LinearUse, RandomWeight, restart_noise


class LocalWeight(RandomWeight):
    """A Gaussian weight that turns into noise on the outputs; `spread` is its variance."""

    rule = "local"

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Mean and variance of the outputs, and a draw of them."""
        loc = use.call(function, use.inputs, self.loc, bias=True)
        variance = use.call(function, [x * x for x in use.inputs], self.spread, bias=False)
        return gaussian.reparameterise(loc, variance, self.noise.key, self.noise.next_stream())

    def scaled(self, factor: Tensor | float) -> "LocalWeight":
        """Multiply by a constant."""
        return self.like(self.loc * factor, self.spread * factor**2)


class Local(Rule):
    """Noise on the outputs of each layer, fresh for each example and position."""

    name = "local"
    shared_noise = False
    per_example = True

    def begin(self, model: Any, values: Sequence[Any], inputs: Any) -> None:
        """Use the same noise for every call with this draw."""
        restart_noise(values)

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Give each layer the mean and variance of its weights."""
        layout, source = posterior.layout, NoiseSource(key)
        variance, kl = posterior.variance_and_kl(key) if with_kl else (posterior.variance(), None)
        means, variances = layout.split(posterior.mean()), layout.split(variance)
        slots = zip(means, variances, layout, posterior.random_slots(), strict=True)
        return [LocalWeight(m, v, source, slot.name) if random else m for m, v, slot, random in slots], kl
