"""Brightness, contrast and pixelation."""

import torch
from torch import Tensor

from leanbayes.evaluation.shift.severity import LARGE, Scale, side

_ADDED = Scale((0.05, 0.10, 0.15, 0.20, 0.30), (0.1, 0.2, 0.3, 0.4, 0.5))
_KEPT = Scale((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05))
_CELLS = Scale((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25))


def brightness(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Increase the HSV value v (the largest channel): x min(v + c, 1) / v; black becomes gray."""
    value = images.amax(1, keepdim=True)
    lit = (value + _ADDED.at(severity, images)).clamp(max=1)
    return torch.where(value > 1e-6, images * (lit / value.clamp_min(1e-6)), lit)


def contrast(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Shrink toward the mean of each channel: m + c (x - m)."""
    return torch.lerp(images.mean((2, 3), keepdim=True), images, _KEPT.at(severity, images))


def pixelate(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Average over square cells, c times as many as pixels along each side.

    Below 24 pixels a cell is as wide as a stroke of a digit: such images are mixed with their means over 2 × 2 pixels.
    """
    share, size = _CELLS.at(severity, images), side(images)
    cell = size / int(min(size, LARGE) * share) if size >= 24 else 2.0
    down, across = (cells(length, cell).to(images) for length in images.shape[-2:])
    coarse = down @ images @ across.T
    return coarse if size >= 24 else torch.lerp(images, coarse, 2 * (1 - share))


def cells(size: int, cell: float) -> Tensor:
    """Return the matrix (size, size) that replaces each pixel by the mean over the cell of its center."""
    pixels = torch.arange(size, dtype=torch.float64)
    start = ((pixels + 0.5) / cell).floor() * cell
    end = (start + cell).clamp(max=size)
    overlap = (torch.minimum(end[:, None], pixels + 1) - torch.maximum(start[:, None], pixels)).clamp(min=0)
    return overlap / overlap.sum(1, keepdim=True)
