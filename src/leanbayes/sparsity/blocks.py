"""Blocks of weights that are active or zero together, as kernels for block-sparse matrices want them."""

import math
import re

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.layout import Slot


def block_shape(pattern: str) -> tuple[int, int]:
    """Read a pattern: "weight" for single weights, or "RxC" for blocks of R outputs and C inputs."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", pattern)
    if pattern != "weight" and match is None:
        raise LeanBayesError(f"pattern={pattern!r} is unknown: use 'weight', or blocks such as '16x16'.")
    return (1, 1) if match is None else (int(match[1]), int(match[2]))


class Blocks:
    """How one parameter is cut into blocks of outputs and inputs, each of one tap of a kernel.

    A parameter whose first two dimensions are no multiples of the block's, or that has only one block, is cut into
    single weights: then blocks are numbered as positions are.
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
        """Return the number of the block that each position lies in."""
        if self.size == 1:
            return positions
        numbers = torch.zeros_like(positions)
        for along, size, step in zip(
            torch.unravel_index(positions, self._sizes), self._sizes, self._steps, strict=True
        ):
            numbers = numbers * (size // step) + along // step
        return numbers

    def positions(self, numbers: Tensor) -> Tensor:
        """Return the positions of all weights of some blocks, block by block."""
        if self.size == 1:
            return numbers
        coarse = torch.unravel_index(numbers, [n // step for n, step in zip(self._sizes, self._steps, strict=True)])
        inside = torch.unravel_index(torch.arange(self.size, device=numbers.device), self._steps)
        positions = torch.zeros(len(numbers), self.size, dtype=numbers.dtype, device=numbers.device)
        for block, within, size, step in zip(coarse, inside, self._sizes, self._steps, strict=True):
            positions = positions * size + (block[:, None] * step + within)
        return positions.flatten()

    def sums(self, values: Tensor) -> Tensor:
        """Add up one value for each weight of the parameter to one for each block, always in the same order."""
        if self.size == 1:
            return values
        split = [part for n, step in zip(self._sizes, self._steps, strict=True) for part in (n // step, step)]
        return values.reshape(split).sum(list(range(1, len(split), 2))).flatten()
