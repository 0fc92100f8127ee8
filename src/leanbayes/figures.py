"""Figures as plain data: what is to be seen, not how it is drawn. JSON carries them, and the report draws them.

Those of weights and sizes are here too, for the methods to choose from.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from leanbayes.bayesian import BayesianModel

Kind = Literal["lines", "points", "bars"]
_POINTS = 2000  # of a cloud of weights


@dataclass(frozen=True)
class Series:
    """One line, one cloud of points, or one row of bars.

    name: "" where the figure shows one thing of a method; else what this one is, such as "right" or "wrong".
    x: numbers, or names for bars. low and high: a band around y. labels: what is told of each point.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("x", "y", "low", "high", "labels"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != len(self.x) and (values or name == "y"):
                raise ValueError(f"{name} has {len(values)} entries, and x has {len(self.x)}")


@dataclass(frozen=True)
class Figure:
    """A figure of one method; those of several methods with the same `key` are drawn as one.

    caption: how to read it, in a sentence or two. x and y: the axes' names. apart: each method gets a panel of its own,
    because they would hide each other. diagonal: y = x is drawn for comparison. percent: which axes are shares of 1.
    """

    key: str
    title: str
    kind: Kind
    x: str
    y: str
    caption: str
    series: tuple[Series, ...]
    log: str = ""  # which axes are logarithmic: "", "x", "y" or "xy"
    percent: str = ""  # which axes are shown in percent
    apart: bool = False
    diagonal: bool = False

    def to_json(self) -> dict[str, Any]:
        """Describe the figure in plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Figure":
        """Rebuild what `to_json` described."""
        return cls(**{**values, "series": tuple(Series(**one) for one in values["series"])})


def size_against_nll(scores: Mapping[str, float], costs: Mapping[str, Any], name: str = "") -> list[Figure]:
    """Place a model by its bytes on disk and its likelihood; one that comes in several sizes gives several points."""
    if "file_bytes" not in costs or "nll" not in scores:
        return []
    size, nll = costs["file_bytes"] / 1e6, scores["nll"]
    return [
        Figure(
            key="size-nll",
            title="Size against likelihood",
            kind="points",
            x="MB on disk",
            y="test NLL",
            caption="What a model takes on disk, and how well it predicts: left and low is good.",
            series=(Series(name, (size,), (nll,)),),
            log="x",
        )
    ]


@torch.no_grad()
def weights(bnn: "BayesianModel") -> list[Figure]:
    """Show where the weights lie in the (μ, σ) plane, and which share of each layer is Bayesian and not zero."""
    posterior = bnn.posterior
    if not bnn.method.bayesian_weights or not bnn.layout.numel:
        return []
    mean, std = posterior.mean().detach().float().cpu(), posterior.variance().detach().float().sqrt().cpu()
    return [*_plane(mean, std), _shares(bnn, mean, std)]


def _plane(mean: Tensor, std: Tensor) -> list[Figure]:
    random = torch.nonzero(std > 0)[:, 0]
    if not len(random):
        return []
    order = torch.randperm(len(random), generator=torch.Generator().manual_seed(0), device="cpu")
    some = random[order[:_POINTS]]
    shown = f"{len(some):,} of {len(random):,} weights" if len(some) < len(random) else f"all {len(random):,} weights"
    return [
        Figure(
            key="weight-plane",
            title="Weights in the (μ, σ) plane",
            kind="points",
            x="mean μ",
            y="spread σ",
            caption=f"Each point is a weight ({shown}). Points near μ = 0 with a large σ are weights that the "
            "data do not need: they may be left out, or shared.",
            series=(Series("", tuple(mean[some].tolist()), tuple(std[some].tolist())),),
            log="y",
            apart=True,
        )
    ]


def _shares(bnn: "BayesianModel", mean: Tensor, std: Tensor) -> Figure:
    names, random, used = [], [], []
    parts = zip(bnn.layout, bnn.layout.split(mean), bnn.layout.split(std), strict=True)
    for slot, means, stds in parts:
        names.append(slot.name)
        random.append((stds > 0).float().mean().item())
        used.append(((stds > 0) | (means != 0)).float().mean().item())
    return Figure(
        key="layer-shares",
        title="Density and Bayesian share of each layer",
        kind="bars",
        x="layer",
        y="share of its weights",
        caption="Density is the share of the weights that are not exactly zero; the Bayesian share is that of the "
        "weights with a spread of their own.",
        series=(Series("density", tuple(names), tuple(used)), Series("Bayesian", tuple(names), tuple(random))),
        percent="y",
    )
