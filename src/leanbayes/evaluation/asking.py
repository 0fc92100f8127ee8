"""When to ask a person: a threshold chosen on held-out data, and what it does to the test data.

The threshold of classes answers most held-out examples with at most 1 % errors. It has no guarantee: the errors on the
test data, which did not choose it, show what it is worth. `lb.decide.fit` chooses thresholds with a guarantee.
"""

import math
from typing import Any

import torch
from torch import Tensor

from leanbayes.evaluation.outcomes import ClassOutcome, RegressionOutcome
from leanbayes.evaluation.selective import risk_coverage

RISK = 0.01  # the share of wrong answers that is allowed on held-out data
ASKED = 0.1  # the share of the held-out examples of a regression for which a person is asked


def asking_of(held_out: Any, test: Any) -> dict[str, float]:
    """Return the threshold and its effect on the test data, or {} for other predictions and without examples.

    Classes: "threshold" of the confidence, the share "asked" below it, the share "wrong" of the rest, and
    "wrong_without" asking. Regression: "threshold" of the std, the share "asked" above it, "rmse" of the rest, and
    "rmse_without" asking. If nothing is answered, "threshold" and the error of the rest are missing.
    """
    if held_out is None or not len(held_out) or not len(test):
        return {}
    if isinstance(held_out, ClassOutcome) and isinstance(test, ClassOutcome):
        return _of_classes(held_out, test)
    if isinstance(held_out, RegressionOutcome) and isinstance(test, RegressionOutcome):
        return _of_regression(held_out, test)
    return {}


def _of_classes(held_out: ClassOutcome, test: ClassOutcome) -> dict[str, float]:
    threshold = confidence_threshold(held_out.confidence, held_out.right)
    answered = test.confidence.double() >= threshold
    asked, without = 1 - answered.double().mean().item(), (~test.right).double().mean().item()
    if not answered.any():
        return {"asked": asked, "wrong_without": without}
    wrong = (~test.right)[answered].double().mean().item()
    return {"threshold": threshold, "asked": asked, "wrong": wrong, "wrong_without": without}


def confidence_threshold(confidence: Tensor, right: Tensor, risk: float = RISK) -> float:
    """Return the lowest confidence from which on at most `risk` of the answers are wrong: 0 for all, ∞ for none."""
    coverage, risks = risk_coverage(-confidence, (~right).double())
    allowed = torch.nonzero(risks <= risk)[:, 0]
    if not len(allowed):
        return math.inf
    last = int(allowed[-1])
    return 0.0 if last == len(coverage) - 1 else -(-confidence.double()).unique()[last].item()


def _of_regression(held_out: RegressionOutcome, test: RegressionOutcome) -> dict[str, float]:
    threshold = _largest(held_out.std).quantile(1 - ASKED).item()
    answered = _largest(test.std) <= threshold
    squares = test.error.double().square()
    asked, without = 1 - answered.double().mean().item(), squares.mean().sqrt().item()
    if not answered.any():
        return {"asked": asked, "rmse_without": without}
    rmse = squares[answered].mean().sqrt().item()
    return {"threshold": threshold, "asked": asked, "rmse": rmse, "rmse_without": without}


def _largest(std: Tensor) -> Tensor:
    """Return the largest std of each example."""
    return std.double().flatten(1).amax(1) if std.dim() > 1 else std.double()
