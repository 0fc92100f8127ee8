"""Working on a user's network: copy it without some parameters, find places in it, call it with any kind of batch."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout

_ORDER = "_leanbayes_parameter_order"


def copy_without(model: nn.Module, layout: Layout) -> nn.Module:
    """Copy a network but for the layout's parameters, whose places hold None until a forward pass."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stand_in = nn.Parameter(torch.empty(0))
    network = copy.deepcopy(model, {id(parameters[slot.name]): stand_in for slot in layout})
    for slot in layout:
        for module, attribute in places(network, slot.names):
            module.__dict__.setdefault(_ORDER, list(module._parameters))
            del module._parameters[attribute]
            setattr(module, attribute, None)
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            # It holds references to its weights; this drops them, so that it neither copies nor moves drawn ones.
            module._apply(lambda tensor: tensor, recurse=False)
            # cuDNN copies drawn weights into one chunk at every call, and nobody can do anything about it.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    return network


def in_first_order(network: nn.Module) -> nn.Module:
    """Sort each module's parameters as they were before some left, because optimisers know them by their order."""
    for module in network.modules():
        order = module.__dict__.pop(_ORDER, None)
        if order is not None:
            module._parameters = {name: module._parameters[name] for name in order}
    return network


def places(network: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Return the modules that own a parameter of these names, and what they call it, each once."""
    found: list[tuple[nn.Module, str]] = []
    for name in names:
        prefix, _, attribute = name.rpartition(".")
        place = network.get_submodule(prefix), attribute
        if place not in found:
            found.append(place)
    return found


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def input_dtype(network: nn.Module) -> torch.dtype | None:
    """Return what the inputs of a network in single or double precision must be."""
    first = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
    return first if first in (torch.float32, torch.float64) else None


def call_with(function: Callable[..., Any], x: Any, **kwargs: Any) -> Any:
    """Call with a batch: a dict as keywords, a tuple or list as arguments, else as the one argument."""
    if isinstance(x, Mapping):
        return function(**x, **kwargs)
    return function(*x, **kwargs) if isinstance(x, (tuple, list)) else function(x, **kwargs)


def is_tensor_like(value: Any) -> bool:
    """Whether a value is a tensor, or stands for one in a network, as `Moments` do."""
    return isinstance(value, Tensor) or hasattr(type(value), "__torch_function__")


def output_tensor(output: Any) -> Any:
    """Find the tensor to score in a network's output: itself, or `logits` or `out` of a structured one."""
    if is_tensor_like(output):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if is_tensor_like(found):
            return found
    raise LeanBayesError(
        f"The network returned {type(output).__name__}, in which no tensor `logits` or `out` was found: "
        "wrap it in a module that returns the tensor to score."
    )


def map_outputs(function: Callable[[Any], Any], output: Any) -> Any:
    """Apply to every tensor of a network's output, and keep its structure; mappings are changed in place."""
    if is_tensor_like(output):
        return function(output)
    if isinstance(output, MutableMapping):
        for key in list(output):
            output[key] = map_outputs(function, output[key])
        return output
    if isinstance(output, (tuple, list)):
        parts = [map_outputs(function, part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Apply to every tensor of an input: a tensor, or a tuple, list or dict of them."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(function, value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return [map_tensors(function, value) for value in inputs]
    return inputs


def map_rows(function: Callable[[Tensor], Tensor], inputs: Any, rows: int) -> Any:
    """Apply to every tensor with one entry a row; tensors of another length are shared by all rows and stay."""
    return map_tensors(lambda tensor: function(tensor) if tensor.dim() and len(tensor) == rows else tensor, inputs)


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """Every tensor of an input."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from tensors_of(value)
