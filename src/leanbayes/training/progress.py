"""What a training shows: a bar in a terminal, plain lines elsewhere, and scalars for tensorboard."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from leanbayes.errors import LeanBayesError

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
_SECONDS_BETWEEN_LINES = 10


class Progress:
    """Shows one training; used as a context. `shown=False` says nothing, as in all processes but the first."""

    def __init__(self, title: str, total: int, shown: bool, tensorboard: Path | None, done: int = 0) -> None:
        self._title, self._total, self._done = title, total, done
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

            with self._told_clearly():
                self._writer = SummaryWriter(str(self._tensorboard), purge_step=self._done + 1)
        if self._console is not None and self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}", table_column=Column(no_wrap=True)),  # one line, whatever the width
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, values="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._writer is not None:
            with self._told_clearly(unless=error):
                self._writer.close()

    @contextlib.contextmanager
    def _told_clearly(self, unless: BaseException | None = None) -> Iterator[None]:
        """Tell in one sentence that tensorboard's file cannot be written, unless there is another error to tell."""
        try:
            yield
        except OSError as error:
            if unless is None:
                raise LeanBayesError(
                    f"Cannot write to {self._tensorboard} ({error.strerror}): make room there, or choose a folder that "
                    "is writable; checkpoints are intact."
                ) from None

    def stage(self, name: str) -> None:
        """Tell which part of the training begins."""
        self._title = name
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def advance(self) -> None:
        """Count one step."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)

    def log(self, values: dict[str, float], prefix: str = "train") -> None:
        """Take in new values: they are shown, and written for tensorboard."""
        self._values |= {name: value for name, value in values.items() if name in _IN_THE_BAR}
        if self._writer is not None:
            with self._told_clearly():
                for name, value in values.items():
                    self._writer.add_scalar(f"{prefix}/{name}", value, self._done)
        if self._bar is not None:
            self._bar.update(self._task, values=self._text())

    def line(self) -> None:
        """Without a terminal, print where the training stands, though not too often."""
        now = time.monotonic()
        if self._console is None or self._bar is not None or now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        left = (now - self._start) / max(self._done - self._first, 1) * (self._total - self._done)
        text = f"{self._title}  step {self._done}/{self._total}  {self._text()}  {_duration(left)} left"
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """Print a sentence."""
        if self._console is not None:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _text(self) -> str:
        return in_words(self._values, "  ")


def in_words(values: Mapping[str, float], between: str = ", ") -> str:
    """Write the figures that people look at first."""
    known = ((label, form, values[key]) for key, (label, form) in _SHOWN.items() if key in values)
    return between.join(f"{label} {form.format(value)}" for label, form, value in known)


def say(shown: bool, text: str) -> None:
    """Print a sentence where no training is under way."""
    if shown:
        print(text, file=sys.stderr)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
