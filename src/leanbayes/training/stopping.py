"""Stopping in an orderly way: the first Ctrl-C, or a cluster's SIGTERM, is met after the step, with a checkpoint."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignals:
    """Catches the signals inside a block; `active=False` catches none.

    A second one stops at once, unless a launcher sends it (`repeated`), which tells its processes again and again.
    """

    def __init__(self, active: bool, repeated: bool) -> None:
        self._repeated = repeated
        self._active = active and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self.came = False

    def __enter__(self) -> Self:
        if self._active:
            self._before = {number: signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.came and not self._repeated:
            raise KeyboardInterrupt
        self.came = True
