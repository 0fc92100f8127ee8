"""Figures of calibration: reliability diagrams of predictions and classes, and coverage of intervals."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from leanbayes.evaluation.metrics import LEVELS
from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.seed_lines import Runs, added, class_name, curves, mean_line

_CLASSES = 5  # plotted at most
_MIN_COUNT = 10  # examples per run that a bin needs to be plotted
_NOTABLE = 0.02  # share of overconfident answers from which on the figure says so


def calibration(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    """Plot reliability diagrams, or for regression the coverage of intervals."""
    intervals, bins = curves(runs, "intervals"), added(runs, "reliability")
    if intervals is not None:
        return [_intervals(intervals)]
    return [] if bins is None else [_reliability(bins, len(runs)), *_class_reliability(runs, classes)]


def _reliability(bins: Any, runs: int) -> Figure:
    line = _bins_as_line("", bins, runs)
    return Figure(
        key="reliability",
        title="Reliability",
        kind="lines",
        x="confidence",
        y="accuracy",
        caption="How certain the model was, against how often it was right. Below the diagonal it is overconfident, "
        f"above it underconfident. Larger points have more examples; bins of fewer than {_MIN_COUNT} are left out. "
        "Vertical lines are 95 % intervals.",
        series=(line,),
        percent="xy",
        diagonal=True,
        warning=_overconfident(line),
    )


def _bins_as_line(name: str, bins: Any, runs: int) -> Series:
    """Plot the bins with enough examples. The seeds share the examples, so that only those of one run are counted."""
    confidence, right, count = bins[:, bins[2] >= _MIN_COUNT * runs]
    low, high = wilson_interval(right / count, count / runs)
    labels = tuple(f"{round(number / runs):,} examples" for number in count)
    sizes = tuple(count / max(bins[2].sum(), 1))
    return Series(name, tuple(confidence / count), tuple(right / count), tuple(low), tuple(high), labels, sizes)


def wilson_interval(share: Any, count: Any, level: float = 0.95) -> tuple[Any, Any]:
    """Return the interval of a probability by Wilson (1927), given the share of successes and the number of trials."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return np.maximum(middle - half, 0), np.minimum(middle + half, 1)


def _overconfident(line: Series) -> str:
    """Say where the model is significantly overconfident, if that concerns many answers."""
    gaps = [(x - y) * size if high < x else 0.0 for x, y, high, size in _points(line)]
    if sum(gaps) < _NOTABLE:
        return ""
    x, y, *_ = _points(line)[int(np.argmax(gaps))]
    return f"Overconfident: of the answers with about {x:.0%} confidence, {y:.0%} are right."


def _points(line: Series) -> list[tuple[float, float, float, float]]:
    return [*zip(map(float, line.x), line.y, line.high, line.sizes, strict=True)]


def _class_reliability(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    bins = added(runs, "class_reliability")
    if bins is None:
        return []
    gaps = np.abs(bins[:, 0] - bins[:, 1]).sum(1)
    worst = sorted(np.argsort(-gaps, kind="stable")[:_CLASSES])
    which = "all classes" if len(worst) == len(bins) else f"the {len(worst)} classes with the largest gaps"
    lines = [_bins_as_line(class_name(classes, number), bins[number], len(runs)) for number in worst]
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
