"""Out-of-distribution detection: how well uncertainty separates OOD examples from in-distribution examples.

A score is an uncertainty: a higher score means that an example is more likely OOD. Only the order of the scores
matters, including ties.
"""

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Return the probability that an OOD example has a higher score than an in-distribution one; ties count half.

    This is the area under the ROC curve (Mann & Whitney 1947), computed exactly with integers.
    """
    inside, outside = _scores(scores_in).sort().values, _scores(scores_out)
    below = torch.searchsorted(inside, outside)
    not_above = torch.searchsorted(inside, outside, right=True)
    return int((below + not_above).sum()) / (2 * len(inside) * len(outside))


def average_precision(positive: Tensor, negative: Tensor) -> float:
    """Return the mean precision over the positive examples, which should have the higher scores.

    AP = Σ_t (R_t - R_{t-1})·P_t over the distinct scores as thresholds t, from the highest, as in scikit-learn.
    """
    positive, negative = _scores(positive), _scores(negative)
    _, places, counts = torch.cat([positive, negative]).unique(return_inverse=True, return_counts=True)
    hits = torch.bincount(places[: len(positive)], minlength=len(counts)).flip(0)
    precision = hits.cumsum(0).double() / counts.flip(0).cumsum(0)
    return float((hits * precision).sum() / len(positive))


def false_positive_rate(scores_in: Tensor, scores_out: Tensor, true_positive_rate: float = 0.95) -> float:
    """Return the share of OOD examples that pass the threshold which `true_positive_rate` of the others pass.

    The threshold is the lowest one that at least this fraction of the in-distribution examples (the positive class)
    does not exceed (Hendrycks & Gimpel 2017, arXiv:1610.02136; Liang et al. 2018, arXiv:1706.02690).
    """
    if not 0 < true_positive_rate <= 1:
        raise LeanBayesError(f"true_positive_rate={true_positive_rate} must be above 0 and at most 1.")
    inside, outside = _scores(scores_in).sort().values, _scores(scores_out)
    shares = torch.arange(1, len(inside) + 1, dtype=torch.float64) / len(inside)
    # A search, because products such as 0.55·100 are slightly more than 55 in floating point.
    threshold = inside[int(torch.searchsorted(shares, true_positive_rate))]
    return int((outside <= threshold).sum()) / len(outside)


def detection_scores(scores_in: Tensor, scores_out: Tensor) -> dict[str, float]:
    """Return auroc, aupr_in and aupr_out (in-distribution or OOD positive), and fpr95, fpr85 (at 95, 85 % TPR)."""
    inside, outside = _scores(scores_in), _scores(scores_out)
    return {
        "auroc": auroc(inside, outside),
        "aupr_in": average_precision(-inside, -outside),
        "aupr_out": average_precision(outside, inside),
        "fpr95": false_positive_rate(inside, outside, 0.95),
        "fpr85": false_positive_rate(inside, outside, 0.85),
    }


def _scores(values: Tensor) -> Tensor:
    values = values.detach().double().flatten().contiguous()
    if not len(values):
        raise LeanBayesError(
            "Detection compares two sets of scores, and one is empty: pass at least one score in each."
        )
    if values.isnan().any():
        raise LeanBayesError("The scores contain NaN, which has no rank: fix or remove such examples.")
    return values
