"""Figures on weight sharing: likelihood over bytes, the density of the weights, the (μ, σ) plane, and confidence."""

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
from panels import COLOURS, beside
from PIL import Image
from sharing_tables import WAYS, best_training
from torch import Tensor
from trained import lines_figure

from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.figures import Figure, Series
from leanbayes.posteriors import SharedPosterior
from leanbayes.posteriors.base import Posterior

WORST, LARGEST = 1.5, 3.0  # over the NLL of the run, and over the largest file: what is drawn as a point
BINS = 120  # of a histogram
POINTS = 3000  # weights of the plane, of each kind
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # ends and lines of a box
CLOSE = (0.3, 0.7), (0.01, 0.99)  # quantiles of μ and of σ between which the plane is seen from near
GREY, BLUE, ORANGE, RED = "#999999", "#0072b2", "#e69f00", "#d55e00"

Boxes = list[dict[str, Any]]


# -- likelihood over bytes ---------------------------------------------------------------------------------------------


def curve_drawing(record: Mapping[str, Any]) -> str:
    """Draw NLL over MB, a line for each number of components, of epochs and precision; sizes of others are told.

    A model whose file is much larger than all of these is a level. Files that are much worse than the run's are left
    out, and counted in the title.
    """
    rows = sorted(best_training(record["results"]), key=lambda row: row["bytes"])
    figures = []
    for way, name in WAYS.items():
        there = [row for row in rows if way in row["test"]]
        if there:
            figures.append(of_sizes(way, name.figure, there, record["compared"]))
    sizes = ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in record["sizes"].items())
    return beside(f"{record['model']['name']} on {record['source']['name']}: NLL over MB ({sizes})", figures, 2)


