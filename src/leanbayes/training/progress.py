"""The progress of a training: a bar in a terminal, plain lines elsewhere, and scalars for TensorBoard."""

import contextlib
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from leanbayes.core.files import reason_of
from leanbayes.errors import LeanBayesError, printable

_SHOWN = {
    "loss": ("loss", "{:.4g}"),
    "kl": ("KL", "{:.3g}"),
    "sigma": ("σ", "{:.3g}"),
    "accuracy": ("accuracy", "{:.2%}"),
    "rmse": ("RMSE", "{:.4g}"),
    "nll": ("NLL", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
    "examples_per_second": ("examples/s", "{:.0f}"),
}
_IN_THE_BAR = ("loss", "kl", "sigma", "accuracy", "rmse", "examples_per_second")
_HELD_OUT = ("accuracy", "rmse")  # of the values in the bar
_TITLE_WIDTH = 30  # characters of the title in the bar, so that its other columns fit into 80
_SECONDS_BETWEEN_LINES = 10
_LOG = logging.getLogger("leanbayes")


class Progress:
    """Shows the progress of one training. Use it as a context manager.

    Args:
        title: The name of what is trained.
        total: The number of steps.
        shown: Whether to print anything. Only the main process does.
        tensorboard: The folder for TensorBoard, or None.
        done: The number of steps done before.

    Attributes:
        total: The number of steps.
    """

    def __init__(self, title: str, total: int, shown: bool, tensorboard: Path | None, done: int = 0) -> None:
        self._title, self.total, self._done = printable(title), total, done
        self._values: dict[str, float] = {}
        self._bar: Any = None
        self._writer: Any = None
        self._console: Any = None
        if shown:
            from rich.console import Console

            self._console = Console(stderr=True)
        self._tensorboard = tensorboard
        self._start = self._last_line = time.monotonic()
        self._first = done

    def __enter__(self) -> Self:
        if self._tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            with self._clear_errors():
                self._writer = SummaryWriter(str(self._tensorboard), purge_step=self._done + 1)
        if self._console is not None and self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            whole = Column(no_wrap=True, max_width=_TITLE_WIDTH, overflow="ellipsis")
            # In a narrow terminal the values are cut, because they are the only column that can shrink.
            values = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            self._bar = Bar(
                TextColumn("{task.description}", markup=False, table_column=whole),
                BarColumn(bar_width=10),
                MofNCompleteColumn(table_column=_column_of(f"{self.total}/{self.total}")),
                TimeRemainingColumn(compact=True, table_column=_column_of("00:00:00")),
                TextColumn("{task.fields[values]}", markup=False, table_column=values),
                console=self._console,
                expand=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self.total, completed=self._done, values="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):  # the terminal is closed
                self._bar.stop()
        if self._writer is not None:
            with self._clear_errors(unless=error):
                self._writer.close()

    @contextlib.contextmanager
    def _clear_errors(self, unless: BaseException | None = None) -> Iterator[None]:
        """Raise a clear error if TensorBoard cannot write its file, unless there is another error already."""
        try:
            yield
        except OSError as error:
            if unless is None:
                raise LeanBayesError(
                    f"Cannot write to {self._tensorboard} ({reason_of(error)}): free disk space, or choose a writable "
                    "folder; checkpoints are intact."
                ) from None

    def stage(self, name: str) -> None:
        """Show the name of the stage that starts."""
        self._title = printable(name)
        if self._bar is not None:
            self._bar.update(self._task, description=self._title)

    def advance(self) -> None:
        """Count one step."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)

    def log(self, values: dict[str, float], prefix: str = "train") -> None:
        """Show new values and write them for TensorBoard."""
        self._values |= {name: value for name, value in values.items() if name in _IN_THE_BAR}
        if self._writer is not None:
            with self._clear_errors():
                for name, value in values.items():
                    self._writer.add_scalar(f"{prefix}/{name}", value, self._done)
        if self._bar is not None:
            self._bar.update(self._task, values=self._text())

    def line(self) -> None:
        """Print the state of the training, if there is no terminal and the last line is not too recent."""
        now = time.monotonic()
        if self._console is None or self._bar is not None or now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        left = (now - self._start) / max(self._done - self._first, 1) * (self.total - self._done)
        text = f"{self._title}  step {self._done}/{self.total}  {self._text()}  {duration(left)} left"
        self._print(text)

    def say(self, text: str) -> None:
        """Print a sentence."""
        if self._console is not None:
            self._print(text)

    def warn(self, text: str) -> None:
        """Print a sentence that matters also to those who do not watch the training: then it goes to the log."""
        if self._console is None:
            _LOG.warning("%s: %s", self._title, printable(text))
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a training goes on if nobody reads its output anymore
            self._console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    def _text(self) -> str:
        return in_words(self._values, "  ", _HELD_OUT)


def in_words(values: Mapping[str, float], between: str = ", ", held_out: Collection[str] = ()) -> str:
    """Return the most important metrics as text, and say of some that they are of the held-out split."""
    known = ((key, *_SHOWN[key], values[key]) for key in _SHOWN if key in values)
    return between.join(
        f"{'held-out ' if key in held_out else ''}{label} {form.format(value)}" for key, label, form, value in known
    )


def _column_of(longest: str) -> Any:
    """Return a column of the bar that never shrinks."""
    from rich.table import Column

    return Column(no_wrap=True, min_width=len(longest))


def say(shown: bool, text: str) -> None:
    """Print a sentence outside of a training."""
    if shown:
        print(printable(text), file=sys.stderr)


def duration(seconds: float) -> str:
    """Return a number of seconds in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
