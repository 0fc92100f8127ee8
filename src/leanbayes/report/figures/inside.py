"""Figures of segmentation classes, of training, and of the methods themselves."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.seed_lines import Runs, class_name, curves, in_all, mean_line


def segmentation(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    """Plot the IoU of each class that occurs or is predicted."""
    found = curves(runs, "iou")
    if found is None:
        return []
    values = np.asarray(found, float)
    present = ~np.isnan(values).any(0)
    if not present.any():
        return []
    names = [class_name(classes, number) for number, is_present in enumerate(present) if is_present]
    return [
        Figure(
            key="iou",
            title="Intersection over union per class",
            kind="bars",
            x="class",
            y="IoU",
            caption="Of the pixels that belong to a class or are predicted as it, the share for which both hold.",
            series=(mean_line("", names, values[:, present]),),
            percent="y",
        )
    ]


def training(runs: Runs) -> list[Figure]:
    """Plot the NLL of the held-out data over the epochs."""
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
            title="Held-out NLL during training",
            kind="lines",
            x="epoch",
            y="NLL of one sample",
            caption="On the held-out part of the training data, with one sample of the weights per epoch (for an "
            "ensemble, its first member).",
            series=(mean_line("", map(float, epochs), values),),
            log="y" if np.min(values) > 0 else "",
        )
    ]


def of_method(runs: Runs) -> list[Figure]:
    """Return the method's own figures: the points of all seeds if each run is one point, else those of the first."""
    every = [{one["key"]: Figure.from_json(one) for one in run.evaluation.get("figures", ())} for run in runs]
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
