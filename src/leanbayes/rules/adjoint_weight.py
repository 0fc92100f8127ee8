"""What happens during a call of a network by the rule `adjoint`: layers are recorded, and δ arrives at their weights.

The network runs once at the posterior mean. A backward pass gives δ, the gradient with respect to the output of every
layer. As soon as δ of a layer is known, the gradients of its weight are computed for a few examples at a time, squared,
multiplied by σ² and added up; so memory is that of a training step, and never batch × weights. Gradients of a weight
that is used several times are added before they are squared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanbayes.errors import UnsupportedOperation
from leanbayes.rules.example_gradients import CONVOLUTIONS, PRODUCTS, Examples, weighted_squares
from leanbayes.rules.moments.value import variance_dtype
from leanbayes.rules.random_weight import LinearUse, RandomWeight

_ELEMENTS = {"cpu": 1 << 20}  # of the gradients that are in memory at once; smaller on a CPU, whose caches are small
_MOST_ELEMENTS = 1 << 26


@dataclass(eq=False)
class AdjointPass:
    """One call of a network, and the variances that its backward passes add up.

    Attributes:
        rows: The number of examples.
        batch_first: Whether values of three dimensions are (batch, length, channels).
        inputs: The memory of the inputs of the network.
        weights: The random weights.
        root: A tensor that every layer depends on, so that a backward pass reaches all of them.
        recording: Whether the network runs for the first time; activation checkpointing runs parts of it again.
        variance: The variance of the current scalar, one per example.
    """

    rows: int
    batch_first: bool
    inputs: set[int]
    root: Tensor
    weights: "list[_Source]" = field(default_factory=list)
    recording: bool = True
    variance: Tensor | None = None

    def batch_dim(self, shape: Sequence[int]) -> int | None:
        """Return the dimension of the output of a linear layer that counts examples, or None if it is unclear."""
        rows = self.rows
        if rows > 1 and len(shape) == 3 and shape[1] == rows:
            if shape[0] in (1, rows):  # also (length, batch, channels), or (1, length, channels)
                return 0 if self.batch_first and shape[0] == rows else None
            if not self.batch_first or shape[0] % rows:
                return 1
        if shape[0] == rows or (self.batch_first and shape[0] % rows == 0):
            return 0
        return None

    def variances(self, scalars: Tensor) -> Tensor:
        """Return the variance of each of the scalars, (examples, scalars)."""
        self.recording = False
        found = []
        for number in range(scalars.shape[1]):
            self.variance = torch.zeros(self.rows, dtype=variance_dtype(scalars.dtype), device=scalars.device)
            if scalars.requires_grad:
                last = number == scalars.shape[1] - 1
                torch.autograd.grad(scalars[:, number].sum(), self.root, retain_graph=not last, allow_unused=True)
            for weight in self.weights:  # some uses of these had no effect on the scalar
                weight.add_up()
            found.append(self.variance)
        return torch.stack(found, 1)


@dataclass(eq=False)
class _Source:
    """A random weight during one call of a network.

    Attributes:
        std: σ of each element, from which the parts that layers use are derived.
        variance: σ².
        within: The call.
        uses: How often layers use it.
        waiting: The uses whose δ is known in the current backward pass, each with σ of the part it used.
    """

    std: Tensor
    variance: Tensor
    within: AdjointPass
    uses: int = 0
    waiting: list[tuple[Examples, Tensor]] = field(default_factory=list)

    def arrived(self, examples: Examples, std: Tensor) -> None:
        """Add the variance of this weight as soon as all of its uses are known."""
        self.waiting.append((examples, std))
        if len(self.waiting) == self.uses:
            self.add_up()

    def add_up(self) -> None:
        """Add the variance of the uses that wait."""
        uses, self.waiting = self.waiting, []
        if not uses:
            return
        total = self.within.variance
        assert total is not None
        whole = len(uses) > 1 or uses[0][1] is self.std
        # That of the gradients: the scalars may have another one, if the network or a function converts the outputs.
        dtype = variance_dtype(self.std.dtype if len(uses) > 1 else uses[0][0].delta.dtype)
        variance = (self.variance if whole else uses[0][1].detach().square()).to(dtype)
        for start, end in _chunks(uses):
            parts = [(examples.part(start, end), std) for examples, std in uses]
            if len(parts) == 1:
                total[start:end] += parts[0][0].squared(variance)
            else:
                gradients = sum(self._to_whole(examples.gradients(), std) for examples, std in parts)
                total[start:end] += weighted_squares(torch.as_tensor(gradients), variance)

    def _to_whole(self, gradients: Tensor, std: Tensor) -> Tensor:
        """Return gradients of a part of the weight as gradients of the whole weight."""
        if std is self.std:
            return gradients
        gradients = gradients.to(std.dtype)
        (whole,) = torch.autograd.grad(std, self.std, gradients, retain_graph=True, is_grads_batched=True)
        return whole


def _chunks(uses: Sequence[tuple[Examples, Tensor]]) -> Iterator[tuple[int, int]]:
    """Yield ranges of examples whose gradients have a bounded number of elements."""
    first = uses[0][0]
    if isinstance(first.rows, torch.SymInt):  # a graph for any number of examples has no loop over them
        yield 0, first.rows
        return
    most = _ELEMENTS.get(first.delta.device.type, _MOST_ELEMENTS)
    step = max(1, most // max(sum(examples.elements() for examples, _ in uses), 1))
    for start in range(0, first.rows, step):
        yield start, min(start + step, first.rows)


class _Tap(torch.autograd.Function):
    """Returns the output of a layer unchanged, and passes δ to its weight in the backward pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor, arrived: Callable[..., None], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)  # raises an error if they are changed in place
        ctx.arrived = arrived
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # once: activation checkpointing computes them again
        ctx.arrived(delta, inputs)
        return delta, None, None, *(None for _ in inputs)


