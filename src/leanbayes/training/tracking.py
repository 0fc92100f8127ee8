"""Who listens to a training: the caller's `on_log`, and the trackers of accelerate (W&B, MLflow, TensorBoard, ...)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers

from leanbayes.errors import LeanBayesError

OnLog = Callable[[int, dict[str, float]], None]
_PROJECT = "leanbayes"


def checked_trackers(log_with: Any, folder: Path | None) -> list[Any]:
    """Return trackers as a list. Accelerate ignores those that are not installed; here they are an error.

    Args:
        log_with: A name, a `GeneralTracker`, or a list of them.
        folder: The folder of the run, in which some trackers write files.
    """
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]
    installed = [str(one) for one in get_available_trackers()]
    for one in wanted:
        if isinstance(one, GeneralTracker) or one == "all":
            continue
        if str(one) not in installed:
            raise LeanBayesError(
                f"log_with={one!r} is not available: install its package, or use one of "
                f"{', '.join(map(repr, installed)) or 'none'}, or an accelerate.tracking.GeneralTracker."
            )
    if folder is None and any(one in ("all", "tensorboard", "dvclive") for one in wanted if isinstance(one, str)):
        raise LeanBayesError("This tracker writes files: give a folder with out=, or use another tracker.")
    return wanted


@contextlib.contextmanager
def listening(accelerator: Accelerator, on_log: OnLog | None, config: Mapping[str, Any]) -> Iterator[OnLog]:
    """Start the trackers, and yield the function that passes metrics on. Only the main process calls `on_log`.

    Trackers that were given as objects belong to the caller, who closes them; the others are closed here.

    Args:
        accelerator: The accelerator, with the trackers to start.
        on_log: The function of the caller.
        config: The settings of the run, which trackers store.
    """
    started = bool(accelerator.log_with)
    if started:
        accelerator.init_trackers(_PROJECT, config=_flat(config))

    def log(step: int, values: dict[str, float]) -> None:
        if started:
            accelerator.log(values, step=step)
        if on_log is not None and accelerator.is_main_process:
            on_log(step, values)

    try:
        yield log
    finally:
        for tracker in accelerator.trackers if started else ():
            if not any(tracker is one for one in accelerator.log_with):
                tracker.finish()


def _flat(settings: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return nested settings as one level of numbers and strings: recipe.epochs, method.prior.scale."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{start}{name}.")
        elif isinstance(value, (bool, int, float, str)):
            found[start + name] = value
        elif value is not None:
            found[start + name] = str(value)
    return found
