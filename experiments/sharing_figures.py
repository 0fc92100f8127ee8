"""Figures on weight sharing: NLL over file size, density of the weights, (μ, σ) plane, and confidence."""

import dataclasses
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.patches import Ellipse
from panels import COLORS, side_by_side
from PIL import Image
from sharing_tables import WAYS, best_training
from torch import Tensor
from trained_runs import lines_figure

from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.posteriors import SharedPosterior
from leanbayes.posteriors.base import Posterior
from leanbayes.report.figure import Figure, Series

WORST, LARGEST = 1.5, 3.0  # limits for points, relative to the NLL of the run and to the largest file
BINS = 120  # of the histogram
POINTS = 3000  # of the plane, per kind of weight
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # quantiles of a box
CLOSE = (0.3, 0.7), (0.01, 0.99)  # quantiles of μ and of σ that bound the close-up
GRAY, BLUE, ORANGE, RED = "#999999", "#0072b2", "#e69f00", "#d55e00"

Boxes = list[dict[str, Any]]


# -- NLL over file size -----------------------------------------------------------------------------------------------


def curve_drawing(record: Mapping[str, Any]) -> str:
    """Draw NLL over MB, one line per number of components, epochs and precision.

    A model with a much larger file is a horizontal line. Files with a much higher NLL than the run are left out, and
    counted in the title.
    """
    rows = sorted(best_training(record["results"]), key=lambda row: row["bytes"])
    figures = []
    for way, name in WAYS.items():
        scored = [row for row in rows if way in row["test"]]
        if scored:
            figures.append(of_sizes(way, name.figure, scored, record["compared"]))
    sizes = ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in record["sizes"].items())
    return side_by_side(f"{record['model']['name']} on {record['source']['name']}: NLL over MB ({sizes})", figures, 2)


