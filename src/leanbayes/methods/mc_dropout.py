"""Monte Carlo dropout (Gal and Ghahramani 2016): dropout stays on when predicting, and its masks are the draws."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanbayes import noise
from leanbayes.bayesian import Draw, Method, StochasticNetwork
from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError, UnsupportedOperation

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)


@configurable
@dataclass(frozen=True)
class MCDropout(Method):
    """Use the network's own dropout; with `rate`, set its rate, or insert it where the network has none.

    Inserted dropout acts on the inputs of every linear, convolutional and recurrent layer but the first.
    """

    rate: float | None = None
    bayesian_weights = False

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1:
            raise LeanBayesError(f"rate={self.rate} must lie between 0 and 1.")

    def wrap(self, network: nn.Module) -> nn.Module:
        """Switch dropout on for good."""
        existing = [m for m in network.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        attention = [m for m in network.modules() if isinstance(m, nn.MultiheadAttention)]
        if self.rate is None:
            if not any(m.p for m in existing) and not any(m.dropout for m in attention):
                raise LeanBayesError("The network has no dropout: give MCDropout(rate=...) to insert some.")
            return DropoutNetwork(network, None)
        for module in existing:
            module.p = self.rate
        return DropoutNetwork(network, None if existing else self.rate)


class DropoutNetwork(StochasticNetwork):
    """A network whose dropout draws its masks from a key, in training and in prediction alike."""

    def __init__(self, network: nn.Module, inserted_rate: float | None) -> None:
        super().__init__()
        self.inner = network
        if inserted_rate is not None:
            layers = [m for m in network.modules() if isinstance(m, _LAYERS)]
            if len(layers) < 2:
                raise LeanBayesError("The network has no layer to insert dropout before: add nn.Dropout to it.")
            for layer in layers[1:]:
                layer.register_forward_pre_hook(_Insert(inserted_rate))

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run with the masks of one draw, or without dropout."""
        with _SeededDropout(None if draw is None else draw.key):
            return self.inner(*args, **kwargs)

    def plain(self) -> nn.Module:
        """Return the network; dropout that was inserted is taken out again."""
        for module in self.inner.modules():
            for handle, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, _Insert):
                    del module._forward_pre_hooks[handle]
        return self.inner


@dataclass
class _Insert:
    """A hook that drops a layer's inputs; outside a draw it does nothing."""

    rate: float

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (F.dropout(args[0], self.rate, training=False), *args[1:])


class _SeededDropout(TorchFunctionMode):
    """Answers every dropout call of a network: with masks made from a key, or (key None) with the identity."""

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key
        self.streams = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CHANNEL_DIMS:
            x = args[0] if args else kwargs["input"]
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return self._dropped(x, rate, _CHANNEL_DIMS[func])
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            raise UnsupportedOperation("MCDropout has no masks for alpha dropout: use nn.Dropout in its place.")
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            from leanbayes.rules.attention import multi_head_attention_forward

            with self:
                return multi_head_attention_forward(*args, **{**kwargs, "training": True})
        return func(*args, **kwargs)

    def _dropped(self, x: Tensor, rate: float, kept_dims: int | None) -> Tensor:
        if self.key is None or rate == 0:
            return x
        self.streams += 1
        dims = x.dim() if kept_dims is None else x.dim() - kept_dims
        shape = (*x.shape[:dims], *[1] * (x.dim() - dims))
        return x * noise.keep_mask(x, shape, rate, self.key, self.streams)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                   is_causal: bool = False, scale: float | None = None, **kwargs: Any) -> Tensor:  # fmt: skip
        if self.key is None or dropout_p == 0:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, **kwargs)
        # Without dropout the weights of attention times the identity are the weights themselves.
        identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], k.shape[-2])
        weights = F.scaled_dot_product_attention(q, k, identity, attn_mask, 0.0, is_causal, scale=scale, **kwargs)
        return self._dropped(weights, dropout_p, None) @ v


# How many last dimensions share a mask: the channel-wise dropouts drop whole maps.
_CHANNEL_DIMS: dict[Callable[..., Any], int | None] = {
    F.dropout: None,
    F.dropout1d: 1,
    F.dropout2d: 2,
    F.dropout3d: 3,
}
