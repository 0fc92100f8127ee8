"""Working on a user's network: copy it without some parameters, find places in it, call it with any kind of batch."""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout


def copy_without(model: nn.Module, layout: Layout) -> nn.Module:
    """Copy a network but for the layout's parameters, whose places hold None until a forward pass."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stand_in = nn.Parameter(torch.empty(0))
    network = copy.deepcopy(model, {id(parameters[slot.name]): stand_in for slot in layout})
    for name in itertools.chain.from_iterable(slot.names for slot in layout):
        module, attribute = place(network, name)
        del module._parameters[attribute]
        setattr(module, attribute, None)
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            # It holds references to its weights; this drops them, so that it neither copies nor moves drawn ones.
            module._apply(lambda tensor: tensor, recurse=False)
            # cuDNN copies drawn weights into one chunk at every call, and nobody can do anything about it.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    return network


def place(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a parameter, and what it calls it."""
    prefix, _, attribute = name.rpartition(".")
    return network.get_submodule(prefix), attribute


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


def call_with(function: Callable[..., Any], x: Any, **kwargs: Any) -> Any:
    """Call with a batch: a dict as keywords, a tuple or list as arguments, else as the one argument."""
    if isinstance(x, dict):
        return function(**x, **kwargs)
    return function(*x, **kwargs) if isinstance(x, (tuple, list)) else function(x, **kwargs)


def output_tensor(output: Any) -> Tensor:
    """Find the tensor to score in a network's output: itself, or `logits` or `out` of a structured one."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise LeanBayesError(
        f"The network returned {type(output).__name__}, in which no tensor `logits` or `out` was found: "
        "wrap it in a module that returns the tensor to score."
    )


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Apply to every tensor of an input: a tensor, or a tuple, list or dict of them."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {key: map_tensors(function, value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(map_tensors(function, value) for value in inputs)
    return inputs


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """Every tensor of an input."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (dict, tuple, list)):
        for value in inputs.values() if isinstance(inputs, dict) else inputs:
            yield from tensors_of(value)
