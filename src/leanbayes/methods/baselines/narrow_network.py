"""A copy of a network with fewer channels in every layer: the members of a packed ensemble.

All layers get the narrower width, except for the inputs of the first layer and the outputs of the last one.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.methods.baselines.ensemble import initialize_again

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU)
Width = Callable[[int], int]


def narrow_network(network: nn.Module, width: Width, groups: int, seed: int) -> nn.Module:
    """Return a narrower copy of a network, with new weights.

    Args:
        network: The network, which is not changed.
        width: Returns the new number of channels for a former one.
        groups: The number of groups in each layer but the first and the last.
        seed: The seed of the weights.

    Raises:
        UnsupportedOperation: The network has a parameter or a layer that cannot be narrowed.
    """
    made = copy.deepcopy(network)
    layers = _layers(made)
    if not layers:
        raise LeanBayesError("The network has no linear or convolutional layer, so it cannot be packed.")
    _check_parameters(made)
    ends = layers[0], layers[-1]
    for name, module in list(made.named_modules()):
        if module in layers:
            inner = module not in ends
            module = _narrow_layer(module, name, width, groups if inner else 1, module is ends[0], module is ends[1])
            if inner and groups > 1 and isinstance(module, nn.Linear):
                module = GroupedLinear(module, groups)
            if name:
                made.set_submodule(name, module)
            else:
                made = module
        elif isinstance(module, _NORMS):
            _narrow_norm(module, name, width)
    initialize_again(made, seed)
    return made


def stack(networks: Sequence[nn.Module]) -> nn.Module:
    """Return a network whose parameters and running statistics are those of several networks, in a new dimension.

    They are contiguous, also if those of the networks are channels_last, which vmap does not support.
    """
    stacked = copy.deepcopy(networks[0])
    for name, module in stacked.named_modules():
        others = [network.get_submodule(name) for network in networks]
        for key, _ in list(module.named_parameters(recurse=False)):
            values = torch.stack([other.get_parameter(key).detach() for other in others]).contiguous()
            setattr(module, key, nn.Parameter(values))
        for key in ("running_mean", "running_var"):
            if isinstance(getattr(module, key, None), Tensor):
                setattr(module, key, torch.stack([getattr(other, key) for other in others]))
    return stacked


@torch.no_grad()
def unstacked(stacked: nn.Module, number: int) -> nn.Module:
    """Return a copy of one of the networks that `stack` joined."""
    network = copy.deepcopy(stacked)
    for module in network.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(parameter[number].clone(), parameter.requires_grad))
        for key in ("running_mean", "running_var"):
            if isinstance(getattr(module, key, None), Tensor):
                setattr(module, key, getattr(module, key)[number].clone())
    return network


def _layers(network: nn.Module) -> list[Any]:
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)
    return [module for module in network.modules() if isinstance(module, kinds)]


def _check_parameters(network: nn.Module) -> None:
    """Raise an error for a parameter that is not one of a layer that can be narrowed."""
    known = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, *_NORMS)
    seen: set[int] = set()
    for name, module in network.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise UnsupportedOperation(_refusal(name, module))
        for key, parameter in module.named_parameters(recurse=False):
            place = f"{name}.{key}" if name else key
            if not isinstance(module, known):
                raise UnsupportedOperation(_refusal(place, module))
            if not parameter.requires_grad:
                raise LeanBayesError(
                    f"{place} is frozen, and a packed ensemble initializes all weights again: let it require gradients."
                )
            if id(parameter) in seen:
                raise UnsupportedOperation(
                    f"A packed ensemble cannot narrow {place}, which two layers share: use lb.Ensemble or "
                    "lb.BatchEnsemble for this network."
                )
            seen.add(id(parameter))


def _refusal(place: str, module: nn.Module) -> str:
    return (
        f"A packed ensemble cannot narrow {place or 'the network'} ({type(module).__name__}): it knows linear and "
        "convolutional layers, embeddings and norms; use lb.Ensemble or lb.BatchEnsemble for this network."
    )


def _narrow_layer(layer: Any, name: str, width: Width, groups: int, first: bool, last: bool) -> nn.Module:
    """Change the numbers of channels of a layer in place."""
    if isinstance(layer, nn.Embedding):
        layer.embedding_dim = layer.embedding_dim if last else width(layer.embedding_dim)
        shape: tuple[int, ...] = (layer.num_embeddings, layer.embedding_dim)
    elif isinstance(layer, nn.Linear):
        layer.in_features = layer.in_features if first else width(layer.in_features)
        layer.out_features = layer.out_features if last else width(layer.out_features)
        shape = (layer.out_features, layer.in_features)
    else:
        separate = layer.groups == layer.in_channels > 1  # one group for each channel
        layer.in_channels = layer.in_channels if first else width(layer.in_channels)
        layer.out_channels = layer.out_channels if last else width(layer.out_channels)
        layer.groups = layer.in_channels if separate else groups if layer.groups == 1 else layer.groups
        if layer.in_channels % layer.groups or layer.out_channels % layer.groups:
            raise UnsupportedOperation(
                f"A member's {name} would have {layer.in_channels} inputs and {layer.out_channels} outputs in "
                f"{layer.groups} groups: choose alpha and members so that the groups divide both."
            )
        rows, columns = layer.out_channels, layer.in_channels // layer.groups
        if layer.transposed:
            rows, columns = layer.in_channels, layer.out_channels // layer.groups
        shape = (rows, columns, *layer.kernel_size)
    weight = layer.weight
    layer.weight = nn.Parameter(weight.new_zeros(shape))
    if getattr(layer, "bias", None) is not None:
        outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        layer.bias = nn.Parameter(weight.new_zeros(outputs))
    return layer


def _narrow_norm(norm: Any, name: str, width: Width) -> None:
    """Change the number of channels of a norm in place."""
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        if len(norm.normalized_shape) > 1:
            raise UnsupportedOperation(_refusal(name, norm))
        norm.normalized_shape = (width(norm.normalized_shape[0]),)
        channels = norm.normalized_shape[0]
    elif isinstance(norm, nn.GroupNorm):
        norm.num_channels = channels = width(norm.num_channels)
        if channels % norm.num_groups:
            raise UnsupportedOperation(
                f"A member's {name} would have {channels} channels in {norm.num_groups} groups: choose alpha and "
                "members so that the groups divide them."
            )
    elif isinstance(norm, nn.PReLU):
        norm.num_parameters = channels = 1 if norm.num_parameters == 1 else width(norm.num_parameters)
    else:
        norm.num_features = channels = width(norm.num_features)
    for key, parameter in list(norm.named_parameters(recurse=False)):
        setattr(norm, key, nn.Parameter(parameter.new_ones(channels)))
    for key in ("running_mean", "running_var"):
        if isinstance(getattr(norm, key, None), Tensor):
            setattr(norm, key, getattr(norm, key).new_ones(channels))
    if isinstance(norm, nn.modules.batchnorm._NormBase):
        norm.reset_running_stats()


class GroupedLinear(nn.Module):
    """A linear layer in groups: each part of the outputs reads one part of the inputs.

    Args:
        layer: The layer with the numbers of inputs and outputs.
        groups: The number of groups, which divides both.
    """

    def __init__(self, layer: nn.Linear, groups: int) -> None:
        super().__init__()
        shape = groups, layer.out_features // groups, layer.in_features // groups
        self.weight = nn.Parameter(layer.weight.new_empty(shape))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.new_empty(layer.out_features))

    def reset_parameters(self) -> None:
        """Initialize as `nn.Linear` does with the inputs of one group."""
        bound = self.weight.shape[2] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all groups."""
        parts = torch.einsum("...gi,goi->...go", x.unflatten(-1, (len(self.weight), -1)), self.weight).flatten(-2)
        return parts if self.bias is None else parts + self.bias
