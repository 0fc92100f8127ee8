"""Packed ensembles (Laurent et al. 2023): several narrow networks that run as one network with grouped layers."""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from leanbayes.core.network import output_tensor
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.methods.baselines.narrow_network import narrow_network, stack, unstacked
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.model.method import Method, register_method

_MOST_MEMBERS = 64


@register_method("packed-ensemble")
@dataclass(frozen=True)
class PackedEnsemble(Method):
    """Packed ensemble: narrow networks in one network, whose layers have a group of channels for each of them.

    A layer with C channels has α·C channels, which the members divide, so each member has α/M of the channels of the
    network. Training and prediction take one pass for all members, with about α²/M times the weights and operations of
    the network. Members share nothing: the loss is the sum of their losses. All weights are initialized again.

    Paper: Laurent et al. (2023), "Packed-Ensembles for Efficient Uncertainty Estimation".

    Attributes:
        members: M, the number of members.
        alpha: α, the width of all members together, relative to the network. α = M is a deep ensemble.
        gamma: γ, the number of groups in each layer of a member but the first and the last. It divides their weights.
        seed: seed of the initial weights.

    Example:
        >>> bnn = lb.fit(network, lb.PackedEnsemble(members=4, alpha=2), train_set, epochs=30)
    """

    members: int = 4
    alpha: float = 2.0
    gamma: int = 1
    seed: int = 0
    bayesian_weights = False

    def __post_init__(self) -> None:
        if not 1 <= self.members <= _MOST_MEMBERS:
            raise LeanBayesError(f"members={self.members} must be at least 1 and at most {_MOST_MEMBERS}.")
        if not 0 < self.alpha <= self.members:
            raise LeanBayesError(
                f"alpha={self.alpha} must be above 0 and at most members={self.members}: that is a deep ensemble."
            )
        if self.gamma < 1:
            raise LeanBayesError(f"gamma={self.gamma} must be at least 1.")

    def width(self, channels: int) -> int:
        """Return how many of a layer's channels a member has: α/M of them, rounded up to a multiple of γ."""
        return self.gamma * math.ceil(round(self.alpha * channels / (self.members * self.gamma), 6))

    def wrap(self, network: nn.Module) -> nn.Module:
        """Make the members, and stack their weights."""
        made = [narrow_network(network, self.width, self.gamma, self.seed + n) for n in range(self.members)]
        return PackedNetwork(stack(made), self.members, copy.deepcopy(network).to("meta"))


class PackedNetwork(StochasticNetwork):
    """Narrow networks whose weights are stacked: each parameter of `inner` has one more dimension, of the members."""

    loss_pass = "joint"

    def __init__(self, stacked: nn.Module, members: int, original: nn.Module) -> None:
        super().__init__()
        self.inner = stacked
        self._original = (original,)  # without memory, and not a part of this module
        self.members: int = members

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run one member, or all of them in one pass: then convolutions are grouped, and products batched."""
        if draw is None:
            raise LeanBayesError(
                "A packed ensemble has no mean network: predict with its members, or use bnn.network.member(i)."
            )
        stacked = {**dict(self.inner.named_parameters()), **_statistics(self.inner)}
        try:
            if not draw.joint:
                one = {name: tensor[draw.number % self.members] for name, tensor in stacked.items()}
                return functional_call(self.inner, one, args, kwargs)

            device = draw.key.device.type
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            args = tuple(_plain_memory(value) for value in args)
            kwargs = {name: _plain_memory(value) for name, value in kwargs.items()}

            def member(tensors: dict[str, Tensor]) -> Any:
                with nullcontext() if autocast is None else _Autocast(autocast):
                    return output_tensor(functional_call(self.inner, tensors, args, kwargs))

            outputs = vmap(member, out_dims=1, randomness="different")(stacked)
        except RuntimeError as error:
            if torch.compiler.is_compiling() or isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnsupportedOperation(
                f"The layers of a member do not fit together ({str(error).splitlines()[0]}): use settings with which "
                "α/M of the channels of each layer is a whole number, or lb.Ensemble for this network."
            ) from error
        return outputs.flatten(0, 1)

    def reference(self) -> nn.Module:
        """Return a network of the original width. Its weights are zero, because only its costs matter."""
        (original,), place = self._original, next(self.inner.parameters())
        made = copy.deepcopy(original).to_empty(device=place.device).to(place.dtype)
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.detach().zero_()
        return made.train(self.training)

    def plain(self) -> nn.Module:
        """Raise an error: a packed ensemble is not a single network."""
        raise LeanBayesError("A packed ensemble is not a single network: use bnn.network.member(i).")

    def member(self, number: int) -> nn.Module:
        """Return a copy of a member, a network with fewer channels than the one that was packed."""
        if not 0 <= number < self.members:
            raise LeanBayesError(f"member {number} does not exist: choose one from 0 to {self.members - 1}.")
        return unstacked(self.inner, number)


def _plain_memory(value: Any) -> Any:
    """Return a tensor that is contiguous: vmap does not support channels_last.

    The view has new strides. Those of gray images would still say that they are channels_last.
    """
    return value.contiguous().view(-1).view(value.shape) if isinstance(value, Tensor) else value


def _statistics(network: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of norms, which members have of their own."""
    return {name: buffer for name, buffer in network.named_buffers() if name.endswith(("running_mean", "running_var"))}


class _Autocast(TorchFunctionMode):
    """Casts the inputs of functions as autocast does: vmap takes them apart before autocast sees them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args = tuple(_cast(value, self.dtype) for value in args)
            kwargs = {name: _cast(value, self.dtype) for name, value in kwargs.items()}
        elif func in _NORMS and args[0].dtype == self.dtype:
            normalized = func(args[0].float(), *args[1:], **kwargs)
            return normalized if _NORMS[func] else normalized.to(self.dtype)
        return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


# Norms, and whether their outputs stay in single precision, as under autocast.
_NORMS = {F.batch_norm: False, F.instance_norm: False, F.layer_norm: True, F.group_norm: True, F.rms_norm: True}
_PRODUCTS = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    torch.matmul, torch.bmm, torch.einsum, F.scaled_dot_product_attention, Tensor.matmul, Tensor.__matmul__,
}  # fmt: skip
