"""Moments through reductions: sums, means, variances, extremes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.indexing import gather
from leanbayes.rules.moments.registry import moment_rule, named, unsupported
from leanbayes.rules.moments.shape import groups_of, permute, settled, unpacked
from leanbayes.rules.moments.value import Moments, variance_dtype

_SHORT = 1e-20  # lower limit of lengths in quotients


class Winners(NamedTuple):
    """The result of functions that select elements along a dimension."""

    values: Any
    indices: Tensor


def _numpy_names(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Let a rule accept `axis` and `keepdims` for `dim` and `keepdim`, as torch does."""

    def renamed(*args: Any, **kwargs: Any) -> Any:
        for name, torch_name in (("axis", "dim"), ("keepdims", "keepdim")):
            if name in kwargs:
                kwargs[torch_name] = kwargs.pop(name)
        return rule(*args, **kwargs)

    return renamed


def _dims(x: Moments, dim: Any) -> list[int]:
    """Return the dimensions to reduce: all of them if `dim` is None or empty."""
    dims = [] if dim is None else unpacked([dim])
    return sorted({d % x.dim() for d in dims}) if dims else list(range(x.dim()))


def _summed(x: Moments, loc: Tensor, dims: list[int], count: int = 1) -> Moments:
    """Sum the noise and divide it by n = `count`: Σv/n², and ΣU/n for the common part, also where U is constant."""
    dtype = variance_dtype(loc.dtype)
    independent = (x.independent.sum(dims, keepdim=True) if dims else x.independent).to(dtype) / count**2
    if x.common is None:
        return x.like(loc, independent.reshape(loc.shape))
    groups = groups_of(x)
    over = [place for dim in dims for place in groups[dim]]
    constant = math.prod([x.grid[place] for place in over if x.common.shape[place + 1] == 1])
    common = x.common.sum([place + 1 for place in over], keepdim=True) if over else x.common
    grid = tuple([1 if place in over else size for place, size in enumerate(x.grid)])
    whole = loc.reshape(independent.shape)
    return x.like(whole, independent, common.to(dtype) * (constant / count), grid).reshaped(loc)


