"""The metrics, one line each: what a batch adds to a sum, or a function of all examples.

To add a metric, add a line to the table of its kind of outcome, or pass it to `evaluate(..., metrics=[...])`.
docs/metrics.md explains each metric.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import calibration_error as calibration
from leanbayes.evaluation import selective
from leanbayes.evaluation.intervals import crps, interval_coverage, interval_width
from leanbayes.evaluation.outcomes import BinaryOutcome, ClassOutcome, Outcome, RegressionOutcome

LEVELS = tuple(round(0.05 * number, 2) for number in range(1, 20))  # of the predicted intervals of a regression
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Metric:
    """Base class of `Sum` and `Whole`.

    Attributes:
        name: The key of the score in the result of `evaluate`.

    Example:
        >>> from leanbayes.evaluation import METRICS
        >>> {metric.name for metrics in METRICS.values() for metric in metrics}
    """

    name: str


@dataclass(frozen=True)
class Sum(Metric):
    """A metric computed from sums over batches, so that memory does not grow with the data.

    Attributes:
        of: Function of an outcome that returns what a batch adds, or None if the metric does not apply.
        finish: Function of the total that returns the score.
        basic: Whether the metric is cheap enough to be computed during training.

    Example:
        >>> from leanbayes.evaluation import Sum, evaluate
        >>> wrong = Sum("wrong", lambda outcome: (~outcome.right).sum(), float)
        >>> evaluate(bnn, test_loader, metrics=[wrong])["wrong"]
    """

    of: Callable[[Any], Tensor | None]
    finish: Callable[[Tensor], float]
    basic: bool = True


@dataclass(frozen=True)
class Whole(Metric):
    """A metric that needs all examples at once, for example to sort them. Dense predictions have none of these.

    Attributes:
        finish: Function of the outcome of all examples that returns the score.

    Example:
        >>> from leanbayes.evaluation import Whole, evaluate
        >>> median = Whole("median_entropy", lambda outcome: outcome.entropy.median().item())
        >>> evaluate(bnn, test_loader, metrics=[median])["median_entropy"]
    """

    finish: Callable[[Any], float]


def mean(name: str, of: Callable[[Any], Tensor | None]) -> Sum:
    """Create a metric that is the mean of one value per example; nan if there are no values.

    Args:
        name: The key of the score.
        of: Function of an outcome that returns one value per example, or None if the metric does not apply. It may
            also select examples, such as `outcome.entropy[outcome.right]`.

    Returns:
        The metric, for `evaluate(..., metrics=[...])`.

    Raises:
        LeanBayesError: When it is evaluated, if `of` returns a scalar.

    Example:
        >>> from leanbayes.evaluation import evaluate, mean
        >>> confidence = mean("confidence", lambda outcome: outcome.confidence)
        >>> evaluate(bnn, test_loader, metrics=[confidence])["confidence"]
    """
    return Sum(name, _sum_and_count(of), lambda sums: float(sums[0] / sums[1]))


def _sum_and_count(of: Callable[[Any], Tensor | None]) -> Callable[[Any], Tensor | None]:
    def total(outcome: Any) -> Tensor | None:
        values = of(outcome)
        if values is None:
            return None
        if not values.dim():
            raise LeanBayesError("A mean metric needs one value per example: return a tensor of them, not their mean.")
        return torch.stack([values.sum(dtype=torch.float64), values.new_tensor(values.numel(), dtype=torch.float64)])

    return total


def _in_top_five(o: ClassOutcome) -> Tensor | None:
    """Whether at most four other classes are as probable as the true class; ties count against it."""
    if o.probs.shape[-1] <= 5:
        return None
    return (o.probs >= o.chosen[:, None]).sum(-1) <= 5


def _confusion(o: ClassOutcome) -> Tensor | None:
    """Count the pixels by (true class, predicted class)."""
    if not o.dense:
        return None
    classes = o.probs.shape[-1]
    return torch.bincount(o.labels * classes + o.answer, minlength=classes**2).view(classes, classes).double()


def iou_by_class(confusion: Tensor) -> Tensor:
    """Return the intersection over union of each class; nan for a class that neither occurs nor is predicted."""
    both = confusion.diagonal()
    return both / (confusion.sum(0) + confusion.sum(1) - both)


def _bins(o: ClassOutcome) -> Tensor:
    return calibration.bin_sums(o.confidence, o.right)


def _class_bins(o: ClassOutcome) -> Tensor:
    return calibration.class_bin_sums(o.probs, o.labels)


def _wide(values: Tensor) -> Tensor:
    """Convert half precision to float32: it cannot represent _TINY, and has few digits for squares."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _log(p: Tensor) -> Tensor:
    return p.clamp_min(_TINY).log()


