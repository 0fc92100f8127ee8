"""The levels of each kind of shift on which a model is evaluated."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.evaluation.shift import CORRUPTIONS, GEOMETRIC, SEVERITIES, add_noise, corrupt, rotate

FAMILIES = ("corruptions", "rotation", "noise", "labels")
ANGLES = (15, 30, 45, 60, 75, 90, 120, 150, 180)
DECIBELS = (40, 20, 10, 5, 1, -3, -6)  # signal-to-noise ratio, as in the experiments of VDP
_MIN_SIDE = 8  # pixels, for corruptions

Change = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Level:
    """One level of one shift, and the function that applies it to inputs (images from 0 to 1)."""

    family: str
    name: str
    level: float
    change: Change


def levels(families: Sequence[str], examples: Iterable[tuple[Any, Tensor]]) -> list[Level]:
    """Return the levels that apply to batches of examples, starting with the unchanged inputs.

    Noise needs numeric inputs, rotation needs images, and corruptions need images with 1 or 3 channels of uint8 or of
    floats from 0 to 1. If the labels are maps, pixels must not move. Label shift needs no new predictions, and thus no
    level here.
    """
    numeric, images, corruptible, maps = True, True, True, False
    for x, y in examples:
        numeric = numeric and isinstance(x, Tensor) and (x.is_floating_point() or x.dtype == torch.uint8)
        images = images and numeric and x.dim() == 4
        corruptible = corruptible and images and _are_corruptible(x)
        maps = maps or y.dim() > 2
    found: list[Level] = []
    if "corruptions" in families and corruptible:
        names = [name for name in CORRUPTIONS if not (maps and name in GEOMETRIC)]
        found += [Level("corruptions", name, s, _corruption(name, s)) for name in names for s in SEVERITIES]
    if "rotation" in families and images and not maps:
        found += [Level("rotation", "rotation", angle, _rotation(angle)) for angle in ANGLES]
    if "noise" in families and numeric:
        found += [Level("noise", "noise", decibels, _noise(decibels)) for decibels in DECIBELS]
    return [Level("none", "none", 0, lambda x, generator: x), *found] if found else []


def _are_corruptible(x: Tensor) -> bool:
    if x.shape[1] not in (1, 3) or min(x.shape[2:]) < _MIN_SIDE:
        return False
    return x.dtype == torch.uint8 or bool(x.amin() >= 0 and x.amax() <= 1)


def _corruption(name: str, severity: int) -> Change:
    return lambda x, generator: corrupt(x, name, severity, generator)


def _rotation(angle: float) -> Change:
    return lambda x, generator: rotate(x, angle)


def _noise(decibels: float) -> Change:
    return lambda x, generator: add_noise(x, decibels, generator)
