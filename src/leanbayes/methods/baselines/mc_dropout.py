"""Monte Carlo dropout (Gal and Ghahramani 2016): dropout stays active in prediction, and each mask is a sample."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanbayes.core import checkpointing, noise
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.model.method import Method, register_method
from leanbayes.rules.multi_head_attention import multi_head_attention_forward

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)


@register_method("mc-dropout", rate=0.1)
@dataclass(frozen=True)
class MCDropout(Method):
    """Monte Carlo dropout: dropout stays active in prediction, and each mask is a sample.

    It uses the dropout layers of the network. If a rate is given, it sets the rate of these layers, or inserts dropout
    before every linear, convolutional and recurrent layer but the first if there are none.

    Paper: Gal and Ghahramani (2016), "Dropout as a Bayesian Approximation".

    Attributes:
        rate: fraction of the activations that are dropped. None keeps the rates of the network.

    Example:
        >>> bnn = lb.fit(network, lb.MCDropout(rate=0.1), train_set, epochs=30)
    """

    rate: float | None = None
    bayesian_weights = False

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1:
            raise LeanBayesError(f"rate={self.rate} must be between 0 and 1.")

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network with dropout that draws its masks from a key."""
        if any(isinstance(m, nn.RNNBase) and m.dropout for m in network.modules()):
            raise LeanBayesError(
                "MCDropout cannot control dropout inside a recurrent layer: set its dropout to 0, and use nn.Dropout."
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
        raise LeanBayesError("The network has too few layers to insert dropout: add nn.Dropout to it.")
    for layer in layers[1:]:
        layer.register_forward_pre_hook(_Insert(rate), with_kwargs=True)


class DropoutNetwork(StochasticNetwork):
    """A network whose dropout draws its masks from a key, in training and in prediction."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.inner = network

    def forward(self, draw: Draw | None, *args: Any, **kwargs: Any) -> Any:
        """Run with the masks of one draw, or without dropout."""
        if draw is None:
            with _SeededDropout(None):
                return self.inner(*args, **kwargs)
        source = noise.NoiseSource(draw.key)
        with self._dropping(source):
            output = self.inner(*args, **kwargs)
        if not source.streams:
            raise LeanBayesError("The network applied no dropout: use MCDropout(rate=...) to insert it.")
        return output

    @contextlib.contextmanager
    def _dropping(self, source: noise.NoiseSource) -> Iterator[None]:
        """Switch dropout on for a block, with masks from a noise source."""
        # Some networks apply dropout only in training mode.
        switched = [m for m in self.inner.modules() if not m.training and not _keeps_mode(m)]
        for module in switched:
            module.training = True
        try:
            with _SeededDropout(source):
                if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                    with checkpointing.running(lambda: self._snapshot(source)):
                        yield
                else:
                    yield
        finally:
            for module in switched:
                module.training = False

    def _snapshot(self, source: noise.NoiseSource) -> checkpointing.Restore:
        """Remember the position in the noise, for activation checkpointing."""
        position = source.streams

        @contextlib.contextmanager
        def restore() -> Iterator[None]:
            again = noise.NoiseSource(source.key)
            again.streams = position
            with self._dropping(again):
                yield

        return restore

    def plain(self) -> nn.Module:
        """Return the network without the inserted dropout."""
        for module in self.inner.modules():
            for handle, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, _Insert):
                    del module._forward_pre_hooks[handle]
                    module._forward_pre_hooks_with_kwargs.pop(handle, None)
        return self.inner


def _keeps_mode(module: nn.Module) -> bool:
    """Whether training mode changes more than dropout: batch statistics, or stochastic depth."""
    name = type(module).__name__
    return isinstance(module, nn.modules.batchnorm._NormBase) or "DropPath" in name or "StochasticDepth" in name


@dataclass
class _Insert:
    """A hook that applies dropout to the inputs of a layer, during a draw."""

    rate: float

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (F.dropout(args[0], self.rate, training=False), *args[1:]), kwargs
        return args, {**kwargs, "input": F.dropout(kwargs["input"], self.rate, training=False)}


class _SeededDropout(TorchFunctionMode):
    """Replaces every dropout call of a network by masks from a noise source, or by the identity without one."""

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
            raise UnsupportedOperation("MCDropout does not support alpha dropout: use nn.Dropout instead.")
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
        # Attention to the identity as values returns the attention weights.
        identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], k.shape[-2])
        weights = F.scaled_dot_product_attention(q, k, identity, attn_mask, 0.0, is_causal, scale=scale, **kwargs)
        return self._dropped(weights, dropout_p, None) @ v


def _mask(like: Tensor, shape: tuple[int, ...], rate: float, key: Tensor, stream: int) -> Tensor:
    """Return a mask that is 1/(1 - rate) with probability 1 - rate, else 0."""
    if rate >= 1:
        return like.new_zeros(shape)
    normal = noise.normal(like.new_empty(shape, dtype=torch.float32), key, stream)
    quantile = torch.special.ndtri(torch.tensor(rate, dtype=torch.float64))  # on the CPU, to avoid a synchronization
    return normal.ge_(quantile).to(like.dtype).div_(1.0 - rate)


# The number of last dimensions that share a mask: channel-wise dropout drops whole feature maps.
_CHANNEL_DIMS: dict[Callable[..., Any], int | None] = {
    F.dropout: None,
    F.dropout1d: 1,
    F.dropout2d: 2,
    F.dropout3d: 3,
}