class AdjointWeight(RandomWeight):
    """A weight that layers use at its mean, and whose gradients are computed per example; `noise_part` is σ."""

    rule = "adjoint"

    def __init__(
        self, loc: Tensor, noise_part: Tensor, name: str, variance: Tensor | None = None, source: _Source | None = None
    ) -> None:
        self.loc, self.noise_part, self.name, self.variance, self.source = loc, noise_part, name, variance, source

    def begin(self, within: AdjointPass) -> None:
        """Prepare a call of the network."""
        self.noise_part = self.noise_part.detach().requires_grad_()
        variance = self.noise_part.detach().square() if self.variance is None else self.variance
        self.source = _Source(self.noise_part, variance, within)
        within.weights.append(self.source)

    def like(self, loc: Tensor, noise_part: Tensor) -> "AdjointWeight":
        """Return a part of this weight."""
        return AdjointWeight(loc, noise_part, self.name, source=self.source)

    def scaled(self, factor: Tensor | float) -> "AdjointWeight":
        """Multiply by a constant."""
        if isinstance(factor, Tensor) and factor.requires_grad:
            factor = factor.detach()
        return self.like(self.loc * factor, self.noise_part * factor)

    def __repr__(self) -> str:
        return RandomWeight.__repr__(self.like(self.loc, self.noise_part.detach().square()))

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Call the function with the mean, and record the call."""
        source, std = self.source, self.noise_part
        if source is None:
            raise UnsupportedOperation(
                "The rule 'adjoint' starts with a call of the model: use bnn(x), or the function that bnn.drawn() "
                'yields; other methods of the network, such as generate(), need bnn.using("sample").'
            )
        if source.within.recording and source.uses and not std.requires_grad:
            raise self._unsupported("a detached part of a weight that is used several times")
        use, batch_dim = self._with_batch(function, use)
        output = use.call(function, use.inputs, self.loc, bias=True)
        output = output.clone() if output._is_view() else output
        if source.within.recording:
            source.uses += 1
        rows, loc = source.within.rows, self.loc
        inputs = [use.arguments["input"]] if function is F.embedding else use.inputs
        # Without the inputs, which autograd holds.
        kept = replace(use, arguments={**use.arguments, **dict.fromkeys(use.form.inputs)})

        def arrived(delta: Tensor, inputs: Sequence[Tensor]) -> None:
            inputs = [x.to(delta.dtype) if x.is_floating_point() else x for x in inputs]
            values = (*inputs, delta)
            if function in CONVOLUTIONS and delta.dim() == CONVOLUTIONS[function] + 1:
                values = tuple(x.unsqueeze(0) for x in values)  # an image without a batch
            split = [_by_example(x, rows, batch_dim) for x in values]
            source.arrived(Examples(function, kept, loc, split[:-1], split[-1]), std)

        return _Tap.apply(output, source.within.root, arrived, *(x.detach() for x in inputs))

    def _with_batch(self, function: Callable[..., Any], use: LinearUse) -> tuple[LinearUse, int | None]:
        """Return the call with inputs that have one entry per example, and the dimension that counts examples."""
        assert self.source is not None
        within = self.source.within
        names = ("input",) if function is F.embedding else use.form.inputs
        inputs: list[Tensor] = [use.arguments[name] for name in names]
        shape = (*inputs[0].shape, 1) if function is F.embedding else tuple(inputs[0].shape)
        if within.rows == 1 or (function in PRODUCTS and self.dim() > 2):
            clear, dim = within.rows == 1, None
        elif function in CONVOLUTIONS and len(shape) == CONVOLUTIONS[function] + 1:  # an image without a batch
            clear, dim = False, None
        elif shape[0] == 1 and not (len(shape) == 3 and shape[1] == within.rows):  # the same for all examples
            inputs = [x.expand(within.rows, *x.shape[1:]) for x in inputs]
            clear, dim = True, 0
        else:
            tokens = function is F.linear or function is F.embedding or function in PRODUCTS
            dim = within.batch_dim(shape if tokens else shape[:1])
            clear = dim is not None and (function is not F.embedding or self._is_batch(inputs[0]))
        if not clear:
            raise self._unsupported(
                f"{torch.overrides.resolve_name(function)} of an input of shape {tuple(inputs[0].shape)}, which has no "
                f"clear batch dimension in a batch of {within.rows},"
            )
        return replace(use, arguments={**use.arguments, **dict(zip(names, inputs, strict=True))}), dim

    def _is_batch(self, index: Tensor) -> bool:
        """Whether the indices of an embedding belong to examples; positions, 0, 1, 2, ..., may look like them."""
        assert self.source is not None
        within = self.source.within
        if index.untyped_storage()._cdata in within.inputs:
            return True
        if index.dim() == 1:
            return not torch.equal(index, torch.arange(len(index), device=index.device))
        return not (index.dim() == 2 and index.shape[0] == index.shape[1] == within.rows)


def _by_example(x: Tensor, rows: int, dim: int | None) -> Tensor:
    """Return values as (examples, rows of each, ...). A batch of one, whose `dim` is None, may have no batch."""
    return x.unsqueeze(0) if dim is None else x.movedim(dim, 0).unflatten(0, (rows, -1))
