"""The scores, one line each: how a batch adds to it, or what all examples together say.

A new one is a line in the table of its kind of outcome, or is handed to `evaluate(..., metrics=[...])`. docs/metrics.md
tells what each means.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.evaluation import calibration, selective
from leanbayes.evaluation.intervals import crps, interval_coverage, interval_width
from leanbayes.evaluation.outcomes import BinaryOutcome, ClassOutcome, Outcome, RegressionOutcome

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sum:
    """A score made of sums, so that memory does not grow with the data.

    of: what a batch adds, or None where the score does not apply. finish: the score of the total.
    """

    name: str
    of: Callable[[Any], Tensor | None]
    finish: Callable[[Tensor], float]
    basic: bool = True  # cheap, and of use while a network trains


@dataclass(frozen=True)
class Whole:
    """A score that needs all examples at once, such as one that sorts them; dense predictions have none of these."""

    name: str
    finish: Callable[[Any], float]


Metric = Sum | Whole


def mean(name: str, of: Callable[[Any], Tensor | None]) -> Sum:
    """Make a score that is the mean of a value of each example; nan where there is none."""

    def total(outcome: Any) -> Tensor | None:
        values = of(outcome)
        if values is None:
            return None
        return torch.stack([values.sum(dtype=torch.float64), values.new_tensor(values.numel(), dtype=torch.float64)])

    return Sum(name, total, lambda sums: float(sums[0] / sums[1]))


def _in_top_five(o: ClassOutcome) -> Tensor | None:
    """Whether fewer than five classes are more probable than the true one; a tie counts against it."""
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


def _class_bins(o: ClassOutcome) -> Tensor:
    return calibration.class_bin_sums(o.probs, o.labels)


def _log(p: Tensor) -> Tensor:
    return p.clamp_min(_TINY).log()


def _gaussian_nll(o: RegressionOutcome) -> Tensor:
    variance = o.std.square()
    return 0.5 * (o.error.square() / variance + (2 * torch.pi * variance).log())


def _wrong(o: ClassOutcome) -> Tensor:
    return (~o.right).double()


_CLASSES: tuple[Metric, ...] = (
    mean("accuracy", lambda o: o.right),
    mean("top5", _in_top_five),
    Sum("miou", _confusion, lambda sums: float(iou_by_class(sums).nanmean())),
    mean("nll", lambda o: -_log(o.chosen)),
    mean("brier", lambda o: o.probs.square().sum(-1) - 2 * o.chosen + 1),
    Sum(
        "ece", lambda o: calibration.bin_sums(o.confidence, o.right), calibration.expected_calibration_error
    ),  # Guo et al. 2017
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
    mean("accuracy", lambda o: (o.probs >= 0.5) == (o.truth >= 0.5)),
    mean("nll", lambda o: -(o.truth * _log(o.probs) + (1 - o.truth) * _log(1 - o.probs))),
    mean("brier", lambda o: (o.probs - o.truth).square()),
    mean("entropy", lambda o: o.entropy),
    mean("mutual_information", lambda o: o.mutual_information),
)
_REGRESSION: tuple[Metric, ...] = (
    Sum("rmse", mean("", lambda o: o.error.square()).of, lambda sums: float(sums[0] / sums[1]) ** 0.5),
    mean("nll", _gaussian_nll),
    mean("crps", lambda o: crps(o.error, o.std)),
    mean("coverage_95", lambda o: interval_coverage(o.error, o.std, 0.95)),
    mean("width_95", lambda o: interval_width(o.std, 0.95)),
    mean("std", lambda o: o.std),
    mean("epistemic_std", lambda o: o.epistemic_std),
)
METRICS: dict[type[Outcome], tuple[Metric, ...]] = {
    ClassOutcome: _CLASSES,
    BinaryOutcome: _BINARY,
    RegressionOutcome: _REGRESSION,
}
