"""The temperature of the mean network, or of samples, that is best on held-out labels."""

import math
from collections.abc import Callable, Iterable, Iterator
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
    """Return the T with the lowest NLL of logits / T; it is convex in 1/T, so it has one minimum in log T."""
    return _lowest(lambda t: F.cross_entropy(logits / t, labels, ignore_index=ignore_index).item())


def best_temperature_of_samples(logits: Tensor, labels: Tensor) -> float:
    """Return the T with the lowest NLL of the mean of softmax(logits / T) over samples, the first dimension."""
    return _lowest(lambda t: F.nll_loss((logits / t).softmax(-1).mean(0).log(), labels).item())


def _lowest(nll: Callable[[float], float]) -> float:
    """Minimize over T by golden section in log T."""
    golden, low, high = (math.sqrt(5) - 1) / 2, math.log(0.01), math.log(100)
    while high - low > 1e-5:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if nll(math.exp(left)) < nll(math.exp(right)) else (left, high)
    return math.exp((low + high) / 2)
