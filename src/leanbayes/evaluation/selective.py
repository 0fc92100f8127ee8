"""Selective prediction: how the risk falls when the model abstains on its most uncertain examples.

Examples of equal uncertainty are accepted or rejected together, so no result depends on their order.
"""

import math

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coverage (share of accepted examples) and the risk (their mean loss) for each threshold.

    uncertainty (n,) and loss (n,) give two tensors (k,) in float64, where k is the number of distinct uncertainties,
    from only the most certain examples to all of them.
    """
    counts, losses = _blocks(uncertainty, loss)
    answered = counts.cumsum(0)
    return answered.double() / counts.sum(), losses.cumsum(0) / answered


def area_under_risk_coverage(uncertainty: Tensor, loss: Tensor) -> float:
    """Return the mean of the risk over 1, 2, ... n accepted examples: AURC (Geifman et al. 2019, arXiv:1805.08206).

    For equal uncertainties this is the expectation over a random order: each example has their mean loss.
    """
    counts, losses = _blocks(uncertainty, loss)
    expected = (losses / counts).repeat_interleave(counts)
    risk = expected.cumsum(0) / torch.arange(1, len(expected) + 1, device=expected.device)
    return float(risk.mean())


def excess_aurc(uncertainty: Tensor, loss: Tensor) -> float:
    """Return the AURC minus that of the perfect order, by ascending loss: E-AURC (Geifman et al. 2019)."""
    excess = area_under_risk_coverage(uncertainty, loss) - area_under_risk_coverage(loss, loss)
    return max(excess, 0.0)  # negative only by rounding


def coverage_at_risk(uncertainty: Tensor, loss: Tensor, risk: float) -> float:
    """Return the largest coverage with a mean loss of at most `risk`; 0 if there is none."""
    coverage, risks = risk_coverage(uncertainty, loss)
    allowed = coverage[risks <= risk]
    return float(allowed[-1]) if len(allowed) else 0.0


def risk_at_coverage(uncertainty: Tensor, loss: Tensor, coverage: float) -> float:
    """Return the mean loss of the most certain ⌈coverage·n⌉ examples; of equal ones in expectation over their order."""
    counts, losses = _blocks(uncertainty, loss)
    expected = (losses / counts).repeat_interleave(counts)
    return float(expected[: math.ceil(coverage * len(expected) - 1e-9)].mean())


def _blocks(uncertainty: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of examples of each distinct uncertainty, in ascending order, and the sum of their losses."""
    if uncertainty.shape != loss.shape or not loss.numel():
        raise LeanBayesError(
            f"Uncertainties of shape {tuple(uncertainty.shape)} and losses of shape {tuple(loss.shape)} must have "
            "one value per example, and at least one example: reshape them."
        )
    uncertainty, loss = uncertainty.detach().double().flatten(), loss.detach().double().flatten()
    if uncertainty.isnan().any() or not loss.isfinite().all():
        raise LeanBayesError("Uncertainties must not be NaN, and losses must be finite: fix or remove such examples.")
    values, places, counts = uncertainty.unique(return_inverse=True, return_counts=True)
    return counts, torch.zeros_like(values).index_add_(0, places, loss)
