"""`flipout` (Wen et al. 2018): one weight draw, made almost independent for each example by random signs.

y = x·μ + b + s ∘ ((x ∘ r)·Δ) with Δ a draw less the mean and r, s random signs of an example's channels. Each
example sees a true weight draw, shared by all its positions; examples are uncorrelated, which lowers the variance of
the gradient. The first dimension of an input is taken for the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from leanbayes import noise
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule
from leanbayes.rules.weights import LinearUse, RandomWeight, restart_noise


class FlipoutWeight(RandomWeight):
    """A mean and a perturbation that is flipped for each example; `spread` is that perturbation."""

    rule = "flipout"

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Outputs of the mean, and of the perturbation between two sets of signs."""
        loc = use.call(function, use.inputs, self.loc, bias=True)
        flipped = [x * self._signs(x, use.form.channel_dim) for x in use.inputs]
        change = use.call(function, flipped, self.spread, bias=False)
        return loc + change * self._signs(change, use.form.channel_dim)

    def _signs(self, x: Tensor, channel_dim: int) -> Tensor:
        channel = channel_dim % x.dim()
        shape = tuple(size if dim in (0, channel) else 1 for dim, size in enumerate(x.shape))
        return noise.signs(x, shape, self.noise.key, self.noise.next_stream())

    def scaled(self, factor: Tensor | float) -> "FlipoutWeight":
        """Multiply by a constant."""
        return self.like(self.loc * factor, self.spread * factor)


class Flipout(Rule):
    """One draw, with random signs for each example."""

    name = "flipout"
    per_example = True

    def begin(self, model: Any, values: Sequence[Any], inputs: Any) -> None:
        """Use the same noise for every call with this draw."""
        restart_noise(values)

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Give each layer its mean weights and one perturbation of them."""
        layout, source = posterior.layout, noise.NoiseSource(key)
        change, kl = posterior.perturbation_and_kl(key) if with_kl else (posterior.perturbation(key), None)
        means, changes = layout.split(posterior.mean()), layout.split(change)
        slots = zip(means, changes, layout, posterior.random_slots(), strict=True)
        return [FlipoutWeight(m, c, source, slot.name) if random else m for m, c, slot, random in slots], kl
