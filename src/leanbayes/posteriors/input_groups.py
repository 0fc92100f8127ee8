"""Groups of weights: the inputs of layers. A group has all weights of one feature or channel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from leanbayes.core.layout import Layout, Slot


class InputGroups:
    """The groups of a layout, numbered slot by slot.

    They are the outputs of a layer if each has one input (a depthwise convolution, or the first layer for gray images),
    and the entries of a vector. In a grouped convolution, the same input channel of all groups is one group.

    Args:
        layout: The place of each parameter in the flat vector.

    Attributes:
        counts: The number of groups of each slot.
        total: The number of all groups.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.counts = [slot.shape[_dim(slot)] if slot.shape else 1 for slot in layout]
        self.total = sum(self.counts)

    def views(self, per_group: Tensor) -> list[Tensor]:
        """Repeat one value per group over the weights of each slot, without a copy."""
        parts: Sequence[Tensor] = per_group.split(self.counts) if self.counts else ()
        return [_shaped(slot, part).expand(slot.shape) for slot, part in zip(self._layout, parts, strict=True)]

    def expand(self, per_group: Tensor) -> Tensor:
        """Repeat one value per group over all weights."""
        return self._layout.join(self.views(per_group))

    def sums(self, flat: Tensor) -> Tensor:
        """Sum one value per weight over each group."""
        parts = []
        for slot, part in zip(self._layout, self._layout.split(flat), strict=True):
            others = [dim for dim in range(len(slot.shape)) if dim != _dim(slot)]
            parts.append(part.sum(others) if others else part.reshape(-1))
        return torch.cat(parts)


def _dim(slot: Slot) -> int:
    """Return the dimension of a parameter's groups: its inputs, or its outputs if there is one input only."""
    if len(slot.shape) < 2:
        return 0
    inputs = slot.input_dim
    return inputs if slot.shape[inputs] > 1 else int(inputs == 0)


def _shaped(slot: Slot, per_group: Tensor) -> Tensor:
    """View the values of a slot's groups as a tensor that broadcasts to its shape."""
    shape = [1] * len(slot.shape)
    if shape:
        shape[_dim(slot)] = len(per_group)
    return per_group.view(shape)