def of_sizes(way: str, title: str, rows: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a figure of NLL over megabytes."""

    def score(row: Mapping[str, Any]) -> float:
        return row["test"].get(way, row["test"]["samples"])["nll"]

    shown = [row for row in rows if score(row) <= WORST * score(compared[0])]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in shown:
        trained = f"{row['epochs']} epochs of final training" if row["epochs"] else "no final training"
        lines.setdefault(f"{row['components']} components, {trained}, {row['values']}", []).append(row)
    places = [row["bytes"] / 1e6 for row in shown or rows]
    small = [row for row in compared if row["bytes"] / 1e6 <= LARGEST * max(places)]
    series = [
        Series(name, tuple(row["bytes"] / 1e6 for row in of), tuple(map(score, of)))
        for name, of in [*lines.items(), *((row["name"], [row]) for row in small)]
    ]
    series += [
        Series(f"{row['name']}, {row['bytes'] / 1e6:.3g} MB", (min(places), max(places)), (score(row),) * 2)
        for row in compared
        if row not in small
    ]
    left_out = len(rows) - len(shown)
    more = f", without {left_out} above {WORST * score(compared[0]):.2f}" if left_out else ""
    made = lines_figure(way, "test NLL", "MB on disk", series, "Lower left is better.")
    return dataclasses.replace(made, title=f"Test NLL, {title}{more}")


# -- density ----------------------------------------------------------------------------------------------------------


def active(before: Posterior) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the weights that are not exactly zero, with their μ and σ."""
    mean, std = before.mean().detach().cpu(), before.variance().detach().sqrt().cpu()
    index = ((mean != 0) | (std != 0)).nonzero()[:, 0]
    return index, mean[index], std[index]


def density(before: Posterior, after: Posterior) -> dict[str, list[float]]:
    """Return histograms of the weight means before and after sharing, without weights that are exactly zero."""
    index, mean, _ = active(before)
    found = after.mean().detach().cpu()[index]
    low, high = (float(bound(torch.cat([mean, found]))) for bound in (torch.min, torch.max))
    return {
        "edges": torch.linspace(low, high, BINS + 1, dtype=torch.float64).tolist(),
        "before": torch.histc(mean.double(), BINS, low, high).tolist(),
        "after": torch.histc(found.double(), BINS, low, high).tolist(),
    }


def density_drawing(histogram: Mapping[str, Sequence[float]]) -> str:
    """Draw both histograms with a logarithmic scale; an empty bin has no point."""
    edges = histogram["edges"]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    series = []
    for name in ("before", "after"):
        filled = [(x, y) for x, y in zip(middles, histogram[name], strict=True) if y]
        series.append(Series(name, *map(tuple, zip(*filled, strict=True))))
    caption = "Weights that are not exactly zero."
    return side_by_side(
        "Density of the weights", [lines_figure("density", "weights", "μ", series, caption, log="y")], 1
    )


# -- plane ------------------------------------------------------------------------------------------------------------


def plane(before: Posterior, after: Any, seed: int, path: Path) -> None:
    """Draw the weights and cluster centers in the (μ, σ) plane, and a close-up with ellipses of 1 and 2 std."""
    assert isinstance(after, SharedPosterior)
    index, mean, std = active(before)
    points, labels = torch.stack([mean, std], 1).double(), after.labels.cpu().long()[index]
    centers = torch.stack([after.mu, after.codes_std()], 1).detach().double().cpu()
    counts = torch.bincount(labels, minlength=len(centers) + 1)[:-1]
    blended = torch.zeros(after.layout.numel, dtype=torch.bool).index_fill_(0, after.blended.cpu(), True)[index]
    outlier = (counts[labels.clamp_max(len(counts) - 1)] == 1) & ~blended
    kinds = {"weights": (~(outlier | blended), GRAY), "blended": (blended, ORANGE), "outliers": (outlier, RED)}
    generator = torch.Generator().manual_seed(seed)
    sheet = Sheet(figsize=(10, 4.6), layout="constrained")
    whole, near = sheet.subplots(1, 2)
    for axes in (whole, near):
        for name, (kind, color) in kinds.items():
            some = kind.nonzero()[:, 0]
            some = some[torch.randperm(len(some), generator=generator)[:POINTS]]
            axes.plot(*points[some].T.numpy(), ".", color=color, markersize=2, label=f"{name} ({int(kind.sum()):,})")
        axes.set(xlabel="μ", ylabel="σ")
    common = counts > 1
    whole.plot(*centers[common].T.numpy(), "+", color=BLUE, markersize=4, label=f"Gaussians ({int(common.sum()):,})")
    whole.legend(loc="best", markerscale=2, fontsize=8)
    whole.set_title("all weights", fontsize=10)
    ellipses(near, points[~blended], labels[~blended], centers, common)
    bounds = [torch.quantile(sample(points[:, axis]), torch.tensor(ends).double()) for axis, ends in enumerate(CLOSE)]
    near.set_xlim(*bounds[0].tolist())
    near.set_ylim(*bounds[1].tolist())
    near.locator_params(axis="x", nbins=5)
    near.set_title("close-up: Gaussians with 1 std (solid) and 2 std (dotted)", fontsize=10)
    write(sheet, path)


def sample(values: Tensor, most: int = 100_000) -> Tensor:
    """Subsample values evenly, to compute quantiles of millions."""
    return values[:: max(1, len(values) // most)]


def ellipses(axes: Axes, points: Tensor, labels: Tensor, centers: Tensor, common: Tensor) -> None:
    """Draw the covariance of the members of each code around its center."""
    count = len(centers)
    kept = labels < count
    points, labels = points[kept], labels[kept]
    offsets = points - centers[labels]
    covariance = torch.zeros(count, 2, 2, dtype=torch.float64).index_add_(
        0, labels, offsets[:, :, None] * offsets[:, None]
    )
    covariance /= torch.bincount(labels, minlength=count).clamp_min(1)[:, None, None]
    for place in common.nonzero()[:, 0].tolist():
        values, vectors = torch.linalg.eigh(covariance[place])
        angle = torch.rad2deg(torch.atan2(vectors[1, 1], vectors[0, 1])).item()
        small, large = values.clamp_min(0).sqrt().tolist()
        for times, style in ((1, "-"), (2, ":")):
            width, height = 2 * times * large, 2 * times * small
            axes.add_patch(
                Ellipse(
                    tuple(centers[place].tolist()), width, height, angle=angle, fill=False, color=BLUE, ls=style, lw=0.7
                )
            )


# -- confidence -------------------------------------------------------------------------------------------------------


def boxes(found: ClassOutcome, names: Sequence[str]) -> Boxes:
    """Return mean and quantiles of the confidence per true class."""
    result = []
    for number, name in enumerate(names):
        values = found.confidence[found.labels == number].double().cpu()
        if len(values):
            quantiles = torch.quantile(values, torch.tensor(SHARES, dtype=torch.float64)).tolist()
            result.append(
                {"class": name, "examples": len(values), "mean": values.mean().item(), "quantiles": quantiles}
            )
    return result


def draw_boxes(confidences: Mapping[str, Boxes], path: Path) -> None:
    """Draw one box per class and model, with the mean above it."""
    sheet = Sheet(figsize=(10, 4), layout="constrained")
    axes = sheet.subplots()
    for number, ((name, found), color) in enumerate(zip(confidences.items(), (GRAY, BLUE), strict=True)):
        places = [place + 0.4 * number - 0.2 for place in range(len(found))]
        keys = ("whislo", "q1", "med", "q3", "whishi")
        stats = [{**dict(zip(keys, one["quantiles"], strict=True)), "fliers": []} for one in found]
        style = {"color": color}
        axes.bxp(stats, positions=places, widths=0.3, boxprops=style, whiskerprops=style, capprops=style)
        axes.plot([], [], color=color, label=name)
        for place, one in zip(places, found, strict=True):
            axes.text(place, 1.01, f"{one['mean']:.2f}", ha="center", fontsize=7, color=color)
    names = [one["class"] for one in found]
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="confidence", ylim=(None, 1.06))
    sheet.legend(loc="outside upper right", ncols=2, fontsize=8)
    write(sheet, path)


def write(sheet: Sheet, path: Path) -> None:
    """Write a PNG file with few colors."""
    buffer = io.BytesIO()
    sheet.savefig(buffer, format="png", dpi=110)
    Image.open(buffer).convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
