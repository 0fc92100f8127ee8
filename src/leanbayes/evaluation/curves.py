"""Curves and examples behind the scores of one model on one data set, for the figures of the report."""

import math
from typing import Any

import torch
from torch import Tensor

from leanbayes.evaluation.metrics import interval_shares, iou_by_class
from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.evaluation.scores import Scores
from leanbayes.evaluation.selective import risk_coverage

_POINTS = 101  # of the risk-coverage curve
_HISTOGRAM = 30  # bins of the entropy histograms


def curves_of(scores: Scores) -> dict[str, Any]:
    """Return plain lists: reliability bins, IoU per class, risk over coverage, entropies, interval coverage."""
    curves: dict[str, Any] = {}
    for name, key, change in (
        ("reliability", "ece", Tensor.tolist),
        ("class_reliability", "classwise_ece", Tensor.tolist),
        ("iou", "miou", lambda sums: iou_by_class(sums).tolist()),
        ("intervals", "interval_error", lambda sums: interval_shares(sums).tolist()),
    ):
        sums = scores.sums(key)
        if sums is not None:
            curves[name] = change(sums)
    found = scores.outcome()
    return curves | _of_classes(found) if isinstance(found, ClassOutcome) else curves


def _of_classes(found: ClassOutcome) -> dict[str, Any]:
    coverage, risk = risk_coverage(-found.confidence, (~found.right).double())
    rows = torch.linspace(0, len(coverage) - 1, min(_POINTS, len(coverage)), dtype=torch.float64).round().long()
    edges = entropy_edges(found.probs.shape[-1])
    return {
        "risk_coverage": [coverage[rows].tolist(), risk[rows].tolist()],
        "entropy_edges": edges.tolist(),
        "entropy_right": histogram(found.entropy[found.right], edges),
        "entropy_wrong": histogram(found.entropy[~found.right], edges),
    }


def entropy_edges(classes: int) -> Tensor:
    """Return the edges of the entropy bins, from 0 to the entropy of a uniform prediction."""
    return torch.linspace(0, math.log(classes), _HISTOGRAM + 1, dtype=torch.float64)


def histogram(values: Tensor, edges: Tensor) -> list[int]:
    """Count values in bins; values beyond the ends, by rounding, fall in the outermost bins."""
    places = (torch.bucketize(values.double(), edges, right=True) - 1).clamp(0, len(edges) - 2)
    return torch.bincount(places, minlength=len(edges) - 1).tolist()


def mistakes_of(found: ClassOutcome, labeled: Tensor) -> dict[str, list[float]]:
    """Return index, truth, answer and confidence of all mistakes, the most confident first.

    labeled: which of the examples were scored, for indices that count all.
    """
    wrong = torch.nonzero(~found.right)[:, 0]
    wrong = wrong[found.confidence[wrong].argsort(descending=True, stable=True)]
    return {
        "index": torch.nonzero(labeled)[:, 0][wrong].tolist(),
        "truth": found.labels[wrong].tolist(),
        "answer": found.answer[wrong].tolist(),
        "confidence": found.confidence[wrong].tolist(),
    }