def of_sizes(way: str, title: str, rows: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> Figure:
    """Make a figure over megabytes."""

    def score(row: Mapping[str, Any]) -> float:
        return row["test"].get(way, row["test"]["draws"])["nll"]

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
    made = lines_figure(way, "test NLL", "MB on disk", series, "Left and low is good.")
    return dataclasses.replace(made, title=f"Test NLL, {title}{more}")


# -- density ----------------------------------------------------------------------------------------------------------


def active(before: Posterior) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of the weights that are not surely zero, with their μ and σ."""
    mean, std = before.mean().detach().cpu(), before.variance().detach().sqrt().cpu()
    index = ((mean != 0) | (std != 0)).nonzero()[:, 0]
    return index, mean[index], std[index]


def density(before: Posterior, after: Posterior) -> dict[str, list[float]]:
    """Count the weights by their means, before they share and after; those that are surely zero are left out."""
    index, mean, _ = active(before)
    found = after.mean().detach().cpu()[index]
    low, high = (float(bound(torch.cat([mean, found]))) for bound in (torch.min, torch.max))
    return {
        "edges": torch.linspace(low, high, BINS + 1, dtype=torch.float64).tolist(),
        "before": torch.histc(mean.double(), BINS, low, high).tolist(),
        "after": torch.histc(found.double(), BINS, low, high).tolist(),
    }


def density_drawing(histogram: Mapping[str, Sequence[float]]) -> str:
    """Draw both histograms by the logarithm; an empty bin has no point."""
    edges = histogram["edges"]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    series = []
    for name in ("before", "after"):
        there = [(x, y) for x, y in zip(middles, histogram[name], strict=True) if y]
        series.append(Series(name, *map(tuple, zip(*there, strict=True))))
    caption = "Weights that are not surely zero."
    return beside("Density of the weights", [lines_figure("density", "weights", "μ", series, caption, log="y")], 1)


# -- the plane --------------------------------------------------------------------------------------------------------


def plane(before: Posterior, after: Any, seed: int, path: Path) -> None:
    """Draw weights by their own μ and σ, with the centres, and from near with ellipses of 1 and 2 std."""
    assert isinstance(after, SharedPosterior)
    index, mean, std = active(before)
    points, labels = torch.stack([mean, std], 1).double(), after.labels.cpu().long()[index]
    centres = torch.stack([after.mu, after.codes_std()], 1).detach().double().cpu()
    counts = torch.bincount(labels, minlength=len(centres) + 1)[:-1]
    blended = torch.zeros(after.layout.numel, dtype=torch.bool).index_fill_(0, after.blended.cpu(), True)[index]
    outlier = (counts[labels.clamp_max(len(counts) - 1)] == 1) & ~blended
    kinds = {"weights": (~(outlier | blended), GREY), "blended": (blended, ORANGE), "outliers": (outlier, RED)}
    generator = torch.Generator().manual_seed(seed)
    sheet = Sheet(figsize=(10, 4.6), layout="constrained")
    whole, near = sheet.subplots(1, 2)
    for axes in (whole, near):
        for name, (kind, colour) in kinds.items():
            some = kind.nonzero()[:, 0]
            some = some[torch.randperm(len(some), generator=generator)[:POINTS]]
            axes.plot(*points[some].T.numpy(), ".", color=colour, markersize=2, label=f"{name} ({int(kind.sum()):,})")
        axes.set(xlabel="μ", ylabel="σ")
    common = counts > 1
    whole.plot(*centres[common].T.numpy(), "+", color=BLUE, markersize=4, label=f"Gaussians ({int(common.sum()):,})")
    whole.legend(loc="best", markerscale=2, fontsize=8)
    whole.set_title("all weights", fontsize=10)
    ellipses(near, points[~blended], labels[~blended], centres, common)
    bounds = [torch.quantile(sample(points[:, axis]), torch.tensor(ends).double()) for axis, ends in enumerate(CLOSE)]
    near.set_xlim(*bounds[0].tolist())
    near.set_ylim(*bounds[1].tolist())
    near.locator_params(axis="x", nbins=5)
    near.set_title("from near: Gaussians with 1 std (solid) and 2 std (dotted)", fontsize=10)
    write(sheet, path)


def sample(values: Tensor, most: int = 100_000) -> Tensor:
    """Thin values out, evenly, for quantiles of millions."""
    return values[:: max(1, len(values) // most)]


def ellipses(axes: Axes, points: Tensor, labels: Tensor, centres: Tensor, common: Tensor) -> None:
    """Draw what the members of each code spread over, around its centre."""
    count = len(centres)
    kept = labels < count
    points, labels = points[kept], labels[kept]
    apart = points - centres[labels]
    spread = torch.zeros(count, 2, 2, dtype=torch.float64).index_add_(0, labels, apart[:, :, None] * apart[:, None])
    spread /= torch.bincount(labels, minlength=count).clamp_min(1)[:, None, None]
    for place in common.nonzero()[:, 0].tolist():
        values, vectors = torch.linalg.eigh(spread[place])
        angle = torch.rad2deg(torch.atan2(vectors[1, 1], vectors[0, 1])).item()
        small, large = values.clamp_min(0).sqrt().tolist()
        for times, style in ((1, "-"), (2, ":")):
            width, height = 2 * times * large, 2 * times * small
            axes.add_patch(
                Ellipse(
                    tuple(centres[place].tolist()), width, height, angle=angle, fill=False, color=BLUE, ls=style, lw=0.7
                )
            )


# -- confidence -------------------------------------------------------------------------------------------------------


def boxes(found: ClassOutcome, names: Sequence[str]) -> Boxes:
    """Return mean and quantiles of the confidence, for the examples of each true class."""
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
    """Draw a box for each class and model, with the mean above it."""
    sheet = Sheet(figsize=(10, 4), layout="constrained")
    axes = sheet.subplots()
    for number, ((name, found), colour) in enumerate(zip(confidences.items(), (GREY, BLUE), strict=True)):
        places = [place + 0.4 * number - 0.2 for place in range(len(found))]
        keys = ("whislo", "q1", "med", "q3", "whishi")
        stats = [{**dict(zip(keys, one["quantiles"], strict=True)), "fliers": []} for one in found]
        style = {"color": colour}
        axes.bxp(stats, positions=places, widths=0.3, boxprops=style, whiskerprops=style, capprops=style)
        axes.plot([], [], color=colour, label=name)
        for place, one in zip(places, found, strict=True):
            axes.text(place, 1.01, f"{one['mean']:.2f}", ha="center", fontsize=7, color=colour)
    names = [one["class"] for one in found]
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="confidence", ylim=(None, 1.06))
    sheet.legend(loc="outside upper right", ncols=2, fontsize=8)
    write(sheet, path)


def write(sheet: Sheet, path: Path) -> None:
    """Write a PNG file of few colours."""
    buffer = io.BytesIO()
    sheet.savefig(buffer, format="png", dpi=110)
    Image.open(buffer).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
