"""Normalization layers: y = γ·x̂ + β with x̂ = (x - mean)/s, to first order in the noise of x.

With D elements that share one mean and one s, noise δ in x becomes noise (δ - mean δ - x̂·mean(x̂·δ))/s in x̂. So
independent noise of variance v becomes noise of variance

    (v_i(1 - 2(1 + x̂_i²)/D) + (Σv + 2x̂_i·Σx̂v + x̂_i²·Σx̂²v)/D²)/s²,

and common noise follows the first formula in each direction. Norms without the mean (RMS, L2) do not have its terms.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.buffers import exact_products, spent
from leanbayes.rules.moments.context import Pass
from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.fused_activations import source_of_norm
from leanbayes.rules.moments.registry import moment_rule, named, unsupported
from leanbayes.rules.moments.value import Moments, shrunk, variance_dtype

Value = Moments | Tensor
_FAR = 1 / math.pi  # the share of the mean square of a rectified Gaussian that the square of its mean has


def _as_moments(*values: Any) -> Moments:
    """Return the first value as Moments, in the forward pass of the others if it has no noise."""
    first = values[0]
    if isinstance(first, Moments):
        return first
    within = next(value.within for value in values if isinstance(value, Moments))
    return Moments(first, torch.zeros_like(first, dtype=variance_dtype(first.dtype)), within=within)


# -- γ and β ----------------------------------------------------------------------------------------------------------


def _per_channel(parameter: Value | None, dims: int) -> Any:
    """Reshape a parameter (C,) to (C, 1, 1...), which broadcasts to (B, C, ...)."""
    return None if parameter is None else parameter.reshape(-1, *[1] * (dims - 2))


def _scaled(x: Moments, loc: Tensor, slope: Tensor) -> Moments:
    """Multiply by constants; if all positions have the same constant, the common part keeps its shape."""
    if x.common is not None and x.is_regular:
        own = (1,) * (x.dim() - slope.dim()) + tuple(slope.shape)
        if all(size == 1 or kept > 1 for size, kept in zip(own, x.common.shape[1:], strict=True)):
            total = shrunk(x.variance) * slope.square()
            return x.like_total(loc, total.expand(loc.shape), x.common * slope)
    return x.follow(loc, slope)


def _affine(x: Moments, loc: Tensor, weight: Value | None, bias: Value | None) -> Moments:
    """Compute γ·x̂ + β with the mean `loc`; γ and β may be random."""
    if weight is None:
        result = x.like_total(loc, x.variance, x.common, x.grid)
    else:
        result = _scaled(x, loc, loc_of(weight).to(x.variance.dtype))
    # Positions share the noise of γ and β, but x̂ differs between them, so it is treated as independent.
    total = result.variance
    if isinstance(weight, Moments):
        total = torch.addcmul(total, weight.variance, x.loc.square() + x.variance)
    if isinstance(bias, Moments):
        total = total + bias.variance
    return result.like_total(loc, total, result.common, result.grid)


# -- statistics of a batch --------------------------------------------------------------------------------------------


@moment_rule(F.batch_norm)
def batch_norm(
    input: Value,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Value | None = None,
    bias: Value | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Moments:
    """Scale each channel by γ/s, with the running variance or that of the batch.

    In training, s² is the expected variance over the batch: that of the means plus the mean variance of the noise. So
    the mean square of x̂ is at most 1, as it is in every sample, even if the means of a batch are nearly equal (two
    examples with a map of one pixel). The running variance includes the noise too. With "taylor", the mean of x̂ and the
    running variance are those of the means alone, if a channel has more than two values: of two values, x̂ would be ±1
    with unbounded gradients, and training diverges.
    """
    x = _as_moments(input, weight, bias)
    dims, dtype = x.dim(), variance_dtype(x.loc.dtype)
    m = x.loc.to(dtype)
    if training or running_mean is None or running_var is None:
        others = [dim for dim in range(dims) if dim != 1]
        variance, mean = torch.var_mean(m, others, correction=0)
        some = shrunk(x.variance)
        noise = some.sum(others) / math.prod(some.shape[dim] for dim in others)  # mean() has a slower backward pass
        scale = (variance + noise + eps).rsqrt()
        # The backward pass needs the statistics that it has stored, so they do not change afterwards.
        stored, gamma = None if running_var is None else running_var.clone(), loc_of(weight)
        exact = x.within.activations == "exact" or x.loc.numel() <= 2 * x.shape[1]
        if exact:  # F.batch_norm divides by the std of the means, so its γ has the ratio of both stds
            like = next(one for one in (gamma, running_var, x.loc) if one is not None)
            ratio = ((variance + eps).sqrt() * scale).to(like.dtype)
            gamma = ratio if gamma is None else gamma * ratio
        loc = F.batch_norm(x.loc, running_mean, stored, gamma, loc_of(bias), training, momentum, eps)
        if training and running_var is not None and stored is not None:
            running_var.copy_(stored + momentum * noise.detach() if exact else stored)
    else:
        scale, mean = (running_var.to(dtype) + eps).rsqrt(), running_mean.to(dtype)
        loc = F.batch_norm(x.loc, running_mean, running_var, loc_of(weight), loc_of(bias), False, momentum, eps)
    if not isinstance(weight, Moments) and not isinstance(bias, Moments):
        slope = scale if weight is None else scale * weight.to(dtype)
        result = _scaled(x, loc, _per_channel(slope, dims))
        if not training:
            result.source = source_of_norm(x, running_mean, running_var, weight, bias, eps)
        return result
    scale, mean = _per_channel(scale, dims), _per_channel(mean, dims)
    normalized = _scaled(x, (m - mean) * scale, scale)
    return _affine(normalized, loc, _per_channel(weight, dims), _per_channel(bias, dims))


@moment_rule(torch.batch_norm)
def _batch_norm_of_torch(
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Moments:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


# -- statistics of one example ----------------------------------------------------------------------------------------


def _normalized(
    x: Moments, dims: list[int], eps: float, centered: bool = True, floor: float = 0.0
) -> tuple[Moments, Tensor]:
    """Return x̂, with statistics over `dims`, and the difference of its mean from the result without noise.

    With "exact", s² is the expected variance: that of the means plus that of the noise around its mean.
    """
    m, common = x.loc.to(variance_dtype(x.loc.dtype)), _per_example(x)
    center = m - m.mean(dims, keepdim=True) if centered else m
    without_noise = total = (center.square().mean(dims, keepdim=True) + eps).clamp_min(floor)
    if common is not None and x.within.coherent and x.within.activations != "paper":
        return _normalized_map(x, center, without_noise, common, dims, centered)
    size, v, behind = math.prod([x.shape[dim] for dim in dims]), x.independent, [dim + 1 for dim in dims]
    if common is not None and centered:
        common = common - common.mean(behind, keepdim=True)
    lengths = None if common is None else common.square().sum(0)  # of the probes
    sum_v = v.sum(dims, keepdim=True)
    if x.within.activations == "exact":
        total = total + sum_v * ((1 - 1 / size if centered else 1.0) / size)
        if lengths is not None:
            total = total + lengths.mean(dims, keepdim=True)
    scale = total.rsqrt()
    loc = center * scale
    if x.within.activations == "paper":  # equation 14: (γ/s)² v
        return x.follow(loc, scale), torch.zeros_like(loc)
    # The variance is a sum of terms with the factors 1, x̂ and x̂². Those of common noise have the same form.
    tilted = loc * v
    first = tilted.sum(dims, keepdim=True) * (2 / size**2) if centered else 0.0
    second = (loc * tilted).sum(dims, keepdim=True) / size**2
    own = torch.add(sum_v / size**2, v, alpha=1 - 2 / size) if centered else v
    if common is not None and lengths is not None:
        common, both, turns = _turned(common, loc, scale, dims, x.within)
        tilted, second = torch.add(tilted, both, out=spent(tilted)), second + turns
        own = torch.add(own, lengths, out=spent(own) if centered and own.shape == loc.shape else None)
    inner = loc * second
    inner = torch.sub(inner, tilted, alpha=2 / size, out=spent(inner))
    inner = torch.add(inner, first, out=spent(inner))
    own = torch.addcmul(own, loc, inner, out=spent(inner))
    own = torch.mul(torch.clamp_min(own, 0, out=spent(own)), scale.square(), out=spent(own))
    return x.like_total(loc, own, common), center * (scale - without_noise.rsqrt())


def _normalized_map(
    x: Moments, center: Tensor, without_noise: Tensor, common: Tensor, dims: list[int], centered: bool
) -> tuple[Moments, Tensor]:
    """Return the same in a coherent pass, given the deviation from the mean, and s² without noise.

    All noise is in the probes there, as if it were the same at all positions, but it is so only for the share `_FAR` of
    its variance. So a mean over positions takes no more than that share away. And the variance differs from position to
    position: each element keeps the share of its own that the probes keep.
    """
    kept, size = common, math.prod([x.shape[dim] for dim in dims])
    if centered:
        over_positions = any([common.shape[dim + 1] == 1 != x.shape[dim] for dim in dims])
        lost = 1 - math.sqrt(1 - _FAR) if over_positions else 1.0
        kept = common - lost * common.mean([dim + 1 for dim in dims], keepdim=True)
    lengths = kept.square().sum(0)
    each = x.variance / common.square().sum(0).clamp_min(torch.finfo(center.dtype).tiny)
    total = without_noise
    if x.within.activations == "exact":
        total = total + (each * lengths).mean(dims, keepdim=True)
    scale = total.rsqrt()
    loc = center * scale
    kept, both, turns = _turned(kept, loc, scale, dims, x.within)
    own = (lengths + loc * (loc * turns - 2 / size * both)).clamp_min(0)
    return x.like_total(loc, each * own * scale.square(), kept), center * (scale - without_noise.rsqrt())


def _per_example(x: Moments) -> Tensor | None:
    """Return the common part expanded along the examples, which may share it."""
    if x.common is None:
        return None
    sizes = list(x.common.shape)
    dim = x.within.batch_dim(x.shape)
    sizes[dim + 1] = x.shape[dim]
    return x.common.expand(sizes)


def _turned(shift: Tensor, loc: Tensor, scale: Tensor, dims: list[int], within: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for centered common noise, the mean over positions of d = (shift - x̂·q)/s, and two sums.

    q is the mean of x̂·shift over `dims`. The sums over the probes are Σ shift·q·D, with the number D of elements, and
    Σ q², so that s²·Σ d² is Σ shift² - 2x̂·(first sum)/D + x̂²·(second sum). They are matrix products: d is never stored.
    """
    positions = [dim for dim in range(loc.dim()) if shift.shape[dim + 1] == 1 and loc.shape[dim] > 1]
    weights = within.weights(scale.shape, positions)
    factors = scale if weights is None else scale * weights
    with exact_products(loc):
        tokens = loc.dim() > 2 and dims == [loc.dim() - 1] and positions == list(range(1, loc.dim() - 1))
        both, turn, squares = (_token_sums if tokens else _sums)(shift, loc, factors, dims, positions)
    count = math.prod([loc.shape[dim] for dim in positions]) if weights is None else 1
    size = math.prod([loc.shape[dim] for dim in dims])
    common = shift * (within.mean(scale, positions) if positions else scale)
    common = torch.sub(common, turn, alpha=1 / (count * size), out=spent(common))
    turns = squares / size**2
    return common, both, turns


