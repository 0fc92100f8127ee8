"""Broadcasting and concatenation of Moments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.rules.moments.buffers import is_exporting
from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.registry import moment_rule, named
from leanbayes.rules.moments.shape import expand
from leanbayes.rules.moments.value import Moments, variance_dtype

_TINY = 1e-20  # lower limit of variances in quotients


def stretched(x: Moments, shape: Sequence[int]) -> Moments:
    """Broadcast a value to a shape."""
    return x if tuple(x.shape) == tuple(shape) else expand(x, shape)


def on_one_grid(values: Sequence[Moments]) -> Sequence[Moments]:
    """Give values of one shape the same grid: the finest of their grids if possible, else their shape."""
    grids = [value.grid for value in values if value.common is not None]
    if all([grid == grids[0] for grid in grids]):
        return values
    finest = max(grids, key=len)
    split = [value.reshaped(value.loc.reshape(finest)) for value in values]
    if all([value.common is None or value.grid == finest for value in split]):
        pairs = zip(values, split, strict=True)
        return [x.like(x.loc, x.rest, y.common, None if y.common is None else finest) for x, y in pairs]
    return [value.plain() for value in values]


@moment_rule(*named("broadcast_tensors"))
def broadcast_tensors(*tensors: Any) -> list[Any]:
    """Broadcast values to one shape."""
    shape = torch.broadcast_shapes(*[value.shape for value in tensors])
    return [expand(value, shape) for value in tensors]


@moment_rule(*named("cat", "concat", "concatenate"))
def cat(tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None) -> Moments:
    """Concatenate values, with or without noise, along a dimension.

    Channels keep their own common noise. Positions share one: the mean Ū of the common parts U_i, weighted by their
    lengths and scaled down so that Σ_r Ū² is at most Σ_r U_i² of every part. The rest becomes independent. So a class
    token without noise gets none from the other tokens, which a norm might amplify.
    """
    dim = dim if axis is None else axis
    loc = torch.cat([loc_of(value) for value in tensors], dim)
    if loc.dim() > 1:  # an empty vector fits everything, as for torch: the caches of language models start with one
        tensors = [value for value in tensors if tuple(value.shape) != (0,)]
    dim, dtype = dim % loc.dim(), variance_dtype(loc.dtype)
    first = next(iter([value for value in tensors if isinstance(value, Moments)]))
    values = [_certain(first, value, dtype) if isinstance(value, Tensor) else value.plain() for value in tensors]
    commons = [value.common for value in values]
    lengths = [value.shape[dim] for value in values]
    present = [common for common in commons if common is not None]
    independents = [value.rest for value in values]
    if not present:
        return first.like(loc, torch.cat(independents, dim))
    parts = list(zip(commons, lengths, strict=True))
    if any([common is not None and common.shape[dim + 1] != length for common, length in parts]):
        if len(present) < len(values):
            return first.like(loc, torch.cat([value.variance for value in values], dim))
        shared = _shared(present, lengths, dim)
        kept = shared.square().sum(0)
        rests = [(part.square().sum(0) - kept).clamp_min(0) for part in present]
        independents = [own + rest for own, rest in zip(independents, rests, strict=True)]
        return first.like(loc, torch.cat(independents, dim), shared)
    sizes = [max([common.shape[place] for common in present]) for place in range(loc.dim() + 1)]
    pieces = []
    for common, length in parts:
        sizes[dim + 1] = length
        pieces.append(present[0].new_zeros(sizes) if common is None else common.expand(sizes))
    result = first.like(loc, torch.cat(independents, dim), torch.cat(pieces, dim + 1))
    if torch.compiler.is_compiling() and not is_exporting() and not torch.is_grad_enabled():
        # A layer needs sums of the variance only, and compiled code does not join what nothing else needs.
        result.pieces = (dim, independents)
    return result


def _certain(like: Moments, loc: Tensor, dtype: torch.dtype) -> Moments:
    """Return a value without noise."""
    return like.like(loc, torch.zeros_like(loc, dtype=dtype))


def _shared(commons: Sequence[Tensor], lengths: Sequence[int], dim: int) -> Tensor:
    """Return the mean of common parts along a dimension, scaled down so that no part has less variance."""
    means = [common.mean(dim + 1, keepdim=True) for common in commons]
    mean = torch.stack([part * (length / sum(lengths)) for part, length in zip(means, lengths, strict=True)]).sum(0)
    variances = [common.square().sum(0).amin(dim, keepdim=True) for common in commons]
    least = torch.stack(variances).amin(0)
    ratio = least / mean.square().sum(0).clamp_min(_TINY)
    return mean * ratio.clamp(_TINY, 1.0).sqrt()


@moment_rule(*named("stack"))
def stack(tensors: Sequence[Any], dim: int = 0) -> Moments:
    """Stack values along a new dimension."""
    return cat([value.unsqueeze(dim) for value in tensors], dim)


@moment_rule(*named("hstack"))
def hstack(tensors: Sequence[Any]) -> Moments:
    """Concatenate values along their second dimension, or vectors along their only one."""
    return cat([value.reshape(-1) if value.dim() == 0 else value for value in tensors], min(1, tensors[0].dim() - 1))


@moment_rule(*named("vstack"))
def vstack(tensors: Sequence[Any]) -> Moments:
    """Concatenate values along their first dimension, with vectors as rows."""
    return cat([value.reshape(1, -1) if value.dim() < 2 else value for value in tensors], 0)