def _brier(o: ClassOutcome) -> Tensor:
    """Σ_k (p_k - [y = k])² = Σ_k p_k² - 2 p_y + 1."""
    return _wide(o.probs).square().sum(-1) - 2 * _wide(o.chosen) + 1


def _is_right(o: BinaryOutcome) -> Tensor:
    return (o.probs >= 0.5) == (o.truth >= 0.5)


def _binary_nll(o: BinaryOutcome) -> Tensor:
    p, truth = _wide(o.probs), _wide(o.truth)
    return -(truth * _log(p) + (1 - truth) * _log(1 - p))


def _gaussian_nll(o: RegressionOutcome) -> Tensor:
    variance = o.std.double().square().clamp_min(_TINY)
    return 0.5 * (o.error.double().square() / variance + (2 * torch.pi * variance).log())


def _inside_intervals(o: RegressionOutcome) -> Tensor:
    """Count the targets inside the interval of each of LEVELS, and all targets."""
    inside = [interval_coverage(o.error, o.std, level).sum() for level in LEVELS]
    return torch.stack([*inside, inside[0].new_tensor(o.error.numel())])


def interval_shares(sums: Tensor) -> Tensor:
    """Return the fraction of the targets inside the interval of each of LEVELS."""
    return sums[:-1] / sums[-1]


def _interval_error(sums: Tensor) -> float:
    """Return mean |share inside - level| over LEVELS (Kuleshov et al. 2018, arXiv:1807.00263, with absolute gaps)."""
    return float((interval_shares(sums) - torch.tensor(LEVELS, dtype=sums.dtype)).abs().mean())


def _wrong(o: ClassOutcome) -> Tensor:
    return (~o.right).double()


_CLASSES: tuple[Metric, ...] = (
    mean("accuracy", lambda o: o.right),
    mean("top5", _in_top_five),
    Sum("miou", _confusion, lambda sums: float(iou_by_class(sums).nanmean())),
    mean("nll", lambda o: -_log(_wide(o.chosen))),
    mean("brier", _brier),
    Sum("ece", _bins, calibration.expected_calibration_error),
    Sum("classwise_ece", _class_bins, calibration.classwise_ece, basic=False),
    Whole("adaptive_ece", lambda o: calibration.adaptive_ece(o.confidence, o.right)),
    Whole("debiased_classwise_error", lambda o: calibration.debiased_classwise_error(o.probs, o.labels)),
    Whole("aurc", lambda o: selective.area_under_risk_coverage(-o.confidence, _wrong(o))),
    Whole("excess_aurc", lambda o: selective.excess_aurc(-o.confidence, _wrong(o))),
    Whole("coverage_at_1_percent", lambda o: selective.coverage_at_risk(-o.confidence, _wrong(o), 0.01)),
    Whole("error_at_90", lambda o: selective.risk_at_coverage(-o.confidence, _wrong(o), 0.9)),
    mean("entropy", lambda o: o.entropy),
    mean("entropy_right", lambda o: o.entropy[o.right]),
    mean("entropy_wrong", lambda o: o.entropy[~o.right]),
    mean("mutual_information", lambda o: o.mutual_information),
)
_BINARY: tuple[Metric, ...] = (
    mean("accuracy", _is_right),
    mean("nll", _binary_nll),
    mean("brier", lambda o: (_wide(o.probs) - _wide(o.truth)).square()),
    Sum("ece", lambda o: calibration.bin_sums(o.probs, o.truth), calibration.expected_calibration_error),
    Whole("adaptive_ece", lambda o: calibration.adaptive_ece(o.probs, o.truth)),
    Whole("aurc", lambda o: selective.area_under_risk_coverage(o.entropy, (~_is_right(o)).double())),
    mean("entropy", lambda o: o.entropy),
    mean("mutual_information", lambda o: o.mutual_information),
)
_REGRESSION: tuple[Metric, ...] = (
    Sum("rmse", _sum_and_count(lambda o: o.error.square()), lambda sums: float(sums[0] / sums[1]) ** 0.5),
    mean("nll", _gaussian_nll),
    mean("crps", lambda o: crps(o.error, o.std)),
    mean("coverage_95", lambda o: interval_coverage(o.error, o.std, 0.95)),
    mean("width_95", lambda o: interval_width(o.std, 0.95)),
    Sum("interval_error", _inside_intervals, _interval_error, basic=False),
    mean("std", lambda o: o.std),
    mean("epistemic_std", lambda o: o.epistemic_std),
)
METRICS: dict[type[Outcome], tuple[Metric, ...]] = {
    ClassOutcome: _CLASSES,
    BinaryOutcome: _BINARY,
    RegressionOutcome: _REGRESSION,
}
