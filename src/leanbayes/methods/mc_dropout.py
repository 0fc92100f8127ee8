"""Monte Carlo dropout (Gal and Ghahramani 2016): dropout stays on when predicting, and its masks are the draws."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanbayes import noise
from leanbayes.bayesian import Draw, StochasticNetwork
from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.method import Method
from leanbayes.rules.attention import multi_head_attention_forward

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)


@configurable
@dataclass(frozen=True)
class MCDropout(Method):
    """Dropout that stays on when predicting; its masks are the draws.

    It uses the network's own dropout; with `rate`, it sets the rate of its dropout layers, or inserts some if it has
    none. Inserted dropout acts on the inputs of every linear, convolutional and recurrent layer but the first.

    Attributes:
        rate: share of the activations that are dropped; None for what the network itself says.
    """

    rate: float | None = None
    bayesian_weights = False

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1:
            raise LeanBayesError(f"rate={self.rate} must lie between 0 and 1.")

    def wrap(self, network: nn.Module) -> nn.Module:
        """Switch dropout on for good."""
        if any(isinstance(m, nn.RNNBase) and m.dropout for m in network.modules()):
            raise LeanBayesError(
                "MCDropout cannot draw the masks inside a recurrent layer: set its dropout to 0, and use nn.Dropout."
            )
        if self.rate is None:
            return DropoutNetwork(network)
        dropouts = [m for m in network.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        attention = [m for m in network.modules() if isinstance(m, nn.MultiheadAttention)]
        for dropout in dropouts:
            dropout.p = self.rate
        for layer in attention:
            layer.dropout = self.rate
        if not dropouts and not attention:
            _insert(network, self.rate)
        return DropoutNetwork(network)


def _insert(network: nn.Module, rate: float) -> None:
    layers = [m for m in network.modules() if isinstance(m, _LAYERS)]
    if len(layers) < 2:
        raise LeanBayesError("The network has no layer to insert dropout before: add nn.Dropout to it.")
    for layer in layers[1:]:
        layer.register_forward_pre_hook(_Insert(rate), with_kwargs=True)


class DropoutNetwork(StochasticNetwork):
    """A network whose dropout draws its masks from a key, in training and in prediction alike."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.inner = network

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run with the masks of one draw, or without dropout."""
        if draw is None:
            with _SeededDropout(None):
                return self.inner(*args, **kwargs)
        source = noise.NoiseSource(draw.key)
        # Some networks ask for their mode before they drop anything.
        switched = [m for m in self.inner.modules() if not m.training and not _keeps_mode(m)]
        for module in switched:
            module.training = True
        try:
            with _SeededDropout(source):
                output = self.inner(*args, **kwargs)
        finally:
            for module in switched:
                module.training = False
        if not source.streams:
            raise LeanBayesError("The network dropped nothing: give MCDropout(rate=...) to insert dropout.")
        return output

    def plain(self) -> nn.Module:
        """Return the network; dropout that was inserted is taken out again."""
        for module in self.inner.modules():
            for handle, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, _Insert):
                    del module._forward_pre_hooks[handle]
                    module._forward_pre_hooks_with_kwargs.pop(handle, None)
        return self.inner


def _keeps_mode(module: nn.Module) -> bool:
    """Whether training mode would do more than drop values: batch statistics, or whole paths skipped."""
    name = type(module).__name__
    return isinstance(module, nn.modules.batchnorm._NormBase) or "DropPath" in name or "StochasticDepth" in name


@dataclass
class _Insert:
    """A hook that drops a layer's inputs; outside a draw it does nothing."""

    rate: float

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (F.dropout(args[0], self.rate, training=False), *args[1:]), kwargs
        return args, {**kwargs, "input": F.dropout(kwargs["input"], self.rate, training=False)}


class _SeededDropout(TorchFunctionMode):
    """Answers every dropout call of a network: with masks from a source of noise, or without one as the identity."""

    def __init__(self, source: noise.NoiseSource | None) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CHANNEL_DIMS:
            x = args[0] if args else kwargs["input"]
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return self._dropped(x, rate, _CHANNEL_DIMS[func])
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            if self.source is None:
                return args[0] if args else kwargs["input"]
            raise UnsupportedOperation("MCDropout has no masks for alpha dropout: use nn.Dropout in its place.")
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention_forward(*args, **{**kwargs, "training": True})
        return func(*args, **kwargs)

    def _dropped(self, x: Tensor, rate: float, kept_dims: int | None) -> Tensor:
        if self.source is None or rate == 0:
            return x
        dims = x.dim() if kept_dims is None else x.dim() - kept_dims
        shape = (*x.shape[:dims], *[1] * (x.dim() - dims))
        return x * _mask(x, shape, rate, self.source.key, self.source.next_stream())

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                   is_causal: bool = False, scale: float | None = None, **kwargs: Any) -> Tensor:  # fmt: skip
        if self.source is None or dropout_p == 0:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, **kwargs)
        # Without dropout the weights of attention times the identity are the weights themselves.
        identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], k.shape[-2])
        weights = F.scaled_dot_product_attention(q, k, identity, attn_mask, 0.0, is_causal, scale=scale, **kwargs)
        return self._dropped(weights, dropout_p, None) @ v


def _mask(like: Tensor, shape: tuple[int, ...], rate: float, key: Tensor, stream: int) -> Tensor:
    """Draw a mask: 1/(1 - rate) with probability 1 - rate, else 0; the noise turns into it in place."""
    if rate >= 1:
        return like.new_zeros(shape)
    draws = noise.normal(like.new_empty(shape, dtype=torch.float32), key, stream)
    quantile = torch.special.ndtri(torch.tensor(rate, dtype=torch.float64))  # one on a GPU would have to be waited for
    return draws.ge_(quantile).to(like.dtype).div_(1.0 - rate)


# How many last dimensions share a mask: the channel-wise dropouts drop whole maps.
_CHANNEL_DIMS: dict[Callable[..., Any], int | None] = {
    F.dropout: None,
    F.dropout1d: 1,
    F.dropout2d: 2,
    F.dropout3d: 3,
}
