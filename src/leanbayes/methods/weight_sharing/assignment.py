"""The component of each point, and the blends of points that are far from their component."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.methods.weight_sharing.em import candidates, log_joints
from leanbayes.methods.weight_sharing.mixture import CHI2_95, Mixture, blend_weights
from leanbayes.methods.weight_sharing.tiles import Tiles

Dissolve = Literal["outliers", "neighbors"]


@dataclass(frozen=True)
class Assignment:
    """The components of points.

    Attributes:
        labels: Component of each point (n), -1 for outliers.
        blended: Indices of the blended points (e).
        partners: Components of each blend (e, B).
        alpha: Fractions of these components (e, B).
    """

    labels: Tensor
    blended: Tensor
    partners: Tensor
    alpha: Tensor

    def only(self, kept: Tensor) -> "Assignment":
        """Keep the blends for which `kept` is true."""
        return Assignment(self.labels, self.blended[kept], self.partners[kept], self.alpha[kept])

    def renumbered(self, numbers: Tensor) -> "Assignment":
        """Renumber the components. Those with a negative number are removed, and α is renormalized over the others."""
        labels = torch.where(self.labels < 0, -1, numbers[self.labels])
        partners = numbers[self.partners]
        alpha = self.alpha * (partners >= 0)
        total = alpha.sum(1, keepdim=True)
        kept = (labels[self.blended] >= 0) & (total[:, 0] > 0)
        own = labels[self.blended, None]
        return Assignment(labels, self.blended, torch.where(partners < 0, own, partners), alpha / total).only(kept)


def assign_components(tiles: Tiles, mixture: Mixture, border: float = CHI2_95, nearest: int = 5) -> Assignment:
    """Give each point the component k with the largest π_k N(θ | m_k, Σ_k), and a blend of `nearest` if D² > border.

    D² is the squared Mahalanobis distance to the point's component. The paper prints the condition the other way round.
    """
    constant = mixture.factors().constant.float()
    labels = torch.empty_like(tiles.order)
    far, partners, weights = [], [], []
    for block, joint in log_joints(tiles, candidates(tiles, mixture), mixture):
        best, place = joint.max(1)
        own = block.items.gather(1, place)
        labels[block.tiles] = own
        outside = (2 * (constant[own] - best) > border) & tiles.real[block.tiles]
        row, column = outside.nonzero(as_tuple=True)
        top, order = joint[row, :, column].sort(dim=1, descending=True, stable=True)
        top, order = top[:, :nearest], order[:, :nearest]
        missing = nearest - top.shape[1]
        far.append(tiles.order[block.tiles[row], column])
        near = torch.where(top > -torch.inf, block.items[row].gather(1, order), own[row, column][:, None])
        partners.append(torch.cat([near, own[row, column][:, None].expand(-1, missing)], 1))
        weights.append(torch.nn.functional.pad(blend_weights(top), (0, missing)))
    index, by = torch.cat(far).sort()
    return Assignment(tiles.unsorted(labels), index, torch.cat(partners)[by], torch.cat(weights)[by])


def dissolve(
    mixture: Mixture, found: Assignment, points: Tensor, minimum: int, mode: Dissolve, border: float = CHI2_95
) -> tuple[Mixture, Assignment]:
    """Remove components with fewer than `minimum` members. The members become outliers, or join the next best one."""
    inside = found.labels[found.labels >= 0]
    small = torch.bincount(inside, minlength=len(mixture)) < max(minimum, 1)
    if not small.any():
        return mixture, found
    if small.all():
        raise LeanBayesError(f"No component has {minimum} members: use fewer components, or a smaller minimum.")
    numbers = torch.where(small, -1, (~small).cumsum(0) - 1)
    lost = (small[found.labels.clamp_min(0)] & (found.labels >= 0)).nonzero()[:, 0]
    mixture, found = mixture[~small], found.renumbered(numbers)
    if mode == "outliers" or not len(lost):
        return mixture, found
    moved = assign_components(Tiles(points[lost]), mixture, border, found.alpha.shape[1])
    index, by = torch.cat([found.blended, lost[moved.blended]]).sort()
    partners, alpha = torch.cat([found.partners, moved.partners])[by], torch.cat([found.alpha, moved.alpha])[by]
    return mixture, Assignment(found.labels.index_copy(0, lost, moved.labels), index, partners, alpha)
