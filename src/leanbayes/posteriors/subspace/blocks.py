"""Blocks of weights that are active or zero together, as block-sparse kernels need them."""

import math
import re

import torch
from torch import Tensor

from leanbayes.core.layout import Slot
from leanbayes.errors import LeanBayesError


def block_shape(pattern: str) -> tuple[int, int]:
    """Parse a pattern: "weight" for single weights, or "RxC" for blocks of R outputs and C inputs."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", pattern)
    if pattern != "weight" and match is None:
        raise LeanBayesError(f"pattern={pattern!r} is unknown: use 'weight', or blocks such as '16x16'.")
    return (1, 1) if match is None else (int(match[1]), int(match[2]))


class Blocks:
    """The blocks of one parameter: groups of outputs and inputs at one position of the kernel.

    If the first two dimensions of the parameter are not multiples of the block's, or if there is only one block, each
    weight is its own block, numbered by its position.
    """

    def __init__(self, slot: Slot, shape: tuple[int, int]) -> None:
        fits = len(slot.shape) >= 2 and not slot.shape[0] % shape[0] and not slot.shape[1] % shape[1]
        self.slot = slot
        self.shape = shape if fits and slot.numel > math.prod(shape) else (1, 1)
        self.size = math.prod(self.shape)
        self.count = slot.numel // self.size
        self._sizes = slot.memory_shape
        self._steps = [self.shape[dim] if dim < 2 else 1 for dim in slot.order]

    def of(self, positions: Tensor) -> Tensor:
        """Return the block number of each position."""
        if self.size == 1:
            return positions
        numbers = torch.zeros_like(positions)
        for along, size, step in zip(
            torch.unravel_index(positions, self._sizes), self._sizes, self._steps, strict=True
        ):
            numbers = numbers * (size // step) + along // step
        return numbers

    def positions(self, numbers: Tensor) -> Tensor:
        """Return the positions of all weights of the given blocks, block by block."""
        if self.size == 1:
            return numbers
        coarse = torch.unravel_index(numbers, [n // step for n, step in zip(self._sizes, self._steps, strict=True)])
        inside = torch.unravel_index(torch.arange(self.size, device=numbers.device), self._steps)
        positions = torch.zeros(len(numbers), self.size, dtype=numbers.dtype, device=numbers.device)
        for block, within, size, step in zip(coarse, inside, self._sizes, self._steps, strict=True):
            positions = positions * size + (block[:, None] * step + within)
        return positions.flatten()

    def sums(self, values: Tensor) -> Tensor:
        """Sum one value per weight over each block, in a fixed order."""
        if self.size == 1:
            return values
        split = [part for n, step in zip(self._sizes, self._steps, strict=True) for part in (n // step, step)]
        return values.reshape(split).sum(list(range(1, len(split), 2))).flatten()
