"""Figures of what is inside: classes of a segmentation, the training, and what a method itself has to show."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from leanbayes.evaluation.pruning import pruning_figure
from leanbayes.figures import Figure, Series
from leanbayes.report.figures.lines import Runs, class_name, curves, in_all, mean_line

_SCORES = {"miou": "mIoU", "accuracy": "Accuracy", "rmse": "RMSE"}


def segmentation(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    """Draw the IoU of each class, but for those that are neither there nor predicted."""
    found = curves(runs, "iou")
    if found is None:
        return []
    values = np.asarray(found, float)
    there = ~np.isnan(values).any(0)
    if not there.any():
        return []
    names = [class_name(classes, number) for number, is_there in enumerate(there) if is_there]
    return [
        Figure(
            key="iou",
            title="Intersection over union of each class",
            kind="bars",
            x="class",
            y="IoU",
            caption="Of the pixels that are this class or are taken for it, the share that are both.",
            series=(mean_line("", names, values[:, there]),),
            percent="y",
        )
    ]


_CRITERIA = {"magnitude": "by |μ|", "snr": "by |μ|/σ"}


def pruning(runs: Runs) -> list[Figure]:
    """Draw how well the model does with ever more of its weights set to zero."""
    found = [run.assessment.get("pruning", {}) for run in runs]
    criteria = in_all(found)
    key, title = next(((key, title) for key, title in _SCORES.items() if key in runs[0].scores), ("", ""))
    if not criteria or not key:
        return []
    figure = pruning_figure({_CRITERIA.get(by, by): found[0][by] for by in criteria}, key)
    lines = [
        mean_line(first.name, first.x, [[point[key] for point in one[by]] for one in found])
        for first, by in zip(figure.series, criteria, strict=True)
    ]
    caption = f"{figure.caption} On as many examples as the shifts are tried on."
    return [
        dataclasses.replace(figure, title=f"{title} of what is left", y=title, caption=caption, series=tuple(lines))
    ]


def training(runs: Runs) -> list[Figure]:
    """Draw the likelihood of the held-out data over the epochs."""
    lines = [
        {
            entry["epoch"]: entry["validation"]["nll"]
            for entry in run.record["history"]
            if "nll" in entry.get("validation", {})
        }
        for run in runs
    ]
    epochs = in_all(lines)
    if len(epochs) < 2:
        return []
    values = [[line[epoch] for epoch in epochs] for line in lines]
    return [
        Figure(
            key="history",
            title="Held-out NLL while training",
            kind="lines",
            x="epoch",
            y="NLL of one draw",
            caption="On the part of the training data that is held out, with one draw of the weights an epoch (of an "
            "ensemble, its first member).",
            series=(mean_line("", map(float, epochs), values),),
            log="y" if np.min(values) > 0 else "",
        )
    ]


def of_method(runs: Runs) -> list[Figure]:
    """Take what the method itself draws: where a run is one point, the points of all seeds, else those of the first."""
    every = [{one["key"]: Figure.from_json(one) for one in run.assessment.get("figures", ())} for run in runs]
    return [
        _with_points(first, [own.get(key) for own in every], [f"seed {run.seed}" for run in runs])
        for key, first in every[0].items()
    ]


def _with_points(first: Figure, figures: Sequence[Figure | None], names: Sequence[str]) -> Figure:
    if len(figures) < 2 or first.kind != "points" or any(len(series.x) != 1 for series in first.series):
        return first
    merged = []
    for series in first.series:
        alike = [
            (one, name)
            for figure, name in zip(figures, names, strict=True)
            if figure is not None
            for one in figure.series
            if one.name == series.name and len(one.x) == 1
        ]
        x, y = (tuple(getattr(one, axis)[0] for one, _ in alike) for axis in "xy")
        merged.append(Series(series.name, x, y, labels=tuple(", ".join([*one.labels, name]) for one, name in alike)))
    return dataclasses.replace(first, series=tuple(merged))
