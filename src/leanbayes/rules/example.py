"""`example`: each example of a batch has its own sample of the factors that groups of weights share.

A factor of an input of a layer multiplies that input, y = μ·(x ∘ θ) + b, and a factor of an output multiplies that
output. So a sample for each example costs as much as one for the batch, which the rule `sample` draws. All positions
of an example share its factors. The first dimension of an input must be the batch, or the batch merged with its tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core.network import tensors_of
from leanbayes.core.noise import NoiseSource
from leanbayes.core.tensor_like import one_line
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import PassContext, Rule, register_rule
from leanbayes.rules.random_weight import LinearUse, RandomWeight

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_PRODUCTS = (
    torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__, torch.addmm, Tensor.addmm, *_TRANSPOSED
)  # fmt: skip
# The dimensions of inputs and outputs in a weight.
_DIMS: Mapping[Any, tuple[int | None, int]] = {
    **dict.fromkeys((F.linear, *_CONVOLUTIONS), (1, 0)),
    **dict.fromkeys(_PRODUCTS, (0, 1)),
    F.embedding: (None, 1),
}


class _Factors(NoiseSource):
    """The factors of a pass, (examples, groups), shared by all weights, and drawn once."""

    sample: Callable[[Tensor, int], Tensor]
    examples: int | None = None
    batch_first: bool = True
    _drawn: Tensor | None = None

    def of(self, x: Tensor, channel_dim: int, groups: Tensor) -> Tensor:
        """Return the factors of groups, one per channel, in a shape that multiplies activations."""
        shape = [1] * x.dim()
        shape[channel_dim] = len(groups)
        channel = channel_dim % x.dim()
        rows = 1 if channel == 0 else x.shape[0]
        examples = self.examples or rows
        if rows % examples:
            raise LeanBayesError(
                f"The rule 'example' cannot tell which of {examples} examples the {rows} rows of an input belong to: "
                'use bnn.using("sample").'
            )
        if self._drawn is None or len(self._drawn) != examples:
            self._drawn = self.sample(self.key, examples)
        found = self._drawn.to(x.dtype)[:, groups]
        if rows != examples:
            dim = 1 if self.batch_first else 0
            sizes = [len(found), len(groups)]
            sizes.insert(dim, rows // examples)
            found = found.unsqueeze(dim).expand(sizes).reshape(rows, len(groups))
        if channel:
            shape[0] = rows
        return found.reshape(shape)


class ScaledWeight(RandomWeight):
    """A weight μ whose groups have a factor for each example; `noise_part` has the number of the group of each element.

    It is a view that varies along one dimension only, so that slices and transposed weights know their groups.
    """

    rule = "example"
    noise: _Factors

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Multiply the inputs or the outputs by the factors."""
        dims = _DIMS.get(function)
        varying = [dim for dim, step in enumerate(self.noise_part.stride()) if step and self.noise_part.shape[dim] > 1]
        if dims is None or len(varying) > 1:
            raise self._unsupported(torch.overrides.resolve_name(function) or repr(function))
        inputs, outputs = dims
        dim = varying[0] if varying else inputs if inputs is not None else outputs
        groups = self.noise_part.movedim(dim, 0).flatten(1)[:, 0] if self.loc.dim() > 1 else self.noise_part
        channel_dim = use.form.channel_dim
        if dim == inputs:
            (x,) = use.inputs
            factors = self.noise.of(x, channel_dim, _repeated(groups, x.shape[channel_dim]))
            return use.call(function, [x * factors], self.loc, bias=True)
        change = use.call(function, use.inputs, self.loc, bias=False)
        factors = self.noise.of(change, channel_dim, _repeated(groups, change.shape[channel_dim]))
        both = use.call(function, use.inputs, self.loc, bias=True)
        return both + change * (factors - 1)

    def scaled(self, factor: Tensor | float) -> "ScaledWeight":
        """Multiply by a constant."""
        return self.like(self.loc * factor, self.noise_part)

    def __repr__(self) -> str:
        return one_line(self, lambda: self.loc.abs(), "mean_size", self.name)


def _repeated(groups: Tensor, channels: int) -> Tensor:
    """Repeat the groups of a grouped convolution, whose parts have the same ones."""
    return groups if len(groups) == channels else groups.repeat(channels // len(groups))


@register_rule
class Example(Rule):
    """One sample of the factors of groups for each example."""

    name = "example"
    per_example = True

    def check(self, posterior: Posterior) -> None:
        """Check that the posterior has groups of weights with a common factor."""
        if not posterior.has_groups:
            raise UnsupportedOperation(
                "The rule 'example' is for groups of weights with a common factor, as those of lb.SBP: use 'sample'."
            )
        super().check(posterior)

    def begin(self, values: Sequence[Any], context: PassContext) -> None:
        """Take the number of examples from the inputs."""
        weight = next((value for value in values if isinstance(value, ScaledWeight)), None)
        if weight is not None:
            first = next(tensors_of(context.inputs), None)
            weight.noise.examples = None if first is None or first.dim() == 0 else first.shape[0]
            weight.noise.batch_first = context.batch_first

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return μ of each parameter with the groups of its elements."""
        self.check(posterior)
        found, source = posterior.group_factors(), _Factors(key)
        source.sample = found.sample
        slots = zip(posterior.layout.split(found.weights), found.groups, posterior.layout, strict=True)
        values = [ScaledWeight(mean, groups, source, slot.name) for mean, groups, slot in slots]
        return values, posterior.kl(key) if with_kl else None