def _sums(
    shift: Tensor, loc: Tensor, factors: Tensor, dims: list[int], positions: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the products of `_turned` with D·q: Σ_r shift·q, the sum of x̂·q·factors over positions, and Σ_r q²."""
    names = "abcdefgh"[: loc.dim()]
    outer = "".join(name for dim, name in enumerate(names) if dim not in dims)
    kept = "".join(name for dim, name in enumerate(names) if dim not in positions)
    q = torch.einsum(f"z{names},{names}->z{outer}", shift, loc)
    both = torch.einsum(f"z{names},z{outer}->{names}", shift, q)
    turn = torch.einsum(f"{names},z{outer}->z{kept}", loc * factors, q)
    for dim in positions:
        turn = turn.unsqueeze(dim + 1)
    squares = q.square().sum(0)
    for dim in sorted(dims):
        squares = squares.unsqueeze(dim)
    return both, turn, squares


def _token_sums(
    shift: Tensor, loc: Tensor, factors: Tensor, dims: list[int], positions: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `_sums` for (examples, tokens..., channels), with a third of its kernels."""
    probes = shift.flatten(2, -2).squeeze(2).transpose(0, 1)  # (examples, probes, channels)
    flat = loc.flatten(1, -2)
    q = flat @ probes.mT
    turn = (q * factors.flatten(1, -2)).mT @ flat
    turn = turn.transpose(0, 1).reshape(shift.shape)
    return (q @ probes).view(loc.shape), turn, q.square().sum(-1, keepdim=True).view(*loc.shape[:-1], 1)


def _finished(
    x: Moments, plain: Tensor, normalized: Moments, excess: Tensor, weight: Value | None, bias: Value | None
) -> Moments:
    """Reshape x̂ to the shape of x and apply γ and β; `plain` is the result without noise."""
    excess = excess.reshape(x.shape)
    if weight is not None:
        excess = excess * loc_of(weight)
    loc = plain if x.within.activations != "exact" else (plain + excess).to(plain.dtype)
    return _affine(normalized.reshaped(normalized.loc.reshape(x.shape)), loc, weight, bias)


def _last_dims(x: Moments, count: int) -> tuple[Moments, list[int]]:
    """Undo a merge of positions, unless it includes the last dimensions, so that the common part stays small."""
    if x.common is not None and x.grid[-count:] == tuple(x.shape[-count:]):
        x = x.reshaped(x.loc.reshape(x.grid))
    x = x.plain()
    return x, list(range(x.dim() - count, x.dim()))


@moment_rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Moments:
    """Normalize over the last dimensions."""
    x = _as_moments(input, weight, bias)
    plain = F.layer_norm(x.loc, normalized_shape, loc_of(weight), loc_of(bias), eps)
    return _finished(x, plain, *_normalized(*_last_dims(x, len(normalized_shape)), eps), weight, bias)


@moment_rule(*named("rms_norm"))
def rms_norm(
    input: Value, normalized_shape: Sequence[int], weight: Value | None = None, eps: float | None = None
) -> Moments:
    """Normalize over the last dimensions, without subtracting the mean."""
    x = _as_moments(input, weight)
    plain = F.rms_norm(x.loc, normalized_shape, loc_of(weight), eps)
    eps = torch.finfo(variance_dtype(x.dtype)).eps if eps is None else eps
    normalized = _normalized(*_last_dims(x, len(normalized_shape)), eps, centered=False)
    return _finished(x, plain, *normalized, weight, None)


def _in_groups(x: Moments, groups: int) -> tuple[Moments, list[int]]:
    """Split the channels (B, C, ...) into (B, groups, C/groups, ...)."""
    x = x.reshaped(x.loc.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])).plain()
    return x, list(range(2, x.dim()))


