"""Operations on a user's network: copy it without some parameters, find parameters, call it with any kind of batch."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from leanbayes.core.layout import Layout
from leanbayes.core.names import shown
from leanbayes.errors import LeanBayesError

_ORDER = "_leanbayes_parameter_order"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


def copy_without(model: nn.Module, layout: Layout) -> nn.Module:
    """Copy a network without the parameters of a layout, which are None outside of a forward pass."""
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
            # It holds references to its weights. This drops them, so that sampled weights are not copied or moved.
            module._apply(lambda tensor: tensor, recurse=False)
    return network


@contextlib.contextmanager
def quiet_recurrent_layers() -> Iterator[None]:
    """Suppress cuDNN's warning that it copies weights into one chunk, which sampled weights cannot avoid."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


def in_first_order(network: nn.Module) -> nn.Module:
    """Restore the order of each module's parameters, because optimizers identify them by their order."""
    for module in network.modules():
        order = module.__dict__.pop(_ORDER, None)
        if order is not None:
            module._parameters = {name: module._parameters[name] for name in order}
    return network


def places(network: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Return the distinct (module, attribute) pairs of parameter names."""
    found: list[tuple[nn.Module, str]] = []
    for name in names:
        prefix, _, attribute = name.rpartition(".")
        place = network.get_submodule(prefix), attribute
        if place not in found:
            found.append(place)
    return found


def set_plain_attribute(module: nn.Module, attribute: str, value: Any) -> None:
    """Set an attribute that is no parameter, buffer or module.

    For each weight and sample, the checks of `nn.Module` would take longer than the rest of what Python does.
    """
    checks = type(module).__setattr__ is not nn.Module.__setattr__  # recurrent layers collect their weights
    if checks or torch.compiler.is_dynamo_compiling():
        setattr(module, attribute, value)
    else:
        module.__dict__[attribute] = value


def has_batchnorm(network: nn.Module) -> bool:
    """Return whether a network has BatchNorm."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode inside the block, and restore the mode of every module after it."""
    modes = [(module, module.training) for module in model.modules()]
    if any(training for _, training in modes):  # setting modes would be most of the time of a small network
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                module.training = training


def input_dtype(network: nn.Module) -> torch.dtype | None:
    """Return the dtype that inputs must have if the network is in single or double precision, else None."""
    first = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
    return first if first in (torch.float32, torch.float64) else None


def call_with(function: Callable[..., Any], x: Any, **kwargs: Any) -> Any:
    """Call a function with a batch: a dict as keywords, a tuple or list as arguments, else as the only argument."""
    if isinstance(x, Mapping):
        return function(**x, **kwargs)
    return function(*x, **kwargs) if isinstance(x, (tuple, list)) else function(x, **kwargs)


def is_tensor_like(value: Any) -> bool:
    """Whether a value is a tensor, or takes the place of one in a network, as `Moments` do."""
    return isinstance(value, Tensor) or hasattr(type(value), "__torch_function__")


def output_tensor(output: Any) -> Any:
    """Return the tensor to score: the output of a network, or `logits` or `out` of a structured output."""
    if is_tensor_like(output):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if is_tensor_like(found):
            return found
    items = output.items() if isinstance(output, Mapping) else getattr(output, "__dict__", {}).items()
    others = [f"`{name}`" for name, value in items if is_tensor_like(value)]
    example = f", such as {' or '.join(others[:3])}" if others else ""
    raise LeanBayesError(
        f"The network returned {type(output).__name__}, which has no tensor `logits` or `out`: wrap the network in a "
        f"module that returns the tensor to score{example}."
    )


def map_outputs(function: Callable[[Any], Any], output: Any) -> Any:
    """Apply a function to every tensor of a network's output, and keep its structure; change mappings in place."""
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
    """Apply a function to every tensor of an input: a tensor, or a tuple, list or dict of tensors."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(function, value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return [map_tensors(function, value) for value in inputs]
    return inputs


def map_rows(function: Callable[[Tensor], Tensor], inputs: Any, rows: int) -> Any:
    """Apply a function to every tensor with one entry per row, and keep tensors of another length unchanged."""
    return map_tensors(lambda tensor: function(tensor) if tensor.dim() and len(tensor) == rows else tensor, inputs)


def remove_hooks(module: nn.Module, kinds: tuple[type, ...]) -> None:
    """Remove the hooks of some types from a module, before and after its forward pass."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for handle, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[handle]
                module._forward_pre_hooks_with_kwargs.pop(handle, None)


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """Yield every tensor of an input."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from tensors_of(value)


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch, which is an (input, label) pair or inputs alone; raise an error if it has none."""
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    first = next(tensors_of(x), None)
    if first is None or first.dim() == 0:
        raise LeanBayesError(
            f"A batch must be a tensor, a dict of tensors, or an (input, label) pair, not {shown(batch)}."
        )
    check_readable(x)
    return x


def check_readable(inputs: Any) -> None:
    """Raise an error for tensors of which neither examples nor values can be read: sparse ones, and those on "meta"."""
    for tensor in tensors_of(inputs):
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise LeanBayesError(f"The inputs are sparse ({layout}): pass x.to_dense().")
        if tensor.is_meta:
            raise LeanBayesError('The inputs are on the device "meta" and have no values: pass tensors with values.')


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity. Tensors without numbers yet have none."""
    known = not is_lazy(tensor) and tensor.device.type != "meta"
    return not known or not tensor.is_floating_point() or bool(tensor.isfinite().all())


def returns_maps(network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Call a network without its hooks, and return whether its outputs have several positions."""
    hooks = [getattr(module, name) for module in network.modules() for name in _HOOKS]
    hooks += [getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS]
    kept = [dict(found) for found in hooks]
    try:
        for found in hooks:
            found.clear()
        with torch.no_grad():
            output = network(*args, **kwargs)
    finally:
        for found, before in zip(hooks, kept, strict=True):
            found.update(before)
    return any(tensor.dim() > 2 and tensor.shape[2:].numel() > 1 for tensor in tensors_of(output))
