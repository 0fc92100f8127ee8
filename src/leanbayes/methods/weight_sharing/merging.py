"""Merging similar components of the mixture: by Wasserstein distance, gradient and variance (section 4.2).

The result does not depend on the order of the components: they are sorted first, in each round every component picks
its nearest partner, and pairs that picked each other merge, until no pair is left.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanbayes.methods.weight_sharing.mixture import Mixture

MergeRule = Literal["moments", "paper"]
_PAIRS = 1 << 22  # pairs that are compared at once


def wasserstein2(first: Mixture, second: Mixture) -> Tensor:
    """Return W2² of each component to its counterpart (equation 4), for 2×2 covariances without a matrix root.

    ‖m_a - m_b‖² + tr Σ_a + tr Σ_b - 2·√(tr(Σ_aΣ_b) + 2·√(det Σ_a·det Σ_b)), never below 0.
    """
    a, b = first.covariance, second.covariance
    product = (a * b).sum((-2, -1))
    determinants = (_determinant(a) * _determinant(b)).clamp_min(0).sqrt()
    traces = _trace(a) + _trace(b)
    apart = (first.mean - second.mean).square().sum(-1)
    return (apart + traces - 2 * (product + 2 * determinants).clamp_min(0).sqrt()).clamp_min(0)


def _trace(matrix: Tensor) -> Tensor:
    return matrix[..., 0, 0] + matrix[..., 1, 1]


def _determinant(matrix: Tensor) -> Tensor:
    return matrix[..., 0, 0] * matrix[..., 1, 1] - matrix[..., 0, 1] * matrix[..., 1, 0]


def combine(first: Mixture, second: Mixture, mass: Tensor | None = None) -> Mixture:
    """Merge each component with its counterpart: mass, mean and covariance are those of the union."""
    total = first.mass + second.mass
    share = (second.mass / (total if mass is None else mass))[:, None]
    apart = second.mean - first.mean
    between = (share * (1 - share) * apart)[:, :, None] * apart[:, None, :]
    weight = share[..., None]
    covariance = (1 - weight) * first.covariance + weight * second.covariance + between
    return Mixture(first.mean + share * apart, covariance, total)


def combine_as_printed(first: Mixture, second: Mixture) -> Mixture:
    """Merge by equations 5 and 6 as printed, which multiply the covariance of two equal components by 1.5.

    Σ = (Σ_a + Σ_b)/2 + (m_a - m_b)(m_a - m_b)ᵀ/8 + (Σ_a^½ Σ_b Σ_a^½)^½/2.
    """
    apart = first.mean - second.mean
    covariance = 0.5 * (first.covariance + second.covariance) + apart[:, :, None] * apart[:, None, :] / 8
    root = _root(first.covariance)
    covariance = covariance + 0.5 * _root(root @ second.covariance @ root)
    return Mixture(0.5 * (first.mean + second.mean), covariance, first.mass + second.mass)


def _root(matrix: Tensor) -> Tensor:
    """Return the root of a symmetric 2×2 matrix: (A + √det·I)/√(tr + 2√det)."""
    det = _determinant(matrix).clamp_min(0).sqrt()
    scale = (_trace(matrix) + 2 * det).sqrt()
    return (matrix + det[..., None, None] * torch.eye(2).to(matrix)) / scale[..., None, None]


@dataclass(frozen=True)
class MergeLimits:
    """When two components can merge.

    Attributes:
        distance: Upper limit of W2².
        gradient: Upper limit of the mean |gradient| of the members.
        variance: Upper limit of the trace of the covariance.
        differences: Whether the limits of gradient and variance apply to the difference of the two components
            (Algorithm 1) instead of each component (section 4.2).
    """

    distance: float
    gradient: float = float("inf")
    variance: float = float("inf")
    differences: bool = False


def merge(
    mixture: Mixture, limits: MergeLimits, gradient: Tensor | None = None, rule: MergeRule = "moments"
) -> tuple[Mixture, Tensor]:
    """Merge until no pair is left, and return the mixture and the new number of each old component.

    Args:
        mixture: The components.
        limits: When two components can merge.
        gradient: Mean |gradient| of each component's members. A merged component gets the mean by mass.
        rule: "moments", or "paper" for the equations as printed.
    """
    gradient = torch.zeros_like(mixture.mass) if gradient is None else gradient.to(mixture.mass)
    order = _sorted(mixture, gradient)
    mixture, gradient = mixture[order], gradient[order]
    numbers = torch.empty_like(order)
    numbers[order] = torch.arange(len(order), device=order.device)
    while True:
        left, right = _mutual_pairs(mixture, gradient, limits)
        if not len(left):
            return mixture, numbers
        a, b = mixture[left], mixture[right]
        both = combine(a, b) if rule == "moments" else combine_as_printed(a, b)
        merged_gradient = (gradient[left] * a.mass + gradient[right] * b.mass) / both.mass
        mean, covariance, mass = (part.clone() for part in (mixture.mean, mixture.covariance, mixture.mass))
        mean[left], covariance[left], mass[left] = both.mean, both.covariance, both.mass
        gradient = gradient.index_copy(0, left, merged_gradient)
        stays = torch.ones_like(mass, dtype=torch.bool).index_fill_(0, right, False)
        target = torch.arange(len(mass), device=mass.device).index_copy(0, right, left)
        mixture, gradient = Mixture(mean, covariance, mass)[stays], gradient[stays]
        numbers = (stays.cumsum(0) - 1)[target[numbers]]
        order = _sorted(mixture, gradient)
        mixture, gradient = mixture[order], gradient[order]
        numbers = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))[numbers]


def _sorted(mixture: Mixture, gradient: Tensor) -> Tensor:
    """Return the order of the components by mean, then by all other values."""
    order = torch.arange(len(mixture), device=gradient.device)
    keys = [gradient, mixture.mass, *mixture.covariance.flatten(1).unbind(1), *mixture.mean.flip(1).unbind(1)]
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    return order


def _mutual_pairs(mixture: Mixture, gradient: Tensor, limits: MergeLimits) -> tuple[Tensor, Tensor]:
    """Return the pairs that can merge and are nearest to each other, the first ones among equals."""
    left, right, distance = _close_pairs(mixture, gradient, limits)
    order = distance.argsort(stable=True)  # pairs are already sorted by left and right, so this order is unique
    left, right = left[order], right[order]
    rank = torch.arange(len(left), device=left.device)
    best = torch.full((len(mixture),), len(left), dtype=rank.dtype, device=rank.device)
    best.scatter_reduce_(0, left, rank, "amin").scatter_reduce_(0, right, rank, "amin")
    mutual = (best[left] == rank) & (best[right] == rank)
    return left[mutual], right[mutual]


def _close_pairs(mixture: Mixture, gradient: Tensor, limits: MergeLimits) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs left < right that can merge, with their W2². Components are sorted by mean: few are compared."""
    axis = mixture.mean[:, 0].contiguous()
    number = torch.arange(len(axis), device=axis.device)
    ends = torch.searchsorted(axis, axis + limits.distance**0.5, right=True)
    after = ends - number - 1  # partners to compare: a mean that is too far along one axis is too far
    found = []
    total = after.cumsum(0)
    start = 0
    while start < len(axis):
        limit = _PAIRS + (int(total[start - 1]) if start else 0)
        stop = max(start + 1, int(torch.searchsorted(total, limit, right=True)))
        comparisons = after[start:stop]
        left = torch.repeat_interleave(number[start:stop], comparisons)
        first = torch.repeat_interleave(comparisons.cumsum(0) - comparisons, comparisons)
        right = left + 1 + torch.arange(len(left), device=left.device) - first
        near = (mixture.mean[left] - mixture.mean[right]).square().sum(1) < limits.distance
        left, right = left[near], right[near]
        allowed = _below(gradient, limits.gradient, left, right, limits.differences)
        allowed &= _below(_trace(mixture.covariance), limits.variance, left, right, limits.differences)
        left, right = left[allowed], right[allowed]
        distance = wasserstein2(mixture[left], mixture[right])
        close = distance < limits.distance
        found.append((left[close], right[close], distance[close]))
        start = stop
    lefts, rights, distances = zip(*found, strict=True)
    return torch.cat(lefts), torch.cat(rights), torch.cat(distances)


def _below(values: Tensor, limit: float, left: Tensor, right: Tensor, differences: bool) -> Tensor:
    a, b = values[left], values[right]
    return (a - b).abs() < limit if differences else torch.maximum(a, b) < limit
