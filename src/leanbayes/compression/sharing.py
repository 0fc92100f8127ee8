"""Stages 1 and 2 of Algorithm 1: from (μ, σ) of all weights to shared components, outliers and blends.

Lin et al. 2025, with the text's mistakes repaired: EM maximises the likelihood, points outside the ellipse are the ones
that blend, and merging conserves moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanbayes.compression import em
from leanbayes.compression.assignment import Assignment, Dissolve, assign_components, dissolve
from leanbayes.compression.clustering import kmeans
from leanbayes.compression.counts import paper_parameters
from leanbayes.compression.merging import MergeLimits, MergeRule, merge
from leanbayes.compression.mixture import CHI2_95, Mixture, blended
from leanbayes.compression.outliers import find_outliers
from leanbayes.compression.plane import Metric, Plane, plane_for
from leanbayes.compression.tiles import Tiles, segment_sum
from leanbayes.errors import LeanBayesError


@dataclass(frozen=True)
class SharingSettings:
    """How weights come to share.

    Attributes:
        components: Gaussians to start with, over the whole network.
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
        steps: k-means steps on a sample of the points.
        passes: passes of stepwise EM; one step on all points follows.
    """

    components: int = 6000
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
    steps: int = 20
    passes: int = 3


@dataclass(frozen=True)
class Sharing:
    """What weights share: μ and σ of each component, labels (n; -1 for outliers), outliers and blends.

    `mixture` is on the plane, for its covariances.
    """

    mixture: Mixture
    mean: Tensor
    std: Tensor
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
        inside, labels = self.labels >= 0, self.labels.clamp_min(0)
        loc = torch.where(inside, self.mean[labels], mean)
        variance = torch.where(inside, self.std[labels], std).square()
        centre, square = blended(self.mean[self.partners], self.std[self.partners], self.alpha)
        return loc.index_copy(0, self.blended, centre), variance.index_copy(0, self.blended, square)


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
    weights = None
    if settings.metric == "sensitivity":
        if sensitivity is None:
            raise LeanBayesError("metric='sensitivity' needs the sensitivity of each weight.")
        if not sensitivity.isfinite().all() or (sensitivity < 0).any() or not sensitivity.any():
            raise LeanBayesError("Sensitivities must be finite, not negative, and not all 0.")
        weights = sensitivity / sensitivity.mean()
    outlier = find_outliers(mean, gradient, settings.threshold, settings.gradient_share)
    parts, labels, first = [], torch.full_like(mean, -1, dtype=torch.int64), 0
    index = (~outlier).nonzero()[:, 0]
    for group in _groups(index, layers, len(mean)):
        count = max(1, round(settings.components * len(group) / max(len(index), 1)))
        if len(group) < max(settings.minimum, count):  # too few to share
            continue
        chosen = (None if values is None else values[group] for values in (gradient, weights))
        mixture, plane, found = _share(mean[group], std[group], count, settings, *chosen)
        labels[group] = torch.where(found.labels < 0, -1, found.labels + first)
        parts.append((mixture, *plane.weights(mixture.mean), group[found.blended], found.partners + first, found.alpha))
        first += len(mixture)
    if not parts:
        raise LeanBayesError(
            f"Too few weights can share: {len(index)} are no outliers, and components={settings.components} want at "
            f"least {settings.minimum} members each."
        )
    mixtures, means, stds, blends, partners, alphas = zip(*parts, strict=True)
    together = Mixture(*(torch.cat([getattr(m, name) for m in mixtures]) for name in ("mean", "covariance", "mass")))
    return Sharing(
        together,
        torch.cat(means).to(mean.dtype),
        torch.cat(stds).to(std.dtype),
        labels,
        (labels < 0).nonzero()[:, 0],
        torch.cat(blends),
        torch.cat(partners),
        torch.cat(alphas).to(mean.dtype),
    )


def _groups(index: Tensor, layers: Sequence[int] | None, count: int) -> Sequence[Tensor]:
    """Cut the positions of inliers at the borders of layers."""
    if layers is None:
        return [index]
    if sum(layers) != count:
        raise LeanBayesError(f"The layers have {sum(layers)} weights together, but {count} are given.")
    borders = torch.tensor(layers, device=index.device).cumsum(0)[:-1]
    return index.tensor_split(torch.searchsorted(index, borders).cpu())


def _share(
    mean: Tensor, std: Tensor, count: int, settings: SharingSettings, gradient: Tensor | None, weights: Tensor | None
) -> tuple[Mixture, Plane, Assignment]:
    """Share among one group of inliers."""
    plane = plane_for(settings.metric, mean, std)
    points = plane.points(mean, std)
    tiles = Tiles(points, weights)
    mixture = em.fit(tiles, kmeans(tiles, count, settings.steps)[1], settings.passes, full_steps=1)
    border = float("inf") if settings.border is None else settings.border
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
    return mixture, plane, found.renumbered(numbers)
