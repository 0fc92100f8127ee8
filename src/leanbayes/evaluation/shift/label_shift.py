"""Label shift: resampling with other class proportions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError


def label_shift(
    labels: Tensor,
    generator: torch.Generator,
    concentration: float = 1.0,
    size: int | None = None,
    proportions: Tensor | Sequence[float] | None = None,
) -> Tensor:
    """Draw `size` (default: n) indices of examples with replacement, so that labels (n,) follow other proportions.

    The class proportions are drawn from Dirichlet(concentration, ..., concentration) over the classes that occur, or
    given, one per class starting at 0 and not necessarily normalized.
    """
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or not len(labels):
        raise LeanBayesError(
            f"Labels must be integers of shape (n,), not {labels.dtype} of shape {tuple(labels.shape)}: pass one class "
            "per example."
        )
    count = len(labels) if size is None else size
    if count < 0:
        raise LeanBayesError(f"size={size} must be 0 or more.")
    order = labels.cpu().long().argsort(stable=True)
    classes, sizes = labels.cpu().long().unique(return_counts=True)
    if proportions is None:
        shares = _dirichlet(len(classes), concentration, generator)
    else:
        shares = _given(torch.as_tensor(proportions, dtype=torch.float64).cpu(), classes)
    drawn = torch.multinomial(shares, count, replacement=True, generator=generator) if count else sizes[:0]
    place = torch.rand(count, generator=generator, dtype=torch.float64).mul_(sizes[drawn]).long()
    first = sizes.cumsum(0) - sizes
    return order[first[drawn] + place].to(labels.device)


def _dirichlet(classes: int, concentration: float, generator: torch.Generator) -> Tensor:
    """Draw from a symmetric Dirichlet as normalized Gamma(a) = Gamma(a + 1) U^(1/a), in logarithms for small a."""
    if not (math.isfinite(concentration) and concentration > 0):
        raise LeanBayesError(f"concentration={concentration} must be a positive number.")
    shape = torch.full((classes,), concentration + 1.0, dtype=torch.float64)
    power = torch.rand(classes, generator=generator, dtype=torch.float64).clamp_min_(1e-300).log_() / concentration
    return torch.softmax(torch._standard_gamma(shape, generator=generator).log_() + power, 0)


def _given(proportions: Tensor, classes: Tensor) -> Tensor:
    """Check the given proportions, and return those of the classes that occur."""
    if proportions.dim() != 1 or not (proportions >= 0).all() or not 0 < float(proportions.sum()) < math.inf:
        raise LeanBayesError("proportions must be nonnegative numbers, one per class, and not all 0.")
    if classes.min() < 0 or classes.max() >= len(proportions):
        found = f"{len(proportions)} proportions do not match labels from {int(classes.min())} to {int(classes.max())}"
        raise LeanBayesError(f"{found}: pass one per class, starting at 0.")
    absent = proportions.clone()
    absent[classes] = 0
    if absent.any():
        raise LeanBayesError(
            f"No example has the label {int(absent.nonzero()[0])}, whose proportion is not 0: set it to 0."
        )
    return proportions[classes]
