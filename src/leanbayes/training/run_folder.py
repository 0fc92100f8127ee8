"""The folder of a run: one process at a time trains in it, and only files that a run wrote are ever removed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from leanbayes.core.files import LockedError, locked, reason_of, remove_parts
from leanbayes.deploy.loading import load
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.training.checkpoints import Checkpoints
from leanbayes.training.record import read_record

RECORD, MODEL, CHECKPOINTS, TENSORBOARD = "run.json", "model.safetensors", "checkpoints", "tensorboard"
_LOCK = "run.lock"


def checked_folder(out: str | os.PathLike[str]) -> Path:
    """Return the path of a run's folder, which need not exist, and raise an error if it cannot be one."""
    if not os.fspath(out):
        raise LeanBayesError("out='' names no folder: give one such as 'runs/first', or '.' for the current folder.")
    folder = Path(out).expanduser()
    for path in (folder, *folder.parents):
        if os.path.exists(path) and not os.path.isdir(path):
            raise LeanBayesError(f"{path} is a file: give a folder for the run.")
    return folder


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a folder, which is created if there is none."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / _LOCK))
        except LockedError as error:
            process = "" if error.process is None else f" (process {error.process})"
            raise LeanBayesError(
                f"Another fit is training in {folder}{process}: wait until it ends, or choose another folder."
            ) from None
        except OSError as error:
            raise LeanBayesError(f"Cannot write to {folder} ({reason_of(error)}): choose a writable folder.") from None
        yield


def remove_run(folder: Path) -> None:
    """Remove the run in a folder. Raise an error if the folder holds such files, but no run."""
    found = [name for name in (RECORD, MODEL, CHECKPOINTS, TENSORBOARD) if (folder / name).exists()]
    if not found:
        return
    try:
        read_record(folder)
    except LeanBayesError:
        raise LeanBayesError(
            f"{folder} holds {' and '.join(found)}, but no run.json that fit wrote, so nothing in it is overwritten: "
            "choose another folder, or remove them yourself."
        ) from None
    try:
        Checkpoints(folder / CHECKPOINTS, 1).remove_all()
        for events in (folder / TENSORBOARD).glob("events.out.tfevents.*"):
            events.unlink()
        with contextlib.suppress(OSError):
            (folder / TENSORBOARD).rmdir()
        (folder / MODEL).unlink(missing_ok=True)
        (folder / RECORD).unlink()  # last: if this is stopped, the rest can still be overwritten
    except OSError as error:
        raise LeanBayesError(
            f"Cannot remove the run in {folder} ({reason_of(error)}): choose another folder."
        ) from None


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written."""
    remove_parts(folder, (RECORD, MODEL))
    Checkpoints(folder / CHECKPOINTS, 1).clean()


def load_trained(folder: Path, network: nn.Module) -> BayesianModel:
    """Load the model of a finished run. The error for a damaged one says whether a checkpoint can restore it."""
    try:
        return load(folder / MODEL, network)
    except FileFormatError as error:
        intact = Checkpoints(folder / CHECKPOINTS, 1).latest_intact()
        if intact is None:
            raise
        problem = str(error).partition(": save the model")[0].rstrip(".")
        raise FileFormatError(
            f"The model of the run in {folder} cannot be read ({problem}), but its checkpoint {intact.name} is intact: "
            "run the same fit command again to restore the model."
        ) from None
