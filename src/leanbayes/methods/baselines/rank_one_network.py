"""Rank-1 factors of several members around the layers of one network: what BatchEnsemble and rank-1 networks share.

Member k computes y = s_k ∘ (W (x ∘ r_k)) + b + d_k, which is a layer with the weights W ∘ s_k r_kᵀ. The members share
W, so a member costs a few numbers per channel. In a loss each example of a batch goes through one member, so that a
step costs as much as that of the plain network, and BatchNorm sees all members together.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leanbayes.core import checkpointing
from leanbayes.core.network import remove_hooks, tensors_of
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.model.draw import Draw, StochasticNetwork

FactorInit = Literal["normal", "signs"]
BAYESIAN_FACTORS = r"^factors\.\d+\.(inputs|outputs)$"  # the names of r and s in a `RankOneNetwork`
_MOST_MEMBERS = 1000
UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear  # nn.MultiheadAttention only reads its weight


def check_members(members: int, factor_std: float) -> None:
    """Raise an error for settings that no factors can be made with."""
    if not 1 <= members <= _MOST_MEMBERS:
        raise LeanBayesError(f"members={members} must be at least 1 and at most {_MOST_MEMBERS:,}.")
    if not 0 <= factor_std < float("inf"):
        raise LeanBayesError(f"factor_std={factor_std} must be a finite number and not negative.")


class Factors(nn.Module):
    """The factors of one layer: r, s and d of each member. r and s are stored minus 1, so that weight decay is mild."""

    def __init__(self, layer: Any, members: int) -> None:
        super().__init__()
        if isinstance(layer, nn.modules.conv._ConvNd):
            inputs, outputs, self.channel_dim = layer.in_channels, layer.out_channels, -1 - len(layer.kernel_size)
        else:
            inputs, outputs, self.channel_dim = layer.in_features, layer.out_features, -1
        self.inputs, self.outputs = (nn.Parameter(layer.weight.new_zeros(members, n)) for n in (inputs, outputs))
        self.shift = None if layer.bias is None else nn.Parameter(layer.weight.new_zeros(members, outputs))

    @torch.no_grad()
    def initialize(self, init: FactorInit, std: float, generator: torch.Generator) -> None:
        """Draw r and s from N(1, std²), or random signs."""
        for values in (self.inputs, self.outputs):
            noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(noise.sign() - 1 if init == "signs" else std * noise)


@dataclass(frozen=True)
class _Pass:
    """Which member each example of one pass goes through.

    Attributes:
        members: The number of the member of all examples, or a tensor with the numbers of all members: those of the
            first examples, and then again from the first one. None for the mean of all members' factors.
        examples: The number of examples if they are divided among the members, or None if all have the same member.
    """

    members: int | Tensor | None
    examples: int | None = None

    def rows(self, values: Tensor, x: Tensor, channel_dim: int, layer: nn.Module) -> Tensor:
        """Return the factors (members, channels) of each example, in a shape that multiplies the activations x."""
        shape = [1] * x.dim()
        shape[channel_dim] = values.shape[1]
        if self.members is None:
            return values.mean(0).to(x.dtype).view(shape)
        if isinstance(self.members, int):
            return values[self.members].to(x.dtype).view(shape)
        ordered = values.index_select(0, self.members).to(x.dtype)
        if self.examples is None or x.dim() == -channel_dim:  # the latter is an input without a batch
            return ordered[0].view(shape)
        if x.shape[0] % self.examples:
            raise UnsupportedOperation(
                f"A {type(layer).__name__} layer got {x.shape[0]} rows for a batch of {self.examples} examples, so its "
                "rows cannot be divided among the members: use lb.Ensemble for this network."
            )
        tiles, tokens = -(-self.examples // len(values)), x.shape[0] // self.examples
        each = ordered.repeat(tiles, 1)[: self.examples]
        shape[0] = x.shape[0]
        return (each if tokens == 1 else each.repeat_interleave(tokens, 0)).view(shape)


class _Current:
    """The pass that runs, if any. All hooks of a network share it."""

    def __init__(self) -> None:
        self.running: _Pass | None = None  # not of the class: the first pass would set it, and compile a loss twice

    def get(self) -> _Pass:
        """Return the pass."""
        if self.running is None:
            raise LeanBayesError(
                "This network has the factors of several members: call the model, or one of bnn.network.member(i)."
            )
        return self.running


@dataclass
class _Scale:
    """A hook that multiplies the inputs of a layer by the factors r."""

    factors: Factors
    current: _Current

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs["input"]
        factors = self.current.get().rows(self.factors.inputs, x, self.factors.channel_dim, layer)
        scaled = torch.addcmul(x, x, factors)
        return ((scaled, *args[1:]), kwargs) if args else (args, {**kwargs, "input": scaled})


@dataclass
class _ScaleOutput:
    """A hook that multiplies the outputs of a layer by the factors s, except for the bias, and adds d."""

    factors: Factors
    current: _Current

    def __call__(self, layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        current, own = self.current.get(), self.factors
        output = torch.addcmul(output, output, current.rows(own.outputs, output, own.channel_dim, layer))
        if own.shift is None:
            return output
        shift = own.shift - own.outputs * layer.bias  # s ∘ (Wx + b) is too large by (s - 1) ∘ b
        return output + current.rows(shift, output, own.channel_dim, layer)


class RankOneNetwork(StochasticNetwork):
    """A network with rank-1 factors of several members around its linear and convolutional layers.

    Other layers, such as norms, embeddings, recurrent layers and nn.MultiheadAttention, are the same in all members.

    Args:
        network: The network, which gets hooks.
        count: The number of members.
        counted: Whether a member has no noise, so that there are as many samples as members.
    """

    loss_pass = "divided"

    def __init__(self, network: nn.Module, count: int, counted: bool) -> None:
        super().__init__()
        self.inner = network
        self.count = count
        self.members = count if counted else None
        layers = _layers(network)
        if not layers:
            raise LeanBayesError(
                "The network has no linear or convolutional layer, so no layer can have rank-1 factors."
            )
        self.factors = nn.ModuleList(Factors(layer, count) for layer in layers)
        self._current = _Current()
        self._divides = all(getattr(module, "batch_first", True) for module in network.modules())
        for layer, factors in zip(layers, self.factors, strict=True):
            assert isinstance(factors, Factors)
            layer.register_forward_pre_hook(_Scale(factors, self._current), with_kwargs=True)
            layer.register_forward_hook(_ScaleOutput(factors, self._current))

    def initialize(self, init: FactorInit, std: float, seed: int) -> "RankOneNetwork":
        """Draw the factors of all layers."""
        generator = torch.Generator().manual_seed(seed)
        for factors in self.factors:
            assert isinstance(factors, Factors)
            factors.initialize(init, std, generator)
        return self

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run one member, or divide the examples among the members in a loss."""
        with self._running(self._pass(draw, (args, kwargs))):
            return self.inner(*args, **kwargs)

    def _pass(self, draw: Draw | None, inputs: Any) -> _Pass:
        if draw is None:
            if self.members is not None:
                raise LeanBayesError(
                    "These members have no mean network: predict with all of them, or use bnn.network.member(i)."
                )
            return _Pass(None)
        if self.members is not None and not draw.training:
            return _Pass(draw.number % self.count)
        first = next(tensors_of(inputs), None)
        divided = draw.training and self._divides and first is not None and first.dim() > 0
        # The key chooses the first member without waiting for the device.
        order = (torch.arange(self.count, device=draw.key.device) + draw.key.sum() % self.count) % self.count
        return _Pass(order, len(first) if divided and first is not None else None)

    @contextlib.contextmanager
    def _running(self, one: _Pass) -> Iterator[None]:
        before, self._current.running = self._current.running, one
        try:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                yield
            else:
                with checkpointing.running(lambda: lambda: self._running(one)):
                    yield
        finally:
            self._current.running = before

    def member(self, number: int) -> nn.Module:
        """Return member `number` as a plain network, with its factors multiplied into the weights.

        If the factors are random, call it inside `with bnn.drawn():`, which holds a sample of them.
        """
        if not 0 <= number < self.count:
            raise LeanBayesError(f"member {number} does not exist: choose one from 0 to {self.count - 1}.")
        if any(factors.inputs is None for factors in self.factors):
            raise LeanBayesError("The factors of a member are random: call member() inside with bnn.drawn().")
        return self._folded(lambda values: values[number])

    def plain(self) -> nn.Module:
        """Return the network with the mean of all members' factors."""
        if self.members is not None:
            raise LeanBayesError("Members with shared weights are not a single network: use bnn.network.member(i).")
        return self._folded(lambda values: values.mean(0))

    @torch.no_grad()
    def _folded(self, choose: Any) -> nn.Module:
        network = copy.deepcopy(self.inner)
        for layer, factors in zip(_layers(network), self.factors, strict=True):
            assert isinstance(factors, Factors)
            remove_hooks(layer, (_Scale, _ScaleOutput))
            weight = layer.weight * _outer(layer, 1 + choose(factors.inputs), 1 + choose(factors.outputs))
            layer.weight = nn.Parameter(weight.to(layer.weight.dtype), layer.weight.requires_grad)
            if factors.shift is not None:
                layer.bias = nn.Parameter(layer.bias + choose(factors.shift), layer.bias.requires_grad)
        return network


def _layers(network: nn.Module) -> list[Any]:
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return [m for m in network.modules() if isinstance(m, kinds) and not isinstance(m, UNCALLED)]


def _outer(layer: Any, inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return s rᵀ in the shape of a layer's weight. In a grouped convolution each group has its own channels."""
    groups = getattr(layer, "groups", 1)
    r, s = inputs.view(groups, 1, -1), outputs.view(groups, -1, 1)
    product = (r.mT * s.mT) if isinstance(layer, nn.modules.conv._ConvTransposeNd) else r * s
    return product.flatten(0, 1).view(*layer.weight.shape[:2], *[1] * (layer.weight.dim() - 2))
