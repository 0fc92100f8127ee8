"""The temperature of the mean network that is best on held-out labels."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import leanbayes as lb

PIXELS = 4096  # maximum per dense image


def mean_logits(bnn: lb.BayesianModel, batches: Iterable[tuple[Any, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs of the mean network with the labels."""
    for x, y in batches:
        yield bnn.predict(x, rule="mean", keep_outputs=True).outputs[0], y


def thinned(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (..., classes) and labels with one row per position; dense images are subsampled."""
    logits, y = (
        logits.flatten(1, -2) if logits.dim() > 2 else logits[:, None],
        y.flatten(1) if y.dim() > 1 else y[:, None],
    )
    step = -(-y.shape[1] // PIXELS) | 1  # odd, so that it covers all columns of images of common widths
    return logits[:, ::step].flatten(0, 1).double(), y[:, ::step].flatten()


def best_temperature(logits: Tensor, labels: Tensor, ignore_index: int) -> float:
    """Minimize the NLL over T by golden section; it is convex in 1/T, so it has one minimum in log T."""

    def nll(log_temperature: float) -> float:
        return F.cross_entropy(logits / math.exp(log_temperature), labels, ignore_index=ignore_index).item()

    golden, low, high = (math.sqrt(5) - 1) / 2, math.log(0.01), math.log(100)
    while high - low > 1e-5:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if nll(left) < nll(right) else (left, high)
    return math.exp((low + high) / 2)
