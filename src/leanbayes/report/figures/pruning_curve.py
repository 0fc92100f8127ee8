"""The pruning curve: the quality of a model with more and more of its weights set to zero."""

import dataclasses
from collections.abc import Mapping, Sequence

from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.seed_lines import Runs, in_all, mean_line

_SCORES = {"miou": "mIoU", "accuracy": "Accuracy", "rmse": "RMSE"}
_CRITERIA = {"magnitude": "by |μ|", "snr": "by |μ|/σ"}


def pruning(runs: Runs) -> list[Figure]:
    """Plot the quality of the pruned model over the fraction of pruned weights, one line per criterion."""
    found = [run.evaluation.get("pruning", {}) for run in runs]
    criteria = in_all(found)
    score, title = next(((key, title) for key, title in _SCORES.items() if key in runs[0].scores), ("", ""))
    if not criteria or not score:
        return []
    figure = pruning_figure({_CRITERIA.get(by, by): found[0][by] for by in criteria}, score)
    lines = [
        mean_line(first.name, first.x, [[point[score] for point in one[by]] for one in found])
        for first, by in zip(figure.series, criteria, strict=True)
    ]
    caption = f"{figure.caption} Evaluated on the same examples as the shifts."
    return [dataclasses.replace(figure, title=f"{title} after pruning", y=title, caption=caption, series=tuple(lines))]


def pruning_figure(curves: Mapping[str, Sequence[Mapping[str, float]]], score: str) -> Figure:
    """Plot a score over the fraction of pruned weights, one line per named curve."""
    return Figure(
        key="pruning",
        title="Pruning",
        kind="lines",
        x="weights set to zero",
        y=score,
        caption="The least important weights of all layers are set to zero, without retraining. If a line stays flat, "
        "the model needs few of its weights.",
        series=tuple(
            Series(name, tuple(point["share"] for point in curve), tuple(point[score] for point in curve))
            for name, curve in curves.items()
        ),
        percent="x" if score == "rmse" else "xy",
    )
