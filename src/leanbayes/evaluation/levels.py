"""The levels of each kind of shift that a model is tried on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanbayes.data import Data
from leanbayes.evaluation.shift import CORRUPTIONS, GEOMETRIC, SEVERITIES, add_noise, corrupt, rotate

FAMILIES = ("corruptions", "rotation", "noise", "labels")
ANGLES = (15, 30, 45, 60, 75, 90, 120, 150, 180)
DECIBELS = (40, 20, 10, 5, 1, -3, -6)  # signal to noise, as in VDP's experiments


Change = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Level:
    """One level of one shift, and what it does to inputs (images from 0 to 1), with noise from a generator."""

    family: str
    name: str
    level: float
    change: Change


def levels(families: Sequence[str], data: Data) -> list[Level]:
    """Return those levels that apply to the data, the unchanged inputs first; labels shift without new predictions."""
    images, dense = len(data.input_shape) == 3, data.task == "segmentation"
    found: list[Level] = []
    if "corruptions" in families and images and data.input_shape[0] in (1, 3):
        names = [name for name in CORRUPTIONS if not (dense and name in GEOMETRIC)]
        found += [Level("corruptions", name, s, _corruption(name, s)) for name in names for s in SEVERITIES]
    if "rotation" in families and images and not dense:
        found += [Level("rotation", "rotation", angle, _rotation(angle)) for angle in ANGLES]
    if "noise" in families:
        found += [Level("noise", "noise", decibels, _noise(decibels)) for decibels in DECIBELS]
    return [Level("none", "none", 0, lambda x, generator: x), *found] if found else []


def _corruption(name: str, severity: int) -> Change:
    return lambda x, generator: corrupt(x, name, severity, generator)


def _rotation(angle: float) -> Change:
    return lambda x, generator: rotate(x, angle)


def _noise(decibels: float) -> Change:
    return lambda x, generator: add_noise(x, decibels, generator)
