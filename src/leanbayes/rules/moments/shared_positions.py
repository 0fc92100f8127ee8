"""Positions (pixels, tokens) that share a weight: statistics of their inputs, and the noise that they share."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.rules.moments.context import Pass
from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.map_cells import root
from leanbayes.rules.moments.value import Moments


class InputStatistics(NamedTuple):
    """Statistics of the input of a layer whose positions share their weights."""

    mean: Tensor
    squares: Tensor  # of the means
    second: Tensor  # mean of E x² over the positions
    first: Tensor  # E x̄², with x̄ the mean over the positions
    alone: Tensor | None  # mean over the positions of the independent variance

    @classmethod
    def of(cls, x: Any, positions: list[int], dtype: torch.dtype, within: Pass, channel_dim: int) -> "InputStatistics":
        """Compute the statistics of an input."""
        mean = loc_of(x).to(dtype)
        squares = mean.square()
        if isinstance(x, Moments) and x.averages is not None and x.averages[0] == sorted(positions):
            first, second = x.averages[1].square(), x.averages[2]
        else:
            first, second = within.mean(mean, positions).square(), within.mean(squares, positions)
        # The means are added, because the variance may have size 1 along the positions.
        if not isinstance(x, Moments):
            return cls(mean, squares, second, first, None)
        averages = [within.mean(piece, positions) for piece in x.variances_along(channel_dim)]
        average = averages[0] if len(averages) == 1 else torch.cat(averages, channel_dim)
        shared = x.common_variance()
        alone = average if not x.has_common else (average - shared).clamp_min(0)
        weights = within.weights(mean.shape, positions)
        if weights is None:
            first = first + shared + alone / math.prod([mean.shape[dim] for dim in positions])
        else:  # the variance of a weighted mean
            first = first + shared + alone * weights.expand(mean.shape).square().sum(positions, keepdim=True)
        return cls(mean, squares, second + average, first, alone)


def common_variance(of_mean: Tensor, total: Tensor) -> Tensor:
    """Return the part √(c·t) of a variance t that all positions share, given the variance c of their mean."""
    return torch.minimum(root(of_mean * total), total)


def count_inside(start: int, stride: int, steps: int, size: int) -> int:
    """Count how many of the numbers start + i·stride, for i < steps, are in the range 0 ... size - 1."""
    first = max(0, -(start // stride)) if start < 0 else 0
    last = min(steps - 1, (size - 1 - start) // stride)
    return max(0, last - first + 1)


def of_dim(setting: int | Sequence[int], dim: int) -> int:
    """Return a setting of a convolution, such as its stride, for one dimension."""
    if isinstance(setting, int):
        return setting
    return setting[dim] if len(setting) > 1 else setting[0]
