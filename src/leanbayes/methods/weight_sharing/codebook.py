"""Stages 1 and 2 of Algorithm 1 of Lin et al. 2025: from (μ, σ) of all weights to components, outliers and blends.

Mistakes of the text are corrected: EM maximizes the likelihood, points outside the ellipse are blended, and merging
preserves moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.core.config import renamed
from leanbayes.errors import LeanBayesError
from leanbayes.methods.weight_sharing import em
from leanbayes.methods.weight_sharing.assignment import Assignment, Dissolve, assign_components, dissolve
from leanbayes.methods.weight_sharing.clustering import kmeans
from leanbayes.methods.weight_sharing.merging import MergeLimits, MergeRule, merge
from leanbayes.methods.weight_sharing.mixture import CHI2_95, Mixture
from leanbayes.methods.weight_sharing.outliers import find_outliers
from leanbayes.methods.weight_sharing.plane import Metric, plane_for
from leanbayes.methods.weight_sharing.rate_distortion import entropy_constrained
from leanbayes.methods.weight_sharing.tiles import Tiles, segment_sum
from leanbayes.posteriors.shared.codes import Codes, blend_moments

_LARGEST = 1e9  # mean or std; the squares of larger ones lose their differences in float32


class TooFewWeightsError(LeanBayesError):
    """A network has too few weights for components of the minimum size."""


@dataclass(frozen=True)
class SharingSettings:
    """Which weights share a code.

    Attributes:
        components: initial number of Gaussians for the whole network, reduced if there are fewer than `minimum` weights
            for each. None makes every weight an outlier.
        threshold: |μ| above which a weight is an outlier. None for no limit.
        gradient_share: fraction of the weights with the largest gradients that are outliers too.
        metric: the plane of the clustering: plain (μ, σ), whitened (μ, log σ), or sensitivity (plain, with weights
            counted by sensitivity).
        minimum: the smallest number of members of a component.
        dissolve: what the members of smaller components become: outliers, or members of neighbors.
        border: squared Mahalanobis distance above which a weight is blended. None for no blends.
        nearest: number of components in a blend.
        merge_distance: W2² below which components can merge. None for (0.1·median σ)², 0 for no merging.
        merge_gradient: mean |gradient| below which components can merge.
        merge_variance: trace of the covariance below which components can merge.
        merge_differences: whether the last two limits apply to the differences of two components (Algorithm 1).
        merge_rule: moments, or paper for the equations as printed.
        bit_price: the loss, in nats of the ELBO, that one bit of a label is worth. Weights then move to the codes with
            the lowest sum of both costs. 0 counts the loss only. None keeps the labels of the mixture.
        steps: number of k-means steps on a sample of the weights.
        passes: number of passes of stepwise EM, followed by one step on all weights.
    """

    components: int | None = 6000
    threshold: float | None = 0.2
    gradient_share: float = 0.01
    metric: Metric = "plain"
    minimum: int = 20
    dissolve: Dissolve = renamed("outliers", values={"neighbours": "neighbors"})  # noqa: RUF009
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
    """The components that weights share. Deterministic weights (σ = 0) share with each other only and are not blended.

    Attributes:
        mean: μ of each component.
        std: σ of each component, 0 if its members are deterministic.
        covariance: Covariance of (μ, σ) over the members of each component.
        counts: Number of members of each component.
        labels: Component of each weight (n), -1 for outliers.
        outliers: Positions of the outliers.
        blended: Positions of the blended weights (e).
        partners: Components of each blend (e, B).
        alpha: Fractions of these components (e, B).
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

    def weights(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight after sharing; outliers keep the given ones."""
        loc, variance = mean.clone(), std.square()
        inside = (self.labels >= 0).nonzero()[:, 0]
        loc[inside], variance[inside] = self.mean[self.labels[inside]], self.std[self.labels[inside]].square()
        center, square = blend_moments(self.mean[self.partners], self.std[self.partners], self.alpha)
        return loc.index_copy(0, self.blended, center), variance.index_copy(0, self.blended, square)


@torch.no_grad()
def share_weights(
    mean: Tensor,
    std: Tensor,
    settings: SharingSettings,
    gradient: Tensor | None = None,
    sensitivity: Tensor | None = None,
    layers: Sequence[int] | None = None,
) -> Sharing:
    """Quantize flat vectors of μ and σ.

    Args:
        mean: μ of each weight.
        std: σ of each weight, 0 for deterministic ones.
        settings: Which weights share.
        gradient: Mean |∂L/∂μ| of each weight. Without it, no outliers are found by gradient, and it does not limit
            merging.
        sensitivity: Sensitivity of each weight, for metric="sensitivity".
        layers: Sizes of the layers, if each has its own components.

    Raises:
        TooFewWeightsError: If no group of weights is large enough for one component.
    """
    if not (mean.isfinite().all() and std.isfinite().all()) or (std < 0).any():
        raise LeanBayesError("Weights that share need finite means, and finite stds that are not negative.")
    if (mean.abs() > _LARGEST).any() or (std > _LARGEST).any():
        raise LeanBayesError(f"Weights that share need means and stds of at most {_LARGEST:g}: use a smaller init_std.")
    weights = None
    if settings.metric == "sensitivity" and settings.components is not None:
        if settings.bit_price is not None:
            raise LeanBayesError("bit_price counts a weight by its 1/σ²: use metric='plain' or 'whitened'.")
        if sensitivity is None:
            raise LeanBayesError("metric='sensitivity' needs the sensitivity of each weight.")
        if not sensitivity.isfinite().all() or (sensitivity < 0).any() or not sensitivity.any():
            raise LeanBayesError("Sensitivities must be finite and not negative, and not all 0.")
        weights = sensitivity / sensitivity.mean()
    outlier = find_outliers(mean, gradient, settings.threshold, settings.gradient_share)
    index = (~outlier).nonzero()[:, 0]
    groups = [] if settings.components is None else _groups(index, std, layers)
    positive = std[std > 0]
    typical_std = float(positive.median()) if len(positive) else 0.0
    none = mean.new_zeros(0)
    no_index = torch.zeros(0, settings.nearest, dtype=torch.int64, device=mean.device)
    empty = (none, none, none.view(0, 2, 2), no_index[:, 0], no_index[:, 0], no_index, none.view(0, settings.nearest))
    parts, labels, first = [empty], torch.full_like(mean, -1, dtype=torch.int64), 0
    for group in groups:
        count = max(1, round((settings.components or 0) * len(group) / max(len(index), 1)))
        count = min(count, len(group) // max(settings.minimum, 1))
        if not count:  # too few to share
            continue
        chosen = (None if values is None else values[group] for values in (gradient, weights))
        components, found = _share(mean[group], std[group], count, settings, typical_std, *chosen)
        labels[group] = torch.where(found.labels < 0, -1, found.labels + first)
        parts.append((*components, group[found.blended], found.partners + first, found.alpha))
        first += len(components.mean)
    if not first and settings.components is not None:
        raise TooFewWeightsError(
            f"Too few weights can share: {len(index)} weights are not outliers, and a component needs "
            f"{settings.minimum} weights that are all Gaussian or all deterministic; use a smaller minimum."
        )
    means, stds, covariances, counts, blends, partners, alphas = (torch.cat(part) for part in zip(*parts, strict=True))
    outliers = (labels < 0).nonzero()[:, 0]
    return Sharing(means, stds, covariances, counts, labels, outliers, blends, partners, alphas)


def _groups(index: Tensor, std: Tensor, layers: Sequence[int] | None) -> list[Tensor]:
    """Group the positions of inliers by layer, and separate Gaussian from deterministic weights."""
    parts: Sequence[Tensor] = [index]
    if layers is not None:
        if sum(layers) != len(std):
            raise LeanBayesError(f"The layers have {sum(layers)} weights in total, but {len(std)} weights were given.")
        borders = torch.tensor(layers, device=index.device).cumsum(0)[:-1]
        parts = index.tensor_split(torch.searchsorted(index, borders).cpu())
    return [kind for part in parts for kind in (part[std[part] > 0], part[std[part] == 0])]


class _Components(NamedTuple):
    """μ, σ, covariance of (μ, σ), and number of members of each component."""

    mean: Tensor
    std: Tensor
    covariance: Tensor
    counts: Tensor


def _share(
    mean: Tensor,
    std: Tensor,
    count: int,
    settings: SharingSettings,
    typical_std: float,
    gradient: Tensor | None,
    weights: Tensor | None,
) -> tuple[_Components, Assignment]:
    """Share within one group of inliers, all Gaussian or all deterministic. `typical_std` replaces σ of the latter."""
    deterministic = not std[0] > 0
    plane = plane_for("plain" if deterministic else settings.metric, mean, std)
    points = plane.points(mean, std)
    tiles = Tiles(points, weights)
    mixture = em.fit(tiles, kmeans(tiles, count, settings.steps)[1], settings.passes, full_steps=1)
    border = float("inf") if settings.border is None or deterministic else settings.border
    found = assign_components(tiles, mixture, border, settings.nearest)
    mixture, found = dissolve(mixture, found, points, settings.minimum, settings.dissolve, border)
    # From here on, masses are numbers of members.
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
    center, width = plane.weights(mixture.mean)
    components = _Components(center, width, plane.covariance(mixture), mixture.mass)
    if settings.bit_price is not None:
        stds = torch.full_like(std, typical_std) if deterministic else std
        components, found = _priced(mean, stds, components, found, settings.bit_price, settings.minimum)
    if deterministic:
        components = components._replace(std=torch.zeros_like(components.std))
    center, width, covariance = (part.to(mean.dtype) for part in components[:3])
    return _Components(center, width, covariance, components.counts.long()), found


def _priced(
    mean: Tensor, std: Tensor, components: _Components, found: Assignment, price: float, minimum: int
) -> tuple[_Components, Assignment]:
    """Reassign the members with a price on bits."""
    inside = (found.labels >= 0).nonzero()[:, 0]
    mean, std = mean[inside], std[inside]
    start = components.std.clamp_min(float(std.min()))  # deterministic components get the typical σ
    chosen = entropy_constrained(mean, std, components.mean, start, price, minimum)
    apart = torch.stack([mean - chosen.mean[chosen.labels], std - chosen.std[chosen.labels]], 1).double()
    scatter = segment_sum(apart[:, :, None] * apart[:, None], chosen.labels, len(chosen.mean))
    components = _Components(chosen.mean, chosen.std, scatter / chosen.counts[:, None, None], chosen.counts)
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
    """Return a codebook for flat vectors of μ and σ. Weights with μ = σ = 0 are exactly zero and share nothing.

    The arguments are those of `share_weights`.
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
    order = (stds == 0).to(torch.int8).argsort(stable=True)  # deterministic codes come last
    numbers = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    labels = torch.full_like(mean, len(means), dtype=torch.int64)
    labels[index] = numbers[found.labels.index_copy(0, found.outliers, own)]
    gaussians = order[: int((stds > 0).sum())]
    return Codes(
        means[order],
        stds[gaussians],
        covariance[gaussians],
        labels,
        index[found.blended],
        numbers[found.partners],
        found.alpha,
    )
