"""Signals that stop a training after its current step, with a checkpoint: Ctrl-C, SIGTERM, SIGHUP."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to stop: SIGHUP too, unless nohup or the system is without it."""
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    ignored = hangup is None or signal.getsignal(hangup) is signal.SIG_IGN  # nohup ignores it
    return (signal.SIGINT, signal.SIGTERM, *(() if hangup is None or ignored else (hangup,)))


class StopSignals:
    """Catches SIGINT, SIGTERM and SIGHUP inside a block.

    Args:
        active: Whether to catch signals at all.
        repeated: Whether a launcher may send a signal several times. If not, a second signal stops at once.

    Attributes:
        received: Whether a signal has been received.
    """

    def __init__(self, active: bool, repeated: bool) -> None:
        self._repeated = repeated
        self._active = active and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self.received = False

    def __enter__(self) -> Self:
        if self._active:
            self._before = {number: signal.signal(number, self._catch) for number in stop_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.received and not self._repeated:
            raise KeyboardInterrupt
        self.received = True
