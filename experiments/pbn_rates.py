"""PBN over rates: scores, rotated images, images of another kind, and where the spreads of the first layer lie."""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from panels import beside, heat
from torch import Tensor
from trained import (
    COSTS,
    NAMES,
    SCORES,
    Found,
    about,
    banded,
    by_name,
    chosen_well,
    compared,
    in_order,
    lines_figure,
    opened,
)

import leanbayes as lb
from leanbayes import config
from leanbayes.cli.looking import look_at
from leanbayes.data import Data
from leanbayes.figures import Figure
from leanbayes.report.figures.lines import mean_line

FEW = (0.01, 0.05, 0.1, 0.5)  # rates of the figures that have a line a method


def rates(args: argparse.Namespace) -> Found:
    """Compare rates: scores, rotated images, images of another kind, and where the spreads of the first layer lie."""
    results, maps = [], []
    for run, data in opened(args):
        seen = look_at(run, data, None, root=args.root, shown=False)
        found, figures = seen.assessment, seen.figures()
        spread = first_layer(run.model, data)
        turned = [one for one in found["shifts"] if one["family"] in ("none", "rotation")]
        edges, right, wrong = (found["curves"][f"entropy_{name}"] for name in ("edges", "right", "wrong"))
        result = about(run) | {
            "scores": {key: figures[key] for key in (*SCORES, "mutual_information")},
            "costs": {key: figures[key] for key in COSTS},
            "rotation": [
                {"angle": one["level"], **{key: one["scores"][key] for key in ("accuracy", "nll", "entropy")}}
                for one in turned
            ],
            "entropy": [a + b for a, b in zip(right, wrong, strict=True)],
            "ood": {
                name: {"auroc": one["by"]["entropy"]["auroc"], "entropy": one["entropy"]}
                for name, one in found["ood"].items()
            },
            "first_layer": middle_of(spread),
        }
        results.append(result)
        if spread is not None and result["seed"] == results[0]["seed"] and result["first_layer"]["random"]:
            top = spread.mean(0).max().item()
            maps.append((in_order(result), heat(f"{result['name']}: {top:.2g}", spread.mean(0), top, times=6)))
    results.sort(key=in_order)
    drawings = {
        "rates": beside("Over the share of Bayesian weights", rate_figures(results), 2),
        "rotation": beside("Turned digits", rotation_figures(results), 2),
        **{f"entropy-{name}": entropy_drawing(results, edges, name) for name in results[0]["ood"]},
    }
    pictures = [picture for _, picture in sorted(maps, key=lambda one: one[0])]
    rows = [pictures[first : first + 4] for first in range(0, len(pictures), 4)]
    return Found(compared(results) | {"entropy_edges": edges}, drawings, {"first-layer": rows} if rows else {})


def first_layer(bnn: lb.BayesianModel, data: Data) -> Tensor | None:
    """Return σ of the weights that see the pixels (outputs, height, width); None where no layer sees all at once."""
    slots = list(bnn.layout)
    if not slots or data.input_shape[0] != 1 or slots[0].shape[-1] != math.prod(data.input_shape):
        return None
    std = bnn.layout.split(bnn.posterior.variance().detach().sqrt())[0]
    return std.cpu().view(-1, *data.input_shape[1:])


def middle_of(std: Tensor | None) -> dict[str, float]:
    """Tell how many weights of a layer are Bayesian, and which share of them sees the middle quarter of the image."""
    if std is None:
        return {"random": 0.0}
    random, (high, wide) = std > 0, std.shape[1:]
    middle = random[:, high // 4 : high - high // 4, wide // 4 : wide - wide // 4]
    share = middle.sum() / random.sum().clamp_min(1)
    return {"random": random.float().mean().item(), "in_the_middle": share.item(), "mean_std": std.mean().item()}


def rate_figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Draw scores over the rate, with methods that have none as level lines."""
    methods = [(config.decode(one["method"]), one) for one in results]
    partial = [(m, one) for m, one in methods if isinstance(m, lb.PBN)]
    random = [(m.rate, one) for m, one in partial if not chosen_well(m)]
    chosen = [(m.rate, one) for m, one in partial if chosen_well(m)]
    whole = [(1.0, one) for m, one in methods if isinstance(m, lb.MeanField)]
    lines = {"the most sensitive weights": chosen + whole, "weights at random": random + whole if random else []}
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
    """Leave out the rates that would make too many lines, and the choice at random."""
    kept = by_name(results)
    return {
        name: runs
        for name, runs in kept.items()
        if not name.startswith("PBN") or (name.count(",") == 0 and runs[0]["rate"] in FEW)
    }


def rotation_figures(results: Sequence[dict[str, Any]]) -> list[Figure]:
    """Draw accuracy and entropy over the angle."""
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
    """Draw which share of the test images, and of images of another kind, has more than some entropy."""
    figures = []
    for kind in ("test images", other):
        series = []
        for name, runs in few(results).items():
            counts = [run["entropy"] if kind == "test images" else run["ood"][other]["entropy"] for run in runs]
            series.append(mean_line(name, edges[:-1], [above(one) for one in counts]))
        y = "share with more entropy"
        figures.append(dataclasses.replace(lines_figure(kind, y, "entropy", series, percent="y"), title=kind))
    return beside(f"Entropy of test images and of {other}", figures, 2, marks=False)


def above(counts: Sequence[int]) -> list[float]:
    """Return which share of all lies in each bin of a histogram or beyond it."""
    return [sum(counts[place:]) / sum(counts) for place in range(len(counts))]
