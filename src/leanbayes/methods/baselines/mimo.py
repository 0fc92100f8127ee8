"""MIMO (Havasi et al. 2021): one network with several inputs and outputs, whose subnetworks are the members."""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.network import map_rows, output_tensor, remove_hooks, tensors_of
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.methods.baselines.ensemble import initialize_again
from leanbayes.methods.baselines.rank_one_network import UNCALLED
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.model.method import Method, register_method

_MOST_MEMBERS = 64


@register_method("mimo")
@dataclass(frozen=True)
class MIMO(Method):
    """Multi-input multi-output network: it predicts several inputs at once, by subnetworks that share all layers.

    The first layer reads M inputs, by channel, and the last one has M outputs. In training the M inputs are different
    examples, and each output has the label of its own input. A prediction repeats one input M times, and its M outputs
    are the members, all from one pass. Only the first and the last layer have more weights, and start from new ones.

    Paper: Havasi et al. (2021), "Training Independent Subnetworks for Robust Prediction".

    Attributes:
        members: M, the number of inputs and outputs.
        input_repetition: share of the rows of a training batch whose M inputs are the same example. More of them help
            small networks, and make the members more alike.
        batch_repetitions: how often each example is in a training batch, each time with other examples. A step costs as
            many times more. The paper has 4, with smaller batches.
        seed: seed of the initial weights of the first and the last layer.

    Example:
        >>> bnn = lb.fit(network, lb.MIMO(members=3), train_set, epochs=30)
    """

    members: int = 3
    input_repetition: float = 0.0
    batch_repetitions: int = 1
    seed: int = 0
    bayesian_weights = False

    def __post_init__(self) -> None:
        if not 1 <= self.members <= _MOST_MEMBERS:
            raise LeanBayesError(f"members={self.members} must be at least 1 and at most {_MOST_MEMBERS}.")
        if not 0 <= self.input_repetition <= 1:
            raise LeanBayesError(f"input_repetition={self.input_repetition} must be a share from 0 to 1.")
        if not 1 <= self.batch_repetitions <= _MOST_MEMBERS:
            raise LeanBayesError(
                f"batch_repetitions={self.batch_repetitions} must be at least 1 and at most {_MOST_MEMBERS}."
            )

    def wrap(self, network: nn.Module) -> nn.Module:
        """Give the first layer M inputs, and the last one M outputs."""
        return MultiInputNetwork(network, self)


