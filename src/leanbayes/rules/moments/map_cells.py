"""Cells of maps, in coherent passes: means over parts of a map, and where each probe of the common noise is."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CELL = 8  # pixels along each side of a cell; a map of fewer than two cells along a side has none
_LARGE = 32  # pixels along a side, from which neighbors have the same noise


def at_probes(values: Tensor, window: int, probes: int, of_pixels: bool = True) -> Tensor:
    """Return the means of maps, of pixels or of cells, over the part of the image of each probe, (probes, ..., 1...).

    The parts are a grid over the last `window` dimensions, so that together they cover the image.
    """
    cells, outer = Cells.of(values, window) if of_pixels else None, values.shape[:-window]
    values = values if cells is None else cells.means(values)
    values = values.reshape(1, -1, *values.shape[-window:])
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[window - 1]
    pooled = pool(values, _grid(probes, window))
    return pooled.reshape(*outer, probes).movedim(-1, 0).reshape(probes, *outer, *[1] * window)


def _grid(probes: int, dims: int) -> list[int]:
    """Return sizes whose product is the number of probes, a power of 2, as equal as possible."""
    bits = probes.bit_length() - 1
    return [2 ** ((bits + dim) // dims) for dim in range(dims)]


def similarity(mean: Tensor, window: int) -> Tensor | None:
    """Return the correlation of the noise of neighbors in a small map, (examples, 1...), from their means; None for 1.

    Noise of a weight is proportional to the activations at both places, and so are the gates that it passes.
    """
    sizes = mean.shape[-window:] if window else ()
    if not sizes or min(sizes) >= _LARGE or min(sizes) < 2:
        return None
    dims = list(range(-window - 1, 0))  # there may be no examples
    found = []
    for dim in range(-window, 0):
        size = mean.shape[dim]
        first, second = mean.narrow(dim, 0, size - 1), mean.narrow(dim, 1, size - 1)
        energy = (first.square() + second.square()).sum(dims, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
        found.append(2 * (first * second).sum(dims, keepdim=True) / energy)
    return (sum(found[1:], found[0]) / window).clamp(0, 1)


class Cells:
    """The division of a map into cells."""

    def __init__(self, sizes: Sequence[int], like: Tensor) -> None:
        self.sizes = tuple(sizes)
        counts = torch.ones((), dtype=like.dtype, device=like.device)
        for size in self.sizes:
            # Computed on the device: a list of lengths would have to be copied to it, for which Python waits.
            left = torch.arange(size, 0, -CELL, dtype=like.dtype, device=like.device)
            counts = counts.unsqueeze(-1) * left.clamp_max(CELL)
        self.counts = counts

    @classmethod
    def of(cls, values: Tensor, window: int) -> "Cells | None":
        """Return the cells of a map, or None if it is too small or no map."""
        sizes = values.shape[-window:] if window else ()
        return cls(sizes, values) if sizes and min(sizes) >= 2 * CELL else None

    def means(self, values: Tensor) -> Tensor:
        """Return the mean over each cell."""
        ends = [end for size in reversed(self.sizes) for end in (0, -size % CELL)]
        values = F.pad(values, ends) if any(ends) else values
        dims = [-1 - 2 * number for number in range(len(self.sizes))]
        for dim in dims:
            values = values.unflatten(dim, (-1, CELL))
        return values.sum(dims) / self.counts

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all pixels, given those of the cells. The dimensions keep size 1."""
        dims = list(range(-len(self.sizes), 0))
        return (values * self.counts).sum(dims, keepdim=True) / math.prod(self.sizes)


def root(x: Tensor) -> Tensor:
    """Return √x for x ≥ 0, with a gradient of 0 instead of infinity at 0."""
    if not torch.is_grad_enabled():
        return x.clamp_min(0).sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0) ** 0.5, 0.0)
