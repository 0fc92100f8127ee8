"""The forward pass of a sharded model: a block has its weights while it runs, and again in the backward pass."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from leanbayes.rules import PassContext, Rule

if TYPE_CHECKING:
    from leanbayes.posteriors.sharded_unit import Gathered, Unit


@dataclass(eq=False)
class PlacedUnit:
    """A unit of a sharded posterior, and where its parameters belong in the network."""

    unit: "Unit"
    places: Sequence[Sequence[tuple[nn.Module, str]]]

    def put(self, values: Sequence[Any] | None) -> None:
        """Put one value per parameter, or None, in their places."""
        for number, places_of_slot in enumerate(self.places):
            for module, attribute in places_of_slot:
                setattr(module, attribute, None if values is None else values[number])


class _Saved(NamedTuple):
    """A gathered tensor that a function has saved for the backward pass."""

    gathered: "Gathered"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ShardedValues:
    """One sample of a sharded posterior: what a pass has in place of one value per parameter.

    Args:
        root: The units that are in place during the whole pass.
        rule: The rule.
        key: The key of the noise.
    """

    def __init__(self, root: Sequence[PlacedUnit], rule: Rule, key: Tensor) -> None:
        self._rule, self._key = rule, key
        self._context: PassContext | None = None
        self._open: dict[PlacedUnit, Sequence[Any]] = {}
        for placed in root:
            self._open[placed] = self._values(placed)

    def _values(self, placed: PlacedUnit) -> Sequence[Any]:
        return self._rule.weights(placed.unit, self._key, False)[0]

    def put(self) -> None:
        """Put the values of all open units in their places."""
        for placed, values in self._open.items():
            placed.put(values)

    def begin(self, context: PassContext) -> None:
        """Prepare a call of the network."""
        self._context = context
        for values in self._open.values():
            self._rule.begin(values, context)

    @contextlib.contextmanager
    def opened(self, units: Sequence[PlacedUnit], positions: Sequence[int] = ()) -> Iterator[None]:
        """Gather the weights of units for a block, and free them after it."""
        new = [placed for placed in units if placed not in self._open]
        try:
            for number, placed in enumerate(new):
                values = self._open[placed] = self._values(placed)
                if self._context is not None:
                    self._rule.begin(values, self._context)
                if positions:
                    self._rule.move_to(values, positions[number])
                placed.put(values)
            yield
        finally:
            for placed in new:
                self._open.pop(placed, None)
                placed.unit.live.clear()
                placed.put(None)

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Let functions in the block remember gathered weights for the backward pass without keeping their memory."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor:
            return tensor
        address = tensor.untyped_storage().data_ptr()
        for placed in self._open:
            gathered = placed.unit.live.get(address)
            if gathered is not None:
                return _Saved(gathered, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor

    def snapshot(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return a function that opens the units that are open now, for activation checkpointing."""
        units = [placed for placed in self._open if not placed.unit.keeps]
        positions = [self._rule.position(self._open[placed]) for placed in units]

        @contextlib.contextmanager
        def reopened() -> Iterator[None]:
            for placed in units:
                placed.unit.is_recomputed = True
            try:
                opened = self.opened(units, positions)
                with opened:
                    for placed in units:
                        placed.unit.is_recomputed = False
                    yield
            finally:
                for placed in units:
                    placed.unit.is_recomputed = False

        return reopened


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    return saved.gathered.get().as_strided(saved.size, saved.stride, saved.offset)


def run_with_units(module: nn.Module, units: Sequence[PlacedUnit], current: Callable[[], Any]) -> None:
    """Let a module gather the weights of its units whenever it runs.

    Args:
        module: A block of the network.
        units: Its units.
        current: Returns the values that the network has in place of its parameters now.
    """
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        values = current()
        if not isinstance(values, ShardedValues):  # all parameters are in place, as inside `holding`
            return forward(*args, **kwargs)
        with values.opened(units):
            return forward(*args, **kwargs)

    module.forward = run