@moment_rule(*named("sum"))
@_numpy_names
def sum_along(input: Moments, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """Sum along dimensions."""
    return _summed(input, input.loc.sum(dim, keepdim, dtype=dtype), _dims(input, dim))


@moment_rule(*named("mean"))
@_numpy_names
def mean_along(input: Moments, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """Average along dimensions."""
    dims = _dims(input, dim)
    loc = input.loc.mean(dim, keepdim, dtype=dtype)
    return _summed(input, loc, dims, math.prod([input.shape[d] for d in dims]))


def _contracted(x: Moments, loc: Tensor, slope: Tensor, dims: list[int]) -> Moments:
    """Return `loc` with the noise Σ s·x along dimensions; common noise that varies by position becomes independent."""
    x = x.plain()
    independent = (slope.square() * x.independent).sum(dims, keepdim=True)
    if x.common is None:
        return x.like(loc, independent.reshape(loc.shape))
    constant = [dim for dim in range(x.dim()) if x.common.shape[dim + 1] == 1]
    over = [dim for dim in dims if dim in constant]
    slope = slope.sum(over, keepdim=True) if over else slope
    written = [dim for dim in dims if dim not in constant]
    order = [dim for dim in range(x.dim()) if dim not in written] + written
    first = x.dim() - len(written)
    common = x.common.permute(0, *[dim + 1 for dim in order]).reshape(
        len(x.common), *_flat(x.common.shape[1:], order, first)
    )
    tangent = torch.einsum("r...n,...n->r...", common, slope.permute(order).reshape(_flat(slope.shape, order, first)))
    tangent = tangent.reshape(len(common), *independent.shape)
    whole = x.like(loc.reshape(independent.shape), independent, tangent)
    return settled(whole, [dim for dim in constant if dim not in dims]).reshaped(loc)


def _flat(shape: torch.Size, order: list[int], first: int) -> list[int]:
    """Return the sizes in another order, with those from `first` on merged."""
    sizes = [shape[dim] for dim in order]
    return [*sizes[:first], math.prod(sizes[first:])]


@moment_rule(*named("logsumexp"))
@_numpy_names
def logsumexp(input: Moments, dim: Any, keepdim: bool = False) -> Moments:
    """Compute log Σ exp(x) to first order: its slopes are p = softmax(x), and its variance is Σp²v."""
    dims = _dims(input, dim)
    m = input.loc.to(variance_dtype(input.dtype))
    return _contracted(input, input.loc.logsumexp(dim, keepdim), (m - m.logsumexp(dims, keepdim=True)).exp(), dims)


@moment_rule(*named("var"))
@_numpy_names
def var(
    input: Moments, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Moments:
    """Compute the variance of n elements x.

    With d = m - mean m and k = n - correction, its mean is Σ(d² + v(1-1/n))/k and its slopes are 2d/k.
    """
    if isinstance(dim, bool):  # var(unbiased)
        dim, unbiased = None, dim
    correction = (1.0 if unbiased else 0.0) if correction is None else correction
    dims = _dims(input, dim)
    n = math.prod([input.shape[d] for d in dims])
    k = max(n - correction, 0)
    plain = input.loc.var(dims, correction=correction, keepdim=keepdim)
    m = input.loc.to(variance_dtype(plain.dtype))
    noise = input.independent.sum(dims, keepdim=keepdim) * ((1 - 1 / n) / k)
    return _contracted(input, (plain + noise).to(plain.dtype), 2 / k * (m - m.mean(dims, keepdim=True)), dims)


@moment_rule(*named("std"))
def std(input: Moments, *args: Any, **kwargs: Any) -> Any:
    """Compute the standard deviation of elements, as the square root of their variance."""
    return var(input, *args, **kwargs).sqrt()


@moment_rule(*named("var_mean"))
@_numpy_names
def var_mean(input: Moments, dim: Any = None, unbiased: bool = True, keepdim: bool = False, **kwargs: Any) -> Any:
    """Compute the variance and the mean of elements."""
    over = None if isinstance(dim, bool) else dim
    return var(input, dim, unbiased, keepdim, **kwargs), mean_along(input, over, keepdim)


@moment_rule(*named("std_mean"))
def std_mean(input: Moments, *args: Any, **kwargs: Any) -> Any:
    """Compute the standard deviation and the mean of elements."""
    variance, mean = var_mean(input, *args, **kwargs)
    return variance.sqrt(), mean


@moment_rule(*named("cumsum"))
@_numpy_names
def cumsum(input: Moments, dim: int, *, dtype: torch.dtype | None = None) -> Moments:
    """Sum up to each element along a dimension; the correlation of the sums of independent noise is lost."""
    x, dim = input.plain(), dim % input.dim()
    loc = x.loc.cumsum(dim, dtype=dtype)
    independent = x.independent.cumsum(dim)
    if x.common is None:
        return x.like(loc, independent)
    sizes = list(x.common.shape)
    sizes[dim + 1] = x.shape[dim]
    return x.like(loc, independent, x.common.expand(sizes).cumsum(dim + 1))


@moment_rule(torch.linalg.vector_norm)
def vector_norm(
    input: Moments, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Moments:
    """Compute the Euclidean norm: its slopes are x/|x|, and E|x| = √(|m|² + Σv - Var|x|). The norm 1 is Σ|x|."""
    if ord == 1:
        return input.abs().sum(_dims(input, dim), keepdim, dtype=dtype)
    if ord != 2:
        raise unsupported("torch.linalg.vector_norm with ord other than 1 or 2")
    dims = _dims(input, dim)
    plain = torch.linalg.vector_norm(input.loc, 2, dim, keepdim, dtype=dtype)
    m = input.loc.to(variance_dtype(plain.dtype))
    length = torch.linalg.vector_norm(m, 2, dims, keepdim=True).clamp_min(_SHORT)
    first = _contracted(input, plain, m / length, dims)
    if input.within.activations != "exact":
        return first
    length = length.reshape(plain.shape)
    growth = (input.variance.sum(dims, keepdim=keepdim) - first.variance).clamp_min(0)
    excess = growth / ((length.square() + growth).clamp_min(_SHORT).sqrt() + length)
    return first.like(first.loc + excess.to(plain.dtype), first.independent, first.common, first.grid)


@moment_rule(*named("norm", modules=(torch, Tensor)))
def norm(
    input: Moments, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: None = None, dtype: Any = None
) -> Moments:
    """Compute the Euclidean norm by its older name."""
    return vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@moment_rule(torch.linalg.norm)
def linalg_norm(
    input: Moments, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Moments:
    """Compute the Euclidean norm of vectors, or the Frobenius norm of matrices."""
    dims = input.dim() if dim is None else len(unpacked([dim]))
    if ord is not None and dims > 1:
        if ord != "fro":
            raise unsupported(f"torch.linalg.norm of matrices with ord={ord!r}", 'use bnn.using("sample").')
        ord = None
    return vector_norm(input, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


@moment_rule(F.cosine_similarity)
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Compute the cosine c of vectors to first order: the slopes are (ŷ - c·x̂)/|x| and (x̂ - c·ŷ)/|y|."""
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    x1, x2 = x1.expand(shape), x2.expand(shape)
    x, y = (value.loc if isinstance(value, Moments) else value for value in (x1, x2))
    loc = F.cosine_similarity(x, y, dim, eps)
    dtype = variance_dtype(loc.dtype)
    x, y = x.to(dtype), y.to(dtype)
    lengths = [m.norm(dim=dim, keepdim=True).clamp_min(eps) for m in (x, y)]
    x, y = x / lengths[0], y / lengths[1]
    cosine = loc.to(dtype).unsqueeze(dim)
    slopes = ((y - cosine * x) / lengths[0], (x - cosine * y) / lengths[1])
    parts = [
        _contracted(value, torch.zeros_like(loc), slope, [dim % len(shape)])
        for value, slope in zip((x1, x2), slopes, strict=True)
        if isinstance(value, Moments)
    ]
    total: Any = parts[0]
    return (total + parts[1] if len(parts) > 1 else total) + loc


def _winners(x: Moments, values: Tensor, indices: Tensor, dim: int, keepdim: bool) -> Winners:
    """Return selected elements with their noise, given their means and indices with `dim` kept."""
    selected = gather(x, dim, indices)
    if not keepdim:
        values, indices = values.squeeze(dim), indices.squeeze(dim)
    return Winners(selected.reshaped(values), indices)


def _extreme(name: str) -> None:
    @moment_rule(*named(name))
    @_numpy_names
    def extreme(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        other = dim if isinstance(dim, Moments | Tensor) else other
        if other is not None:
            return getattr(torch, name + "imum")(input, other)
        if dim is None:
            return extreme(input.ravel(), 0).values
        values, indices = getattr(input.loc, name)(dim, True)
        return _winners(input, values, indices, dim, keepdim)

    @moment_rule(*named("a" + name))
    @_numpy_names
    def extreme_of_many(input: Moments, dim: Any = (), keepdim: bool = False) -> Moments:
        loc = getattr(input.loc, "a" + name)(dim, keepdim)
        dims = _dims(input, dim)
        rest = [d for d in range(input.dim()) if d not in dims]
        last = permute(input, rest + dims).flatten(len(rest)) if dims else input.reshape(1)
        return extreme(last, -1).values.reshaped(loc)


for _name in ("max", "min"):
    _extreme(_name)


@moment_rule(*named("topk"))
def topk(input: Moments, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Winners:
    """Return the k elements with the largest means, with their noise."""
    values, indices = input.loc.topk(k, dim, largest, sorted)
    return _winners(input, values, indices, dim, True)


@moment_rule(*named("sort"))
def sort(input: Moments, dim: int = -1, descending: bool = False, stable: bool = False) -> Winners:
    """Sort elements by their means, with their noise."""
    values, indices = input.loc.sort(stable=stable, dim=dim, descending=descending)
    return _winners(input, values, indices, dim, True)
