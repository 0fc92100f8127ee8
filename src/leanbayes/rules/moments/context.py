"""What all values of one forward pass share: the settings of the rule, and the signs of the probes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Correlation = Literal["common", "none"]
Activations = Literal["exact", "taylor"]

PROBES = 64  # directions of common noise; the variance that they add up to is right to about √(2/PROBES)
TRAINING_PROBES = 8  # drawn anew at every step, so that few do
CHANNELS = 4099  # columns of a table of signs; a prime, so that layers of usual widths do not meet theirs again


def make_signs(probes: int = PROBES) -> Tensor:
    """Draw the table of signs, the same for every model: (probes, channels) of ±1."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (probes, CHANNELS), generator=generator, device="cpu", dtype=torch.int8) * 2 - 1


@dataclass
class Pass:
    """One forward pass by moments.

    correlation: "common" keeps noise that positions share, in `signs` many directions; "none" forgets correlations.
    activations: "exact" takes the moments of a Gaussian through an activation function, "taylor" its slope at the mean.
    maps: whether the independent noise of convolutions differs from pixel to pixel.
    rows: the number of examples, where it is known. batch_first: whether values of three dimensions are (batch, length,
    channels), not (length, batch, channels), where their sizes do not say so.
    """

    correlation: Correlation = "none"
    activations: Activations = "exact"
    signs: Tensor | None = None
    maps: bool = True
    rows: int | None = None
    batch_first: bool = True
    taken: int = 0

    def next_signs(self, channels: int) -> Tensor:
        """Take signs for the noise of one layer, (probes, channels), each column of squared length 1."""
        assert self.signs is not None
        probes, width = self.signs.shape
        start, self.taken = self.taken % width, self.taken + channels
        pieces, missing = [], channels
        while missing > 0:
            end = min(width, start + missing)
            pieces.append(self.signs[:, start:end])
            missing, start = missing - (end - start), 0
        signs = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        return signs.to(torch.float32) * probes**-0.5

    def batch_dim(self, shape: Sequence[int]) -> int:
        """Which of the dimensions of a value counts examples; windows of images may have multiplied them."""
        if len(shape) != 3:
            return 0
        if self.rows is None:
            return 0 if self.batch_first else 1
        if self.batch_first:
            return 1 if shape[0] % self.rows and shape[1] == self.rows else 0
        return 1 if shape[1] == self.rows else 0
