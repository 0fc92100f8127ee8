"""Figures of a model's weights and of its size on disk."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leanbayes.model.bayesian import BayesianModel
from leanbayes.report.figure import Figure, Series

_POINTS = 2000  # of the scatter plot of the weights


def model_figures(bnn: BayesianModel, scores: Mapping[str, float], costs: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a trained model: its size against its NLL, and its weights.

    Args:
        bnn: The model.
        scores: Its scores on the test data.
        costs: The costs of its training, or of the model itself, such as file_bytes.
    """
    return [*size_against_nll(scores, costs), *weights(bnn)]


def size_against_nll(scores: Mapping[str, float], costs: Mapping[str, Any]) -> list[Figure]:
    """Plot the size of a model on disk against its NLL."""
    if "file_bytes" not in costs or "nll" not in scores:
        return []
    size, nll = costs["file_bytes"] / 1e6, scores["nll"]
    return [
        Figure(
            key="size-nll",
            title="Size against NLL",
            kind="points",
            x="MB on disk",
            y="test NLL",
            caption="Size on disk, against the quality of the predictions. Smaller (left) and lower are better.",
            series=(Series("", (size,), (nll,)),),
            log="x",
        )
    ]


@torch.no_grad()
def weights(bnn: BayesianModel) -> list[Figure]:
    """Plot the weights in the (μ, σ) plane, and the fractions of each layer that are Bayesian and nonzero."""
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
            y="std σ",
            caption=f"Each point is a weight ({shown}). Weights with μ near 0 and a large σ matter little to the "
            "predictions: they can be pruned or shared.",
            series=(Series("", tuple(mean[some].tolist()), tuple(std[some].tolist())),),
            log="y",
            apart=True,
        )
    ]


def _shares(bnn: BayesianModel, mean: Tensor, std: Tensor) -> Figure:
    names, random, used = [], [], []
    parts = zip(bnn.layout, bnn.layout.split(mean), bnn.layout.split(std), strict=True)
    for slot, means, stds in parts:
        names.append(slot.name)
        random.append((stds > 0).float().mean().item())
        used.append(((stds > 0) | (means != 0)).float().mean().item())
    return Figure(
        key="layer-shares",
        title="Density and Bayesian share per layer",
        kind="bars",
        x="layer",
        y="share of its weights",
        caption="Density is the share of the weights that are not exactly zero. The Bayesian share is the share of "
        "the weights with σ > 0.",
        series=(Series("density", tuple(names), tuple(used)), Series("Bayesian", tuple(names), tuple(random))),
        percent="y",
    )