@moment_rule(F.group_norm, torch.group_norm)
def group_norm(
    input: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Moments:
    """Normalize over positions and groups of channels."""
    x = _as_moments(input, weight, bias)
    plain = F.group_norm(x.loc, num_groups, loc_of(weight), loc_of(bias), eps)
    weight, bias = _per_channel(weight, x.dim()), _per_channel(bias, x.dim())
    return _finished(x, plain, *_normalized(*_in_groups(x, num_groups), eps), weight, bias)


@moment_rule(F.instance_norm)
def instance_norm(
    input: Value,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Value | None = None,
    bias: Value | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Moments:
    """Normalize each channel over its positions, or by running statistics."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = _as_moments(input, weight, bias)
    plain = F.instance_norm(
        x.loc, running_mean, running_var, loc_of(weight), loc_of(bias), use_input_stats, momentum, eps
    )
    weight, bias = _per_channel(weight, x.dim()), _per_channel(bias, x.dim())
    return _finished(x, plain, *_normalized(*_in_groups(x, x.shape[1]), eps), weight, bias)


@moment_rule(F.normalize)
def normalize(input: Moments, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Moments:
    """Divide by the Euclidean norm: an RMS norm divided by √D."""
    if p != 2:
        raise unsupported("F.normalize with p other than 2")
    plain, x, size = F.normalize(input.loc, p, dim, eps), input.plain(), input.shape[dim]
    normalized = _normalized(x, [dim % x.dim()], 0.0, centered=False, floor=eps**2 / size)
    shrink = torch.tensor(size**-0.5, dtype=x.variance.dtype, device=x.device)
    return _finished(x, plain, *normalized, shrink, None)
