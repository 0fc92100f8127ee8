"""State that all values of one forward pass share: the settings of the rule, and the signs of the probes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leanbayes.errors import UnsupportedOperation

Correlation = Literal["common", "none"]
Activations = Literal["exact", "taylor", "paper"]
Maps = Literal["auto", "uniform", "independent"]

PROBES = 64  # directions of common noise; the relative error of their total variance is about √(2/PROBES)
TRAINING_PROBES = 8  # new ones at every step, so a few are enough
CHANNELS = 4099  # columns of the table of signs; a prime, so layers of common widths do not get the same signs


class Source(NamedTuple):
    """How a mean is computed, for code that computes it together with what follows and does not store it.

    Attributes:
        value: The mean before a batch norm in evaluation mode, with the channels in dimension 1.
        norm: Running mean, running variance, weight and bias.
        eps: What is added to the running variance.
        added: What is added to the mean after the batch norm.
    """

    value: Tensor
    norm: tuple[Tensor, Tensor, Tensor, Tensor]
    eps: float
    added: Tensor | None = None


def make_signs(probes: int = PROBES) -> Tensor:
    """Return the table of signs ±1, (probes, channels), which is the same for every model."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (probes, CHANNELS), generator=generator, device="cpu", dtype=torch.int8) * 2 - 1


@dataclass
class Pass:
    """One forward pass by moments.

    Attributes:
        correlation: "common" keeps noise that positions share, in one direction per row of `signs`; "none" drops
            correlations.
        activations: "exact" uses the moments of an activation function of a Gaussian, "taylor" its slope at the mean,
            and "paper" also equations 9 and 14 of VDP++ for softmax and layer norm.
        signs: The table of signs of the probes.
        maps: Whether the independent noise of convolutions differs from pixel to pixel.
        coherent: Whether all noise counts as common, with a variance that differs from pixel to pixel. Neighboring
            pixels of a map have nearly the same noise, and the outputs of dense prediction depend on neighbors.
        rows: The number of examples, or None if it is unknown.
        batch_first: Whether values of three dimensions are (batch, length, channels), not (length, batch, channels),
            if their sizes do not decide.
        taken: The number of columns of `signs` that layers have used.
        counted: 1 for the tokens of each example, and 0 for padding, (examples, tokens); None if there is none.
    """

    correlation: Correlation = "none"
    activations: Activations = "exact"
    signs: Tensor | None = None
    maps: bool = True
    coherent: bool = False
    rows: int | None = None
    batch_first: bool = True
    taken: int = 0
    counted: Tensor | None = None

    @property
    def probes(self) -> int:
        """The number of probes of common noise."""
        return 0 if self.signs is None else len(self.signs)

    def next_signs(self, channels: int) -> Tensor:
        """Return signs for the noise of one layer, (probes, channels), scaled so that each column has length 1."""
        if self.signs is None:
            raise UnsupportedOperation(
                "The rule 'moments' starts with a call of the model: use bnn(x), or the function that bnn.drawn() "
                'yields; other methods of the network, such as generate(), need bnn.using("sample").'
            )
        probes, width = self.signs.shape
        start, self.taken = self.taken % width, self.taken + channels
        pieces, missing = [], channels
        while missing > 0:
            end = min(width, start + missing)
            pieces.append(self.signs[:, start:end])
            missing, start = missing - (end - start), 0
        signs = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        return signs.to(torch.float32) * probes**-0.5

    def mean(self, values: Tensor, dims: list[int], lead: int = 0) -> Tensor:
        """Return the mean over positions, in which padding does not count. The dimensions keep size 1.

        Args:
            values: The values. Those of padding must be finite.
            dims: The dimensions of the positions.
            lead: The dimension of the examples, 1 behind that of probes.
        """
        weights = self.weights(values.shape, dims, lead)
        return values.mean(dims, keepdim=True) if weights is None else (values * weights).sum(dims, keepdim=True)

    def weights(self, shape: Sequence[int], dims: Sequence[int], lead: int = 0) -> Tensor | None:
        """Return the weights of positions in a mean over `dims`, in a shape that broadcasts; None if they are equal."""
        if self.counted is None or not self.batch_first:
            return None
        rows, tokens = self.counted.shape
        places = [dim for dim in dims if shape[dim] == tokens]
        if len(shape) <= lead or shape[lead] != rows or lead in dims or len(places) != 1:
            return None  # other values than those of all tokens, such as positions that all examples share
        sizes = [1] * len(shape)
        sizes[lead], sizes[places[0]] = rows, tokens
        others = math.prod([shape[dim] for dim in dims if dim != places[0]])
        return (self.counted / (others * self.counted.sum(1, keepdim=True).clamp_min(1))).view(sizes)

    def batch_dim(self, shape: Sequence[int]) -> int:
        """Return the dimension of a value that counts examples, or windows of them."""
        if len(shape) != 3:
            return 0
        if not self.rows:  # it is unknown, or there are no examples
            return 0 if self.batch_first else 1
        if self.batch_first:
            return 1 if shape[0] % self.rows and shape[1] == self.rows else 0
        return 1 if shape[1] == self.rows else 0
