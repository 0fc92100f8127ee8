"""The learning rates of a stage: numbers, or tensors that a captured step reads."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class LearningRates:
    """Sets the learning rates of some optimizers to a factor of their full value, which each group stores.

    Args:
        optimizers: The optimizers, with their full learning rates.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers, self._factor = optimizers, 1.0
        for group in self._groups():
            group["full_lr"] = group["lr"]

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    @property
    def first(self) -> float:
        """The current learning rate of the first group."""
        return next(self._groups())["full_lr"] * self._factor

    def set(self, factor: float) -> None:
        """Set all learning rates to this factor of their full value, tensors in place."""
        self._factor = factor
        for group in self._groups():
            rate = group["full_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def to_tensors(self, device: torch.device) -> None:
        """Make all learning rates tensors on a device, for optimizers to read in a CUDA graph."""
        for group in self._groups():
            group["lr"] = torch.tensor(group["full_lr"] * self._factor, dtype=torch.float32, device=device)

    @contextlib.contextmanager
    def capturable(self) -> Iterator[None]:
        """Let the optimizers be captured inside the block. Outside of a capture this setting makes Adam warn."""
        groups = [group for group in self._groups() if "capturable" in group]
        before = [group["capturable"] for group in groups]
        for group in groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group["capturable"] = value

    def to_numbers(self) -> None:
        """Make all learning rates numbers again."""
        for group in self._groups():
            _to_plain(group, self._factor)

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return the state of each optimizer, the same for tensors as for numbers."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        for state in states:
            for group in state["param_groups"]:  # copies
                _to_plain(group, self._factor)
        return states


def _to_plain(group: dict[str, Any], factor: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"] = group["full_lr"] * factor
