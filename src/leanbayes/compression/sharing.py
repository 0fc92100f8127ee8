"""Stages 1 and 2 of Algorithm 1: from (μ, σ) of all weights to shared components, outliers and blends.

Lin et al. 2025, with the text's mistakes repaired: EM maximises the likelihood, points outside the ellipse are the ones
that blend, and merging conserves moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.compression import em
from leanbayes.compression.assignment import Assignment, Dissolve, assign_components, dissolve
from leanbayes.compression.clustering import kmeans
from leanbayes.compression.codes import Codes
from leanbayes.compression.merging import MergeLimits, MergeRule, merge
from leanbayes.compression.mixture import CHI2_95, Mixture, blended
from leanbayes.compression.outliers import find_outliers
from leanbayes.compression.plane import Metric, plane_for
from leanbayes.compression.rate_distortion import entropy_constrained
from leanbayes.compression.tiles import Tiles, segment_sum
from leanbayes.errors import LeanBayesError


@dataclass(frozen=True)
class SharingSettings:
    """How weights come to share.

    Attributes:
        components: Gaussians to start with, over the whole network; fewer where there are not `minimum` weights for
            each. None: every weight is an outlier.
        threshold: |μ| above which a weight is an outlier. None: no such weights.
        gradient_share: share of the weights, those with the largest gradients, that are outliers too.
        metric: the plane that is clustered: plain (μ, σ), whitened (μ, log σ), or plain with weights by sensitivity.
        minimum: members that a component must have.
        dissolve: what becomes of the members of smaller ones: outliers, or members of neighbours.
        border: squared Mahalanobis distance beyond which a weight is blended. None: none is.
        nearest: components in a blend.
        merge_distance: W2² below which components may merge. None: (0.1·median σ)²; 0: none do.
        merge_gradient: mean |gradient| that they must be below.
        merge_variance: trace of the covariance that they must be below.
        merge_differences: whether the last two limits are for differences of both components (Algorithm 1).
        merge_rule: moments, or the equations as the paper prints them.
        bit_price: the loss, in nats of the ELBO, that one bit of a label is worth: then weights change to codes that
            cost less in both together. 0: the loss alone. None: labels stay those of the mixture.
        steps: k-means steps on a sample of the points.
        passes: passes of stepwise EM; one step on all points follows.
    """

    components: int | None = 6000
    threshold: float | None = 0.2
    gradient_share: float = 0.01
    metric: Metric = "plain"
    minimum: int = 20
    dissolve: Dissolve = "outliers"
    border: float | None = CHI2_95
    nearest: int = 5
    merge_distance: float | None = None
    merge_gradient: float = float("inf")
    merge_variance: float = float("inf")
    merge_differences: bool = False
    merge_rule: MergeRule = "moments"
    bit_price: float | None = None
    steps: int = 20
    passes: int = 3


@dataclass(frozen=True)
class Sharing:
    """What weights share: components, labels (n; -1 for outliers), outliers and blends.

    mean, std and covariance are those of (μ, σ) in each component, counts its members. Points, whose σ is 0, share with
    points only, and are not blended.
    """

    mean: Tensor
    std: Tensor
    covariance: Tensor
    counts: Tensor
    labels: Tensor
    outliers: Tensor
    blended: Tensor
    partners: Tensor
    alpha: Tensor

    @property
    def paper_parameters(self) -> int:
        """The paper's count of parameters."""
        return paper_parameters(len(self.outliers), len(self.blended), len(self.mean))

    def weights(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight once it shares; outliers keep the given ones."""
        loc, variance = mean.clone(), std.square()
        inside = (self.labels >= 0).nonzero()[:, 0]
        loc[inside], variance[inside] = self.mean[self.labels[inside]], self.std[self.labels[inside]].square()
        centre, square = blended(self.mean[self.partners], self.std[self.partners], self.alpha)
        return loc.index_copy(0, self.blended, centre), variance.index_copy(0, self.blended, square)


def paper_parameters(outliers: int, ellipses: int, gaussians: int) -> int:
    """Outliers + ellipses + 2·Gaussians, as in Tables 1 to 3: it leaves out σ of outliers, covariances and labels."""
    return outliers + ellipses + 2 * gaussians


@torch.no_grad()
def share_weights(
    mean: Tensor,
    std: Tensor,
    settings: SharingSettings,
    gradient: Tensor | None = None,
    sensitivity: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Sharing:
    """Quantise flat vectors of μ and σ; with `layers`, their sizes, each layer has components of its own.

    gradient: mean |∂L/∂μ| of each weight. Without it there are no outliers by gradient, and it limits no merging.
    """
    if not (mean.isfinite().all() and std.isfinite().all()) or (std < 0).any():
        raise LeanBayesError("Weights to share must have finite means and standard deviations that are not negative.")
    weights = None
    if settings.metric == "sensitivity" and settings.components is not None:
        if settings.bit_price is not None:
            raise LeanBayesError("A price of bits weighs a weight by its own 1/σ²: use metric='plain' or 'whitened'.")
        if sensitivity is None:
            raise LeanBayesError("metric='sensitivity' needs the sensitivity of each weight.")
        if not sensitivity.isfinite().all() or (sensitivity < 0).any() or not sensitivity.any():
            raise LeanBayesError("Sensitivities must be finite, not negative, and not all 0.")
        weights = sensitivity / sensitivity.mean()
    outlier = find_outliers(mean, gradient, settings.threshold, settings.gradient_share)
    index = (~outlier).nonzero()[:, 0]
    groups = [] if settings.components is None else _groups(index, std, layers)
    spread = std[std > 0]
    usual = float(spread.median()) if len(spread) else 0.0
    none = mean.new_zeros(0)
    nobody = torch.zeros(0, settings.nearest, dtype=torch.int64, device=mean.device)
    empty = (none, none, none.view(0, 2, 2), nobody[:, 0], nobody[:, 0], nobody, none.view(0, settings.nearest))
    parts, labels, first = [empty], torch.full_like(mean, -1, dtype=torch.int64), 0
    for group in groups:
        count = max(1, round((settings.components or 0) * len(group) / len(index)))
        count = min(count, len(group) // max(settings.minimum, 1))
        if not count:  # too few to share
            continue
        chosen = (None if values is None else values[group] for values in (gradient, weights))
        components, found = _share(mean[group], std[group], count, settings, usual, *chosen)
        labels[group] = torch.where(found.labels < 0, -1, found.labels + first)
        parts.append((*components, group[found.blended], found.partners + first, found.alpha))
        first += len(components.mean)
    if not first and settings.components is not None:
        raise LeanBayesError(
            f"Too few weights can share: {len(index)} are no outliers, and a component must have {settings.minimum} of "
            "a kind."
        )
    means, stds, covariances, counts, blends, partners, alphas = (torch.cat(part) for part in zip(*parts, strict=True))
    outliers = (labels < 0).nonzero()[:, 0]
    return Sharing(means, stds, covariances, counts, labels, outliers, blends, partners, alphas)


def _groups(index: Tensor, std: Tensor, layers: Sequence[int] | None) -> list[Tensor]:
    """Cut the positions of inliers at the borders of layers, and in each those of Gaussians from those of points."""
    parts: Sequence[Tensor] = [index]
    if layers is not None:
        if sum(layers) != len(std):
            raise LeanBayesError(f"The layers have {sum(layers)} weights together, but {len(std)} are given.")
        borders = torch.tensor(layers, device=index.device).cumsum(0)[:-1]
        parts = index.tensor_split(torch.searchsorted(index, borders).cpu())
    return [kind for part in parts for kind in (part[std[part] > 0], part[std[part] == 0])]


class _Components(NamedTuple):
    """Mean, σ, covariance of (μ, σ), and members of each component."""

    mean: Tensor
    std: Tensor
    covariance: Tensor
    counts: Tensor


def _share(
    mean: Tensor,
    std: Tensor,
    count: int,
    settings: SharingSettings,
    usual: float,
    gradient: Tensor | None,
    weights: Tensor | None,
) -> tuple[_Components, Assignment]:
    """Share among one group of inliers, all Gaussians or all points; usual: the σ that stands for that of a point."""
    points_only = not std[0] > 0
    plane = plane_for("plain" if points_only else settings.metric, mean, std)
    points = plane.points(mean, std)
    tiles = Tiles(points, weights)
    mixture = em.fit(tiles, kmeans(tiles, count, settings.steps)[1], settings.passes, full_steps=1)
    border = float("inf") if settings.border is None or points_only else settings.border
    found = assign_components(tiles, mixture, border, settings.nearest)
    mixture, found = dissolve(mixture, found, points, settings.minimum, settings.dissolve, border)
    # Masses are numbers of members from here on.
    inside = found.labels >= 0
    members = torch.bincount(found.labels[inside], minlength=len(mixture)).double()
    if gradient is not None:
        gradient = segment_sum(gradient[inside].abs().double(), found.labels[inside], len(mixture)) / members
    distance = settings.merge_distance
    if distance is None:
        distance = (0.1 * float(std.median()) / plane.scale[0]) ** 2
    limits = MergeLimits(distance, settings.merge_gradient, settings.merge_variance, settings.merge_differences)
    mixture = Mixture(mixture.mean, mixture.covariance, members)
    mixture, numbers = merge(mixture, limits, gradient, settings.merge_rule)
    found = found.renumbered(numbers)
    centre, width = plane.weights(mixture.mean)
    components = _Components(centre, width, plane.covariance(mixture), mixture.mass)
    if settings.bit_price is not None:
        stds = torch.full_like(std, usual) if points_only else std
        components, found = _priced(mean, stds, components, found, settings.bit_price, settings.minimum)
    if points_only:
        components = components._replace(std=torch.zeros_like(components.std))
    centre, width, covariance = (part.to(mean.dtype) for part in components[:3])
    return _Components(centre, width, covariance, components.counts.long()), found


def _priced(
    mean: Tensor, std: Tensor, components: _Components, found: Assignment, price: float, minimum: int
) -> tuple[_Components, Assignment]:
    """Let the members choose anew with a price on bits."""
    inside = (found.labels >= 0).nonzero()[:, 0]
    mean, std = mean[inside], std[inside]
    start = components.std.clamp_min(float(std.min()))  # of points, the one that stands for theirs
    chosen = entropy_constrained(mean, std, components.mean, start, price, minimum)
    apart = torch.stack([mean - chosen.mean[chosen.labels], std - chosen.std[chosen.labels]], 1).double()
    spread = segment_sum(apart[:, :, None] * apart[:, None], chosen.labels, len(chosen.mean))
    components = _Components(chosen.mean, chosen.std, spread / chosen.counts[:, None, None], chosen.counts)
    return components, replace(found, labels=found.labels.index_copy(0, inside, chosen.labels))


@torch.no_grad()
def share_codes(
    mean: Tensor,
    std: Tensor,
    settings: SharingSettings,
    gradient: Tensor | None = None,
    sensitivity: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Codes:
    """Make a codebook of flat vectors of μ and σ, for all weights but those that are surely zero (μ = σ = 0).

    The other arguments are those of `share_weights`, for all weights.
    """
    active = (mean != 0) | (std != 0)
    index = active.nonzero()[:, 0]
    sizes = None if layers is None else [int(part.sum()) for part in active.split(list(layers))]
    loc, scale = mean[index], std[index]
    gradient, sensitivity = (None if values is None else values[index] for values in (gradient, sensitivity))
    found = share_weights(loc, scale, settings, gradient, sensitivity, sizes)
    means, stds = torch.cat([found.mean, loc[found.outliers]]), torch.cat([found.std, scale[found.outliers]])
    own = torch.arange(len(found.mean), len(means), device=mean.device)
    covariance = torch.cat([found.covariance, found.covariance.new_zeros(len(own), 2, 2)])
    order = (stds == 0).to(torch.int8).argsort(stable=True)  # points come last
    numbers = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    labels = torch.full_like(mean, len(means), dtype=torch.int64)
    labels[index] = numbers[found.labels.index_copy(0, found.outliers, own)]
    spread = order[: int((stds > 0).sum())]
    return Codes(
        means[order],
        stds[spread],
        covariance[spread],
        labels,
        index[found.blended],
        numbers[found.partners],
        found.alpha,
    )
