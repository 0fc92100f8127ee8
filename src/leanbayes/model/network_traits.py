"""What a pass must know of a network: the kinds of its layers, and whether its outputs have pixels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from leanbayes.core.layout import Layout


@dataclass
class NetworkTraits:
    """What is known of a network.

    Attributes:
        batch_first: Whether recurrent and attention layers take (batch, length, channels).
        recurrent: Whether it has recurrent layers.
        convolves: Whether many positions of an input share Bayesian weights, and so their noise.
        convolutional: Whether all Bayesian weights other than biases are those of convolutions.
        ends_in_convolution: Whether the last Bayesian weight is that of a convolution.
        returns_maps: Whether its outputs have pixels for the inputs of the current call. None if it is not known.
        maps_by_size: The same for inputs of all sizes that it was called with.
    """

    batch_first: bool
    recurrent: bool
    convolves: bool
    convolutional: bool
    ends_in_convolution: bool
    returns_maps: bool | None = None
    maps_by_size: dict[Any, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, network: nn.Module, layout: Layout, places: Sequence[Sequence[tuple[nn.Module, str]]]) -> Self:
        """Return the traits of a network, given the (module, attribute) pairs of each slot of the layout."""
        kernels = [of_slot[0][0] for slot, of_slot in zip(layout, places, strict=True) if len(slot.shape) > 1]
        return cls(
            batch_first=all(getattr(module, "batch_first", True) for module in network.modules()),
            recurrent=any(isinstance(module, nn.RNNBase) for module in network.modules()),
            convolves=any(_is_convolution(module) for of_slot in places for module, _ in of_slot),
            convolutional=all(map(_is_convolution, kernels)),
            ends_in_convolution=bool(places) and _is_convolution(places[-1][0][0]),
        )

    @property
    def depends_on_outputs(self) -> bool:
        """Whether `dense_output` needs to know `returns_maps`."""
        return self.ends_in_convolution and self.convolutional

    @property
    def dense_output(self) -> bool:
        """Whether the network ends in a convolution, and its outputs have pixels as far as is known."""
        return self.ends_in_convolution and not (self.convolutional and self.returns_maps is False)


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)
