"""Operations between layers under the rule `covariance`: activations, pooling, shapes, norms and sums."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.covariance.covariances import Covariances, check_memory, covariance_shape, formula, unsupported
from leanbayes.rules.covariance.weighted_layers import parts
from leanbayes.rules.moments.registry import named
from leanbayes.rules.random_weight import RandomWeight


def _scaled(x: Covariances, loc: Tensor, slope: Tensor) -> Covariances:
    """Multiply each element by a slope: Cov(s x) = s sᵀ ∘ Σ."""
    slope = slope.to(x.covariance.dtype).reshape(x.covariance.shape[:-1])
    return Covariances(loc, x.covariance * slope[..., None] * slope[..., None, :])


@formula(*named("relu"))
def _relu(input: Covariances, inplace: bool = False) -> Covariances:
    """Linearize at the mean (first-order Taylor)."""
    result = _scaled(input, F.relu(input.loc), input.loc > 0)
    return input.assign(result) if inplace else result


@formula(*named("relu_"))
def _relu_(input: Covariances) -> Covariances:
    return _relu(input, inplace=True)


@formula(*named("max_pool2d"))
def _max_pool2d(
    input: Covariances,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Covariances:
    """Select the rows and columns of the pixels with the largest means."""
    loc, winners = F.max_pool2d(input.loc, kernel_size, stride, padding, dilation, ceil_mode, return_indices=True)
    winners = winners.flatten(2)
    rows = input.covariance.take_along_dim(winners[..., None], -2)
    return Covariances(loc, rows.take_along_dim(winners[..., None, :], -1))


def _average(function: Callable[..., Tensor], input: Covariances, *args: Any, **kwargs: Any) -> Covariances:
    """Compute A Σ Aᵀ: average the rows of the covariance of each channel, then the columns."""
    loc = function(input.loc, *args, **kwargs)
    covariance = input.covariance.flatten(0, 1)
    for _ in range(2):
        images = covariance.mT.reshape(*covariance.mT.shape[:2], *input.shape[2:])
        covariance = function(images, *args, **kwargs).flatten(2)
    return Covariances(loc, covariance.unflatten(0, input.shape[:2]))


@formula(*named("avg_pool2d"))
def _avg_pool2d(input: Covariances, *args: Any, **kwargs: Any) -> Covariances:
    return _average(F.avg_pool2d, input, *args, **kwargs)


@formula(*named("adaptive_avg_pool2d"))
def _adaptive_avg_pool2d(input: Covariances, output_size: Any) -> Covariances:
    return _average(F.adaptive_avg_pool2d, input, output_size)


def _reshaped(input: Covariances, loc: Tensor) -> Covariances:
    """Reshape maps to vectors: channels are independent, so the covariance is block-diagonal."""
    if loc.shape == input.shape:
        return Covariances(loc, input.covariance)
    if loc.dim() != 2 or len(loc) != len(input):
        raise unsupported(f"a change of shape from {tuple(input.shape)} to {tuple(loc.shape)}")
    shape = covariance_shape(loc.shape)
    check_memory(shape, input.covariance.dtype)
    same = torch.eye(input.shape[1], dtype=input.covariance.dtype, device=input.device)[:, None, :, None]
    return Covariances(loc, (input.covariance[:, :, :, None] * same).reshape(shape))


@formula(*named("flatten"))
def _flatten(input: Covariances, *args: Any, **kwargs: Any) -> Covariances:
    return _reshaped(input, input.loc.flatten(*args, **kwargs))


@formula(*named("reshape"))
def _reshape(input: Covariances, *shape: Any, **kwargs: Any) -> Covariances:
    return _reshaped(input, input.loc.reshape(*shape, **kwargs))


@formula(*named("view"))
def _view(input: Covariances, *shape: Any) -> Covariances:
    return _reshaped(input, input.loc.view(*shape))


@formula(F.batch_norm)
def _batch_norm(
    input: Covariances,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Covariances:
    """Scale each channel by γ/s, which is a constant in evaluation mode."""
    if training or running_var is None:
        raise unsupported("batch_norm with the statistics of a batch (bnn.eval() uses running statistics)")
    if isinstance(weight, RandomWeight) or isinstance(bias, RandomWeight):
        raise unsupported("batch_norm with a Bayesian weight")
    loc = F.batch_norm(input.loc, running_mean, running_var, weight, bias, False, momentum, eps)
    slope = (running_var + eps).rsqrt() if weight is None else (running_var + eps).rsqrt() * weight
    return _scaled(input, loc, slope.reshape(-1, *[1] * (loc.dim() - 2)).expand(loc.shape))


@formula(F.dropout, F.dropout2d)
def _dropout(input: Covariances, p: float = 0.5, training: bool = True, inplace: bool = False) -> Covariances:
    if training and p > 0:
        raise unsupported("dropout in training mode (bnn.eval() turns it off)")
    return input


@formula(*named("add", "__add__", "__radd__"))
def _add(input: Any, other: Any, *, alpha: float = 1) -> Covariances:
    """Add independent values, Σ_x + α² Σ_y, or a constant."""
    if isinstance(input, RandomWeight) or isinstance(other, RandomWeight):
        raise unsupported("a sum with a Bayesian weight")
    (m, covariance), (n, other_covariance) = parts(input), parts(other)
    loc = torch.add(m, n, alpha=alpha)
    if any(part.shape != loc.shape for part in (input, other) if isinstance(part, Covariances)):
        raise unsupported("a sum that broadcasts a random value")
    if other_covariance is not None:
        other_covariance = alpha**2 * other_covariance
        covariance = other_covariance if covariance is None else covariance + other_covariance
    return Covariances(loc, covariance)  # type: ignore[arg-type] # one of the two has a covariance


@formula(*named("add_", "__iadd__"))
def _add_(input: Covariances, other: Any, *, alpha: float = 1) -> Covariances:
    return input.assign(_add(input, other, alpha=alpha))