class MultiInputNetwork(StochasticNetwork):
    """A network whose first layer joins the M rows of an example, and whose last layer makes M rows of one again.

    So layers before the first one and after the last one see one row per example and member, as usual.
    """

    loss_pass = "joint"

    def __init__(self, network: nn.Module, method: MIMO) -> None:
        super().__init__()
        self.inner, self._method = network, method
        self.members: int = method.members
        first, last = _first_and_last(network)
        _widen(first, self.members, 1)
        _widen(last, 1, self.members)
        for number, layer in enumerate({id(layer): layer for layer in (first, last)}.values()):
            initialize_again(layer, method.seed + number)
        first.register_forward_pre_hook(_Join(self.members), with_kwargs=True)
        last.register_forward_hook(_Divide(self.members))

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run one member, or all of them: with different inputs in a loss, and else with the same ones."""
        if draw is None:
            raise LeanBayesError(
                "The members of MIMO have no mean network: predict with all of them, or use bnn.network.member(i)."
            )
        rows = len(next(tensors_of((args, kwargs))))
        if draw.joint and draw.training:
            return self._trained(draw.key, rows, args, kwargs)
        repeated = torch.arange(rows, device=draw.key.device).repeat_interleave(self.members)
        output = self._run(repeated, rows, args, kwargs)
        return output if draw.joint else output.unflatten(0, (rows, self.members))[:, draw.number % self.members]

    def _trained(self, key: Tensor, rows: int, args: Any, kwargs: Any) -> Tensor:
        """Run the network with different examples at its inputs, and sort the outputs by example."""
        examples = torch.arange(rows, device=key.device).repeat_interleave(self._method.batch_repetitions)
        total = len(examples)
        mixed = total - round(self._method.input_repetition * total)
        like = torch.empty(total, device=key.device)
        order = noise.normal(like, key, stream=1).argsort()
        orders = []
        for number in range(self.members):
            other = noise.normal(like[:mixed], key, stream=2 + number).argsort()
            orders.append(torch.cat([order[:mixed][other], order[mixed:]]))
        places = torch.stack(orders, 1)  # the row of each input, (rows, members)
        output = self._run(examples[places.flatten()], total, args, kwargs).unflatten(0, (total, self.members))
        return output[places.argsort(0), torch.arange(self.members, device=key.device)].flatten(0, 1)

    def _run(self, index: Tensor, rows: int, args: Any, kwargs: Any) -> Tensor:
        """Call the network with these rows of the inputs."""
        count = len(next(tensors_of((args, kwargs))))
        args, kwargs = map_rows(lambda tensor: tensor[index.to(tensor.device)], (args, kwargs), count)
        output = output_tensor(self.inner(*args, **kwargs))
        if len(output) != rows * self.members:
            raise UnsupportedOperation(
                f"The network has {len(output)} rows of outputs for {rows} examples with {self.members} members: "
                "its first layer must read the inputs and its last layer make the outputs, with a row per example."
            )
        return output

    def plain(self) -> nn.Module:
        """Raise an error: the members are not a single network."""
        raise LeanBayesError("The members of MIMO are not a single network: use bnn.network.member(i).")

    @torch.no_grad()
    def member(self, number: int) -> nn.Module:
        """Return a member as a plain network: the weights of equal inputs are added up."""
        if not 0 <= number < self.members:
            raise LeanBayesError(f"member {number} does not exist: choose one from 0 to {self.members - 1}.")
        network = copy.deepcopy(self.inner)
        first, last = _first_and_last(network)
        for layer in (first, last):
            remove_hooks(layer, (_Join, _Divide))
        inputs, outputs = _dims(first)[0], _dims(last)[1]
        _set_weight(first, first.weight.unflatten(inputs, (self.members, -1)).sum(inputs))
        _set_weight(last, last.weight.unflatten(outputs, (self.members, -1)).select(outputs, number))
        if last.bias is not None:
            last.bias = nn.Parameter(last.bias.unflatten(0, (self.members, -1))[number].clone())
        return network


@dataclass
class _Join:
    """A hook before the first layer: the channels of the M rows of an example become those of one row."""

    members: int

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs["input"]
        dim = -1 - len(getattr(layer, "kernel_size", ()))  # of the channels
        rows = x.unflatten(0, (-1, self.members)).movedim(1, dim - 1)
        joined = rows.flatten(dim - 1, dim)
        return ((joined, *args[1:]), kwargs) if args else (args, {**kwargs, "input": joined})


@dataclass
class _Divide:
    """A hook after the last layer: the M outputs of a row become rows."""

    members: int

    def __call__(self, layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        dim = -1 - len(getattr(layer, "kernel_size", ()))
        return output.unflatten(dim, (self.members, -1)).movedim(dim - 1, 1).flatten(0, 1)


def _first_and_last(network: nn.Module) -> tuple[Any, Any]:
    """Return the layers that read the inputs and make the outputs: the first and the last one that has matrices."""
    layers = [module for module in network.modules() if any(p.dim() > 1 for p in module.parameters(recurse=False))]
    layers = [module for module in layers if next(module.children(), None) is None]
    if not layers:
        raise LeanBayesError("MIMO needs a linear or convolutional layer, and the network has none.")
    owners = Counter(id(p) for module in network.modules() for p in module._parameters.values())
    for layer in (layers[0], layers[-1]):
        usual = isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)) and not isinstance(layer, UNCALLED)
        if not usual or getattr(layer, "groups", 1) > 1 or owners[id(layer.weight)] > 1:
            raise UnsupportedOperation(
                f"MIMO needs a linear or convolutional layer without groups and with its own weights at both ends, and "
                f"the network has a {type(layer).__name__} there: use lb.Ensemble or lb.BatchEnsemble."
            )
    return layers[0], layers[-1]


def _dims(layer: Any) -> tuple[int, int]:
    """Return which dimensions of a layer's weight count its inputs and its outputs."""
    return (0, 1) if getattr(layer, "transposed", False) else (1, 0)


def _set_weight(layer: Any, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight.clone())
    inputs, outputs = _dims(layer)
    for name in ("in_features", "in_channels"):
        if hasattr(layer, name):
            setattr(layer, name, weight.shape[inputs])
    for name in ("out_features", "out_channels"):
        if hasattr(layer, name):
            setattr(layer, name, weight.shape[outputs])


def _widen(layer: Any, inputs: int, outputs: int) -> None:
    """Multiply the numbers of inputs and outputs of a layer."""
    repeats = [1] * layer.weight.dim()
    repeats[_dims(layer)[0]], repeats[_dims(layer)[1]] = inputs, outputs
    bias = layer.bias
    _set_weight(layer, layer.weight.detach().repeat(repeats))
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().repeat(outputs))
