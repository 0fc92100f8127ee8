"""The parameters of corruptions at severities from 1 to 5, by image size.

The values at 32 pixels are those of CIFAR-10-C and the values at 224 those of ImageNet-C (Hendrycks & Dietterich 2019,
https://arxiv.org/abs/1903.12261), unless a comment says otherwise. Between the two sizes a value is interpolated
linearly in the logarithms, v = v₃₂^(1 - t) v₂₂₄^t with t = log(side / 32) / log(224 / 32), where side is the shorter
side. Outside this range it is constant, except that a length in pixels grows with the side above 224 and shrinks with
its square root below 32: by half for 8 × 8 digits, whose strokes are two pixels wide.
"""

import math
from typing import NamedTuple

from torch import Tensor

SEVERITIES = (1, 2, 3, 4, 5)
SMALL, LARGE = 32, 224


class Scale(NamedTuple):
    """A positive parameter: its values at severities 1 to 5 for 32 and for 224 pixels."""

    small: tuple[float, float, float, float, float]
    large: tuple[float, float, float, float, float]

    def at(self, severity: int, images: Tensor) -> float:
        """Return the value for images (n, channels, height, width)."""
        share = min(max(math.log(side(images) / SMALL) / math.log(LARGE / SMALL), 0.0), 1.0)
        return self.small[severity - 1] ** (1 - share) * self.large[severity - 1] ** share

    def pixels(self, severity: int, images: Tensor, shrink: bool = True) -> float:
        """Return a length in pixels; shrink=False for lengths of about one pixel at 32, which cannot be smaller."""
        size = side(images)
        smaller = min(size / SMALL, 1.0) ** 0.5 if shrink else 1.0
        return self.at(severity, images) * max(size / LARGE, 1.0) * smaller


def side(images: Tensor) -> int:
    """Return the shorter side of images."""
    return min(images.shape[-2:])
