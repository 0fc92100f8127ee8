"""The scores, one line each: how a batch adds to it, or what all examples together say.

A new one is a line in the table of its kind of outcome, or is handed to `evaluate(..., metrics=[...])`. docs/metrics.md
tells what each means.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import calibration, selective
from leanbayes.evaluation.intervals import crps, interval_coverage, interval_width
from leanbayes.evaluation.outcomes import BinaryOutcome, ClassOutcome, Outcome, RegressionOutcome

LEVELS = tuple(round(0.05 * number, 2) for number in range(1, 20))  # of the intervals of a regression
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Metric:
    """A score by its name."""

    name: str


@dataclass(frozen=True)
class Sum(Metric):
    """A score made of sums, so that memory does not grow with the data.

    of: what a batch adds, or None where the score does not apply. finish: the score of the total.
    """

    of: Callable[[Any], Tensor | None]
    finish: Callable[[Tensor], float]
    basic: bool = True  # cheap, and of use while a network trains


@dataclass(frozen=True)
class Whole(Metric):
    """A score that needs all examples at once, such as one that sorts them; dense predictions have none of these."""

    finish: Callable[[Any], float]


def mean(name: str, of: Callable[[Any], Tensor | None]) -> Sum:
    """Make a score that is the mean of a value of each example; nan where there is none."""
    return Sum(name, _sum_and_count(of), lambda sums: float(sums[0] / sums[1]))


def _sum_and_count(of: Callable[[Any], Tensor | None]) -> Callable[[Any], Tensor | None]:
    def total(outcome: Any) -> Tensor | None:
        values = of(outcome)
        if values is None:
            return None
        if not values.dim():
            raise LeanBayesError("A mean is taken over values of examples: return one for each, not their mean.")
        return torch.stack([values.sum(dtype=torch.float64), values.new_tensor(values.numel(), dtype=torch.float64)])

    return total


def _in_top_five(o: ClassOutcome) -> Tensor | None:
    """Whether at most four others are as probable as the true class: a tie counts against it."""
    if o.probs.shape[-1] <= 5:
        return None
    return (o.probs >= o.chosen[:, None]).sum(-1) <= 5


def _confusion(o: ClassOutcome) -> Tensor | None:
    """Count the pixels by (true class, answer)."""
    if not o.dense:
        return None
    classes = o.probs.shape[-1]
    return torch.bincount(o.labels * classes + o.answer, minlength=classes**2).view(classes, classes).double()


def iou_by_class(confusion: Tensor) -> Tensor:
    """Intersection over union of each class; nan for a class that is neither there nor predicted."""
    both = confusion.diagonal()
    return both / (confusion.sum(0) + confusion.sum(1) - both)


def _bins(o: ClassOutcome) -> Tensor:
    return calibration.bin_sums(o.confidence, o.right)


def _class_bins(o: ClassOutcome) -> Tensor:
    return calibration.class_bin_sums(o.probs, o.labels)


def _wide(values: Tensor) -> Tensor:
    """Bring half precisions to single: they have no number as small as _TINY, and few digits for squares."""
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
    """Count the targets inside the interval of each of LEVELS, and all of them."""
    inside = [interval_coverage(o.error, o.std, level).sum() for level in LEVELS]
    return torch.stack([*inside, inside[0].new_tensor(o.error.numel())])


def interval_shares(sums: Tensor) -> Tensor:
    """Share of the targets inside the interval of each of LEVELS."""
    return sums[:-1] / sums[-1]


def _interval_error(sums: Tensor) -> float:
    """Mean |share inside - level| over LEVELS (as Kuleshov et al. 2018, arXiv:1807.00263, with absolute gaps)."""
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
