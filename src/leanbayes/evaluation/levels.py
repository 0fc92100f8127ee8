"""The levels of each kind of shift that a model is tried on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.evaluation.shift import CORRUPTIONS, GEOMETRIC, SEVERITIES, add_noise, corrupt, rotate

FAMILIES = ("corruptions", "rotation", "noise", "labels")
ANGLES = (15, 30, 45, 60, 75, 90, 120, 150, 180)
DECIBELS = (40, 20, 10, 5, 1, -3, -6)  # signal to noise, as in VDP's experiments
_LEAST = 8  # pixels of a side that can be corrupted

Change = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Level:
    """One level of one shift, and what it does to inputs (images from 0 to 1), with noise from a generator."""

    family: str
    name: str
    level: float
    change: Change


def levels(families: Sequence[str], examples: Iterable[tuple[Any, Tensor]]) -> list[Level]:
    """Return those levels that apply to batches of examples, the unchanged inputs first.

    Noise is for numbers, rotation for images, and corruptions for images of 1 or 3 channels whose values are uint8 or
    lie between 0 and 1. Where a label is a map, nothing may move. Labels shift without new predictions: no level here.
    """
    numbers, images, pictures, maps = True, True, True, False
    for x, y in examples:
        numbers = numbers and isinstance(x, Tensor) and (x.is_floating_point() or x.dtype == torch.uint8)
        images = images and numbers and x.dim() == 4
        pictures = pictures and images and _are_pictures(x)
        maps = maps or y.dim() > 2
    found: list[Level] = []
    if "corruptions" in families and pictures:
        names = [name for name in CORRUPTIONS if not (maps and name in GEOMETRIC)]
        found += [Level("corruptions", name, s, _corruption(name, s)) for name in names for s in SEVERITIES]
    if "rotation" in families and images and not maps:
        found += [Level("rotation", "rotation", angle, _rotation(angle)) for angle in ANGLES]
    if "noise" in families and numbers:
        found += [Level("noise", "noise", decibels, _noise(decibels)) for decibels in DECIBELS]
    return [Level("none", "none", 0, lambda x, generator: x), *found] if found else []


def _are_pictures(x: Tensor) -> bool:
    if x.shape[1] not in (1, 3) or min(x.shape[2:]) < _LEAST:
        return False
    return x.dtype == torch.uint8 or bool(x.amin() >= 0 and x.amax() <= 1)


def _corruption(name: str, severity: int) -> Change:
    return lambda x, generator: corrupt(x, name, severity, generator)


def _rotation(angle: float) -> Change:
    return lambda x, generator: rotate(x, angle)


def _noise(decibels: float) -> Change:
    return lambda x, generator: add_noise(x, decibels, generator)
