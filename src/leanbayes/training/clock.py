"""A clock that counts the seconds spent on training."""

import contextlib
import time
from collections.abc import Iterator

import torch


class Clock:
    """Counts seconds of training. It does not run before `start`, nor inside `stopped`.

    Args:
        device: The device, which a reading waits for.
        seconds: The seconds of training before a run was resumed.
    """

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device, self._seconds = device, seconds
        self._mark: float | None = None

    def start(self) -> None:
        """Start to count."""
        self._mark = time.perf_counter()

    def read(self) -> float:
        """Wait for the device and return the seconds so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._mark is not None:
            now = time.perf_counter()
            self._seconds, self._mark = self._seconds + now - self._mark, now
        return self._seconds

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the seconds of the block."""
        self.read()
        self._mark = None
        try:
            yield
        finally:
            self.start()
