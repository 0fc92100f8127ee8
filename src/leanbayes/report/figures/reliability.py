"""Figures of calibration: reliability diagrams of predictions and classes, confidences, and intervals."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from leanbayes.evaluation.metrics import LEVELS
from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.seed_lines import Runs, added, class_name, curves, mean_line

_CLASSES = 5  # plotted at most
_MIN_COUNT = 5  # examples a bin needs to be plotted


def calibration(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    """Plot reliability diagrams and the distribution of confidences, or for regression the coverage of intervals."""
    intervals, bins = curves(runs, "intervals"), added(runs, "reliability")
    if intervals is not None:
        return [_intervals(intervals)]
    return [] if bins is None else [_reliability(bins), _confidences(bins), *_class_reliability(runs, classes)]


def _reliability(bins: Any) -> Figure:
    return Figure(
        key="reliability",
        title="Reliability",
        kind="lines",
        x="confidence",
        y="accuracy",
        caption="How certain the model was, against how often it was right. Below the diagonal the model is "
        "overconfident, above it underconfident.",
        series=(_bins_as_line("", bins),),
        percent="xy",
        diagonal=True,
    )


def _bins_as_line(name: str, bins: Any, min_count: int = 1) -> Series:
    confidence, right, count = bins[:, bins[2] >= min_count]
    labels = tuple(f"{int(number):,} examples" for number in count)
    return Series(name, tuple(confidence / count), tuple(right / count), labels=labels)


def _confidences(bins: Any) -> Figure:
    edges = np.linspace(0, 1, bins.shape[1] + 1)
    names = tuple(f"{low:.0%}–{high:.0%}" for low, high in pairwise(edges))
    return Figure(
        key="confidences",
        title="Distribution of confidence",
        kind="bars",
        x="confidence",
        y="share of the test examples",
        caption="How often each confidence occurs. The calibration error weights the bins of the reliability diagram "
        "by this share.",
        series=(Series("", names, tuple(bins[2] / bins[2].sum())),),
        percent="y",
    )


def _class_reliability(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    bins = added(runs, "class_reliability")
    if bins is None:
        return []
    gaps = np.abs(bins[:, 0] - bins[:, 1]).sum(1)
    worst = sorted(np.argsort(-gaps, kind="stable")[:_CLASSES])
    which = "all classes" if len(worst) == len(bins) else f"the {len(worst)} classes with the largest gaps"
    lines = [_bins_as_line(class_name(classes, number), bins[number], _MIN_COUNT) for number in worst]
    return [
        Figure(
            key="class-reliability",
            title="Reliability per class",
            kind="lines",
            x="predicted probability of the class",
            y="frequency of the class",
            caption="The same for the probability of a class, whether or not it is the predicted class. Shown: "
            f"{which}, and bins of at least {_MIN_COUNT} examples.",
            series=tuple(line for line in lines if line.x),
            percent="xy",
            apart=True,
            diagonal=True,
        )
    ]


def _intervals(shares: Sequence[Sequence[float]]) -> Figure:
    return Figure(
        key="intervals",
        title="Coverage of intervals",
        kind="lines",
        x="nominal probability of the interval",
        y="share of the targets inside",
        caption="How often predicted intervals contain the target. Below the diagonal the model is overconfident, "
        "above it underconfident.",
        series=(mean_line("", LEVELS, shares),),
        percent="xy",
        diagonal=True,
    )
