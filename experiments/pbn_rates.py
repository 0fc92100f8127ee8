"""PBN over rates: scores, rotated images, OOD images, and the std map of the first layer."""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from panels import heat, side_by_side
from torch import Tensor
from trained_runs import (
    COSTS,
    NAMES,
    SCORES,
    Results,
    about,
    banded,
    by_name,
    compared,
    in_order,
    lines_figure,
    most_sensitive,
    opened,
)

import leanbayes as lb
from leanbayes.cli.evaluations import evaluation_of
from leanbayes.core import config
from leanbayes.data import Data
from leanbayes.report.figure import Figure
from leanbayes.report.figures.seed_lines import mean_line

FEW = (0.01, 0.05, 0.1, 0.5)  # rates in figures with one line per method


def rates(args: argparse.Namespace) -> Results:
    """Compare rates: scores, rotated images, OOD images, and the std map of the first layer."""
    results, maps = [], []
    for run, data in opened(args):
        evaluated = evaluation_of(run, data, None, root=args.root, shown=False)
        found, metrics = evaluated.evaluation, evaluated.metrics()
        stds = first_layer(run.model, data)
        rotated = [one for one in found["shifts"] if one["family"] in ("none", "rotation")]
        edges, right, wrong = (found["curves"][f"entropy_{name}"] for name in ("edges", "right", "wrong"))
        result = about(run) | {
            "scores": {key: metrics[key] for key in (*SCORES, "mutual_information")},
            "costs": {key: metrics[key] for key in COSTS},
            "rotation": [
                {"angle": one["level"], **{key: one["scores"][key] for key in ("accuracy", "nll", "entropy")}}
                for one in rotated
            ],
            "entropy": [a + b for a, b in zip(right, wrong, strict=True)],
            "ood": {
                name: {"auroc": one["by"]["entropy"]["auroc"], "entropy": one["entropy"]}
                for name, one in found["ood"].items()
            },
            "first_layer": middle_of(stds),
        }
        results.append(result)
        if stds is not None and result["seed"] == results[0]["seed"] and result["first_layer"]["random"]:
            top = stds.mean(0).max().item()
            maps.append((in_order(result), heat(f"{result['name']}: {top:.2g}", stds.mean(0), top, times=6)))
    results.sort(key=in_order)
    drawings = {
        "rates": side_by_side("Scores over the fraction of Bayesian weights", rate_figures(results), 2),
        "rotation": side_by_side("Rotated digits", rotation_figures(results), 2),
        **{f"entropy-{name}": entropy_drawing(results, edges, name) for name in results[0]["ood"]},
    }
    images = [image for _, image in sorted(maps, key=lambda one: one[0])]
    rows = [images[first : first + 4] for first in range(0, len(images), 4)]
    return Results(compared(results) | {"entropy_edges": edges}, drawings, {"first-layer": rows} if rows else {})


def first_layer(bnn: lb.BayesianModel, data: Data) -> Tensor | None:
    """Return σ of the first layer (outputs, height, width); None if it does not take all pixels of a gray image."""
    slots = list(bnn.layout)
    if not slots or data.input_shape[0] != 1 or slots[0].shape[-1] != math.prod(data.input_shape):
        return None
    std = bnn.layout.split(bnn.posterior.variance().detach().sqrt())[0]
    return std.cpu().view(-1, *data.input_shape[1:])


def middle_of(std: Tensor | None) -> dict[str, float]:
    """Return the Bayesian fraction of a layer, and the fraction of it in the central quarter of the image."""
    if std is None:
        return {"random": 0.0}
    random, (high, wide) = std > 0, std.shape[1:]
    middle = random[:, high // 4 : high - high // 4, wide // 4 : wide - wide // 4]
    share = middle.sum() / random.sum().clamp_min(1)
    return {"random": random.float().mean().item(), "in_the_middle": share.item(), "mean_std": std.mean().item()}


def rate_figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return figures of the scores over the rate; methods without a rate are horizontal lines."""
    methods = [(config.decode(one["method"]), one) for one in results]
    partial = [(m, one) for m, one in methods if isinstance(m, lb.PBN)]
    random = [(m.rate, one) for m, one in partial if not most_sensitive(m)]
    chosen = [(m.rate, one) for m, one in partial if most_sensitive(m)]
    whole = [(1.0, one) for m, one in methods if isinstance(m, lb.MeanField)]
    lines = {"the most sensitive weights": chosen + whole, "random weights": random + whole if random else []}
    level = by_name(one for m, one in methods if not isinstance(m, (lb.PBN, lb.MeanField)))
    figures = []
    for score in SCORES:
        series = []
        for name, points in lines.items():
            places = sorted({rate for rate, _ in points})
            values = [[one["scores"][score] for rate, one in points if rate == place] for place in places]
            if places:
                series.append(banded(name, places, values))
        ends = sorted({rate for points in lines.values() for rate, _ in points})
        for name, runs in level.items():
            values = [[one["scores"][score] for one in runs]] * 2
            series.append(banded(name, [ends[0], ends[-1]], values))
        percent = "xy" if score == "accuracy" else "x"
        figures.append(lines_figure(score, NAMES[score], "Bayesian weights", series, log="x", percent=percent))
    return figures


def few(results: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Leave out some rates and random choices, to have fewer lines."""
    kept = by_name(results)
    return {
        name: runs
        for name, runs in kept.items()
        if not name.startswith("PBN") or (name.count(",") == 0 and runs[0]["rate"] in FEW)
    }


def rotation_figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return figures of accuracy and entropy over the angle."""
    angles = [one["angle"] for one in results[0]["rotation"]]
    figures = []
    for score in ("accuracy", "entropy"):
        series = [
            mean_line(name, angles, [[one[score] for one in run["rotation"]] for run in runs])
            for name, runs in few(results).items()
        ]
        percent = "y" if score == "accuracy" else ""
        figures.append(lines_figure(score, NAMES[score], "degrees", series, percent=percent))
    return figures


def entropy_drawing(results: Sequence[dict[str, Any]], edges: Sequence[float], other: str) -> str:
    """Draw the fraction of test images and of OOD images above each entropy."""
    figures = []
    for kind in ("test images", other):
        series = []
        for name, runs in few(results).items():
            counts = [run["entropy"] if kind == "test images" else run["ood"][other]["entropy"] for run in runs]
            series.append(mean_line(name, edges[:-1], [above(one) for one in counts]))
        y = "fraction with higher entropy"
        figures.append(dataclasses.replace(lines_figure(kind, y, "entropy", series, percent="y"), title=kind))
    return side_by_side(f"Entropy of test images and of {other}", figures, 2, marks=False)


def above(counts: Sequence[int]) -> list[float]:
    """Return the fraction of all counts in each bin of a histogram or above it."""
    return [sum(counts[place:]) / sum(counts) for place in range(len(counts))]
