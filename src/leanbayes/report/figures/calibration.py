"""Figures of calibration: reliability of the answers and of each class, confidences, and intervals."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from leanbayes.evaluation.metrics import LEVELS
from leanbayes.figures import Figure, Series
from leanbayes.report.figures.lines import Runs, added, class_name, curves, mean_line

_CLASSES, _FEWEST = 5, 5  # drawn at most, and examples of a bin to be drawn


def calibration(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    """Draw reliability diagrams, and how often each confidence occurs; for regressions the coverage of intervals."""
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
        caption="How often answers of a given confidence are right. On the diagonal confidence can be taken at its "
        "word; below it the model is too sure, above it too modest.",
        series=(_bins_as_line("", bins),),
        percent="xy",
        diagonal=True,
    )


def _bins_as_line(name: str, bins: Any, fewest: int = 1) -> Series:
    confidence, right, count = bins[:, bins[2] >= fewest]
    labels = tuple(f"{int(number):,} examples" for number in count)
    return Series(name, tuple(confidence / count), tuple(right / count), labels=labels)


def _confidences(bins: Any) -> Figure:
    edges = np.linspace(0, 1, bins.shape[1] + 1)
    names = tuple(f"{low:.0%}–{high:.0%}" for low, high in pairwise(edges))
    return Figure(
        key="confidences",
        title="Confidence of the answers",
        kind="bars",
        x="confidence",
        y="share of the test examples",
        caption="How sure the answers are. The calibration error weighs the bins of the reliability diagram by it.",
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
    lines = [_bins_as_line(class_name(classes, number), bins[number], _FEWEST) for number in worst]
    return [
        Figure(
            key="class-reliability",
            title="Reliability of each class",
            kind="lines",
            x="predicted probability of the class",
            y="how often it is that class",
            caption="The same for the probability of a class, whether or not it is the answer. Drawn are "
            f"{which}, and bins of at least {_FEWEST} examples.",
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
        x="probability that the interval claims",
        y="share of the truths inside",
        caption="On the diagonal intervals hold what they claim; below it the model is too sure, above it too modest.",
        series=(mean_line("", LEVELS, shares),),
        percent="xy",
        diagonal=True,
    )
