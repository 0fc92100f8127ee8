"""`flipout` (Wen et al. 2018): one weight sample, made almost independent for each example by random signs.

y = x·μ + b + s ∘ ((x ∘ r)·Δ), where Δ is a sample minus the mean, and r, s are random signs per example and channel.
Each example gets a true weight sample, which all its positions share. Examples are uncorrelated, which lowers the
variance of the gradient. The first dimension of an input must be the batch, or the batch merged with its tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from leanbayes.core import noise
from leanbayes.core.network import tensors_of
from leanbayes.core.tensor_like import one_line
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import PassContext, Rule, register_rule
from leanbayes.rules.random_weight import LinearUse, RandomWeight, move_noise, noise_position, restart_noise


class _Signs(noise.NoiseSource):
    """The noise of one call of the network, and how many examples the batch has."""

    examples: int | None = None
    batch_first: bool = True

    def of_rows(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return signs for a shape whose first dimension is the batch, or several tokens per example."""
        rows = shape[0]
        if not self.examples or rows == self.examples:
            return noise.signs(like, shape, self.key, self.next_stream())
        if rows % self.examples:  # a selection of tokens, or a table of positions: they share the sample
            return noise.signs(like, (1, *shape[1:]), self.key, self.next_stream())
        signs = noise.signs(like, (self.examples, *shape[1:]), self.key, self.next_stream())
        dim = 1 if self.batch_first else 0
        sizes = list(signs.shape)
        sizes.insert(dim, rows // self.examples)
        return signs.unsqueeze(dim).expand(sizes).reshape(shape)


class FlipoutWeight(RandomWeight):
    """A weight whose perturbation Δ is flipped for each example; `noise_part` is Δ."""

    rule = "flipout"
    noise: _Signs  # shared by all weights of a pass

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Add the outputs of the mean, and of the perturbation between two sets of signs."""
        loc = use.call(function, use.inputs, self.loc, bias=True)
        flipped = [x * self._signs(x, use.form.channel_dim) for x in use.inputs]
        change = use.call(function, flipped, self.noise_part, bias=False)
        return loc + change * self._signs(change, use.form.channel_dim)

    def _signs(self, x: Tensor, channel_dim: int) -> Tensor:
        channel = channel_dim % x.dim()
        shape = tuple(size if dim in (0, channel) else 1 for dim, size in enumerate(x.shape))
        if channel == 0:  # an input without a batch
            return noise.signs(x, shape, self.noise.key, self.noise.next_stream())
        return self.noise.of_rows(x, shape)

    def scaled(self, factor: Tensor | float) -> "FlipoutWeight":
        """Multiply by a constant."""
        return self.like(self.loc * factor, self.noise_part * factor)

    def __repr__(self) -> str:
        return one_line(self, lambda: self.noise_part.abs(), "mean_perturbation", self.name)


@register_rule
class Flipout(Rule):
    """One weight sample, with random signs for each example."""

    name = "flipout"
    per_example = True
    needs_factorized = True

    def begin(self, values: Sequence[Any], context: PassContext) -> None:
        """Use the same noise for every call with this sample, and take the number of examples from the inputs."""
        restart_noise(values)
        weight = next((value for value in values if isinstance(value, FlipoutWeight)), None)
        if weight is not None:
            first = next(tensors_of(context.inputs), None)
            weight.noise.examples = None if first is None or first.dim() == 0 else first.shape[0]
            weight.noise.batch_first = context.batch_first

    def position(self, values: Sequence[Any]) -> int:
        """Return the number of noise streams used so far."""
        return noise_position(values)

    def move_to(self, values: Sequence[Any], position: int) -> None:
        """Continue with the noise stream after `position`."""
        move_noise(values, position)

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the mean of each parameter and one perturbation of it."""
        self.check(posterior)
        layout, source = posterior.layout, _Signs(posterior.example_key(key))
        change, kl = posterior.perturbation_and_kl(key) if with_kl else (posterior.perturbation(key), None)
        means, changes = layout.split(posterior.mean()), layout.split(change)
        slots = zip(means, changes, layout, posterior.random_slots(), strict=True)
        return [FlipoutWeight(m, c, source, slot.name) if random else m for m, c, slot, random in slots], kl
