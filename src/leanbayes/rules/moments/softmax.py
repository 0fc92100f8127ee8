"""Softmax and its logarithm: the variances at a cost proportional to the number of classes.

With p = softmax(m), the tangent is δp_i = p_i (δ_i - Σ_j p_j δ_j), so that, to first order,

    v_i = p_i² [(1 - 2p_i) v_i + Σ_j p_j² v_j],      and for the logarithm      (1 - 2p_i) v_i + Σ_j p_j² v_j.

A share in [0, 1] has a variance below b = p(1 - p), so a first-order variance x is reduced to x/(1 + x/b), but not with
"paper". The mean is the softmax of the means.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.arithmetic import neg
from leanbayes.rules.moments.buffers import spent
from leanbayes.rules.moments.context import Pass
from leanbayes.rules.moments.registry import moment_rule, named
from leanbayes.rules.moments.value import Moments, Shape, variance_dtype


class Shares(Moments):
    """Shares with a constant sum along a dimension, in which their noise cancels."""

    def __init__(self, *args: Any, along: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.along = along

    def like(self, loc: Tensor, independent: Tensor, common: Tensor | None = None, grid: Shape | None = None) -> Self:
        """Return a value of the same forward pass; its sum is constant if it has the same noise."""
        along = self.along if independent is self.independent and common is self.common else None
        return type(self)(loc, independent, common, grid=grid, within=self.within, along=along)

    def like_total(self, loc: Tensor, total: Tensor, common: Tensor | None, grid: Shape | None = None) -> Self:
        """Return a value of the same forward pass; its sum is constant if it has the same noise."""
        along = self.along if total is self.variance and common is self.common else None
        return type(self)(loc, None, common, total=total, grid=grid, within=self.within, along=along)

    def assign(self, other: Moments) -> Self:
        """Take over another value, whose sum is not constant."""
        self.along = None
        return super().assign(other)


@moment_rule(*named("softmax"), torch.special.softmax)
def softmax(input: Moments, dim: int | None = None, *args: Any, **kwargs: Any) -> Moments:
    """Compute softmax."""
    return _normalized(F.softmax, input, dim, *args, **kwargs)


@moment_rule(F.softmin)
def softmin(input: Moments, dim: int | None = None, *args: Any, **kwargs: Any) -> Moments:
    """Compute softmin, the softmax of the negative."""
    return _normalized(F.softmax, neg(input), dim, *args, **kwargs)


@moment_rule(*named("log_softmax"), torch.special.log_softmax)
def log_softmax(input: Moments, dim: int | None = None, *args: Any, **kwargs: Any) -> Moments:
    """Compute the logarithm of softmax."""
    return _normalized(F.log_softmax, input, dim, *args, **kwargs)


def _normalized(
    function: Callable[..., Tensor],
    value: Moments,
    dim: int | None,
    *args: Any,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Moments:
    """Compute F.softmax(input, dim, _stacklevel, dtype), torch.softmax(input, dim, dtype) and the like."""
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dim is None:  # the default of torch
        dim = 0 if value.dim() in (0, 1, 3) else 1
    loc = function(value.loc, dim, dtype=dtype)
    logarithm = function is F.log_softmax
    shares = loc.to(variance_dtype(loc.dtype))
    shares = shares.exp() if logarithm else shares
    value = value.plain()
    variance = share_variance(shares, value.independent.to(shares.dtype), dim, logarithm)
    common = value.common
    if common is not None and common.shape[dim if dim < 0 else dim + 1] == 1:
        common = None  # the same noise in all scores cancels
    if common is not None:
        common, energy = _tangent(common.to(shares.dtype), shares, dim, logarithm, value.within)
        variance = variance + energy
    if logarithm:
        return value.like_total(loc, variance, common)
    variance = _bounded(variance, shares, value)
    along = dim % max(1, loc.dim())
    return Shares(loc, None, common, total=variance, within=value.within, along=along)


def share_variance(shares: Tensor, variance: Tensor, dim: int = -1, logarithm: bool = False) -> Tensor:
    """Return the first-order variance of shares, or of their logarithms, from the variance of independent scores."""
    mixed = (shares.square() * variance).sum(dim, keepdim=True)
    relative = ((1 - 2 * shares) * variance + mixed).clamp_min(0)
    return relative if logarithm else shares.square() * relative


def _bounded(variance: Tensor, shares: Tensor, value: Moments) -> Tensor:
    """Keep the variance of shares below p(1 - p), unless equation 9 of the paper holds as printed."""
    return variance if value.within.activations == "paper" else saturated(variance, shares * (1 - shares))


def saturated(variance: Tensor, bound: Tensor) -> Tensor:
    """Return x/(1 + x/b), which stays below the bound b, and is about x far below it."""
    sums = variance + bound
    sums = torch.clamp_min(sums, torch.finfo(bound.dtype).tiny, out=spent(sums))
    return torch.mul(variance, torch.div(bound, sums, out=spent(sums)), out=spent(sums))


def _tangent(common: Tensor, shares: Tensor, dim: int, logarithm: bool, within: Pass) -> tuple[Tensor, Tensor]:
    """Return the mean of p(U - Σ pU) over the positions, and its variance at each, without one map per probe.

    With s = Σ pU for each position, Σ_r (U - s)² is computed from products over the probes r.
    """
    dims = shares.dim()
    dim = dim % dims
    positions = [d for d in range(dims) if d != dim and common.shape[d + 1] == 1]
    others = [d for d in range(dims) if d != dim and d not in positions]
    order = [*others, *positions, dim]

    def folded(x: Tensor) -> Tensor:
        """Return a tensor as (others, positions, classes)."""
        x = x.permute(order)
        x = x.flatten(0, len(others) - 1) if others else x.unsqueeze(0)
        return x.flatten(1, -2) if positions else x.unsqueeze(1)

    p, weights = folded(shares), within.weights(shares.shape, positions)
    if weights is not None:
        sizes = [1 if d == dim else size for d, size in enumerate(shares.shape)]
        weights = folded(weights.expand(sizes).to(p.dtype))
    u = common.permute(0, *(d + 1 for d in order)).reshape(len(common), *p[:, 0].shape)
    u = u.movedim(0, 1)  # (others, probes, classes)
    s = p @ u.mT  # (others, positions, probes)
    energy = (u.square().sum(1).unsqueeze(1) - 2 * (s @ u) + s.square().sum(-1, keepdim=True)).clamp_min(0)
    if logarithm:
        mean = u - (s.mean(1) if weights is None else (s * weights).sum(1)).unsqueeze(-1)
    else:
        weighted, count = (p, p.shape[1]) if weights is None else (p * weights, 1)
        mean = (weighted.sum(1).unsqueeze(1) * u - s.mT @ weighted) / count
        energy = p.square() * energy
    back = sorted(range(dims), key=order.__getitem__)
    sizes = [1 if d in positions else shares.shape[d] for d in order]
    mean = mean.movedim(1, 0).reshape(-1, *sizes).permute(0, *(d + 1 for d in back))
    return mean, energy.reshape([shares.shape[d] for d in order]).permute(back)
