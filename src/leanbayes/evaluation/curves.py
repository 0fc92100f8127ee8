"""Curves that stand behind the scores: what the report draws of one model on one data set."""

from typing import Any

import torch
from torch import Tensor

from leanbayes.evaluation.intervals import interval_coverage
from leanbayes.evaluation.metrics import iou_by_class
from leanbayes.evaluation.outcomes import ClassOutcome, RegressionOutcome
from leanbayes.evaluation.scores import Scores
from leanbayes.evaluation.selective import risk_coverage

_POINTS = 101  # of a curve of many examples
_HISTOGRAM = 30  # bins of the entropy
LEVELS = tuple(round(0.05 * number, 2) for number in range(1, 20))  # of the intervals


def curves_of(scores: Scores) -> dict[str, Any]:
    """Return plain lists: bins of reliability, IoU of classes, risk over coverage, entropies, coverage of intervals."""
    curves: dict[str, Any] = {}
    for name, key in (("reliability", "ece"), ("class_reliability", "classwise_ece")):
        sums = scores.sums(key)
        if sums is not None:
            curves[name] = sums.tolist()
    confusion = scores.sums("miou")
    if confusion is not None:
        curves["iou"] = iou_by_class(confusion).tolist()
    found = scores.outcome()
    if isinstance(found, ClassOutcome):
        curves |= _of_classes(found)
    elif isinstance(found, RegressionOutcome):
        curves["intervals"] = [interval_coverage(found.error, found.std, level).mean().item() for level in LEVELS]
    return curves


def _of_classes(found: ClassOutcome) -> dict[str, Any]:
    coverage, risk = risk_coverage(-found.confidence, (~found.right).double())
    rows = torch.linspace(0, len(coverage) - 1, min(_POINTS, len(coverage))).round().long()
    edges = entropy_edges(found.probs.shape[-1])
    return {
        "risk_coverage": [coverage[rows].tolist(), risk[rows].tolist()],
        "entropy_edges": edges.tolist(),
        "entropy_right": histogram(found.entropy[found.right], edges),
        "entropy_wrong": histogram(found.entropy[~found.right], edges),
    }


def entropy_edges(classes: int) -> Tensor:
    """Return the limits of the bins of an entropy, from 0 to that of a guess."""
    return torch.linspace(0, torch.tensor(classes).log().item(), _HISTOGRAM + 1, dtype=torch.float64)


def histogram(values: Tensor, edges: Tensor) -> list[int]:
    """Count values in bins; those that rounding has put beyond the ends are in the last ones."""
    places = (torch.bucketize(values.double(), edges, right=True) - 1).clamp(0, len(edges) - 2)
    return torch.bincount(places, minlength=len(edges) - 1).tolist()
