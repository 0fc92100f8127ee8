"""Values in the places of a network's Bayesian parameters.

The network's own modules see the values for a block, and outside of it None.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core.layout import Layout, Slot
from leanbayes.core.locks import ModelLock
from leanbayes.core.network import places, set_plain_attribute
from leanbayes.model.draw import StochasticNetwork
from leanbayes.model.sharded_pass import ShardedValues
from leanbayes.posteriors import Posterior


class PlacedValues(nn.Module):
    """A network whose Bayesian parameters are values that are put in their places."""

    def __init__(self, network: nn.Module, posterior: Posterior) -> None:
        super().__init__()
        self.network = network
        self.posterior = posterior
        self._values: Sequence[Any] | ShardedValues | None = None  # the current values in the places of the parameters
        self._lock = ModelLock()
        # One empty buffer per dtype of the network: it follows .to(dtype), and says which dtype a weight must have now.
        dtypes = sorted({slot.dtype for slot in self.layout}, key=str)
        for number, dtype in enumerate(dtypes):
            self.register_buffer(f"_dtype_{number}", torch.empty(0, dtype=dtype), persistent=False)
        self._slot_dtypes = [f"_dtype_{dtypes.index(slot.dtype)}" for slot in self.layout]
        self.slot_places = [self.places_in(network, slot) for slot in self.layout]

    @property
    def layout(self) -> Layout:
        """The place of each Bayesian parameter in the flat vector."""
        return self.posterior.layout

    @property
    def values(self) -> Sequence[Any]:
        """What the network has in place of its parameters inside `drawn`, one value per slot; else nothing."""
        return () if self._values is None or isinstance(self._values, ShardedValues) else self._values

    @property
    def installed(self) -> Sequence[Any] | ShardedValues | None:
        """What the network has in place of its parameters now."""
        return self._values

    def places_in(self, network: nn.Module, slot: Slot) -> list[tuple[nn.Module, str]]:
        """Return the (module, attribute) pairs of a Bayesian parameter in the network of this model, or in a copy."""
        if isinstance(network, StochasticNetwork):
            return places(network, [found for name in slot.names for found in network.weight_names(name)])
        return places(network, slot.names)

    def slot_dtypes(self) -> list[torch.dtype]:
        """Return the dtype that the weights of each slot must have now."""
        dtypes = {name: getattr(self, name).dtype for name in dict.fromkeys(self._slot_dtypes)}
        return [dtypes[name] for name in self._slot_dtypes]

    @contextlib.contextmanager
    def holding(self, weights: Tensor) -> Iterator[nn.Module]:
        """Keep the given weights, one flat vector, in the network for a block, and yield the network."""
        with self.with_values(self.layout.split(weights)) as network:
            yield network

    @contextlib.contextmanager
    def with_values(self, values: Sequence[Any]) -> Iterator[nn.Module]:
        """Keep the given values, one per slot, in the network for a block, and yield the network."""
        with self._alone(), self._holding(values):
            yield self.network

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep other threads out of a block: weights, rule and mode are attributes of modules that threads share."""
        # Not `is_compiling`, which is true in all threads while one of them compiles.
        return contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else self._lock

    @contextlib.contextmanager
    def _holding(self, values: Sequence[Any] | ShardedValues) -> Iterator[None]:
        before = self._values
        try:
            self._put(self._cast(values))
            yield
        finally:
            self._put(before)

    def _cast(self, values: Sequence[Any] | ShardedValues) -> Sequence[Any] | ShardedValues:
        if isinstance(values, ShardedValues):
            return values
        dtyped = zip(values, self.slot_dtypes(), strict=True)
        return [value if value.dtype == dtype else value.to(dtype) for value, dtype in dtyped]

    def _put(self, values: Sequence[Any] | ShardedValues | None) -> None:
        """Put one value per slot, or None, in the places of the parameters."""
        self._values = values
        known = None if isinstance(values, ShardedValues) else values
        for number, places_of_slot in enumerate(self.slot_places):
            for module, attribute in places_of_slot:
                set_plain_attribute(module, attribute, None if known is None else known[number])
        if isinstance(values, ShardedValues):
            values.put()
