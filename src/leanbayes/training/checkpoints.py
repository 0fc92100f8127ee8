"""Checkpoints of a run: folders that appear complete or not at all, of which the last few are kept.

Each holds a model file, the state of the training, and the SHA-256 digests of both, which are checked on loading.
"""

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from leanbayes.core.files import PART, reason_of, sync_folder, system_error
from leanbayes.core.json_values import check_shape, json_text, read_untrusted
from leanbayes.deploy.loading import load
from leanbayes.deploy.model_file import save
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.model.bayesian import BayesianModel

_MODEL, _STATE, _DIGESTS = "model.safetensors", "training.pt", "digests.json"
_NAME = re.compile(rf"step-(\d{{9,}})({re.escape(PART)})?")
_SHAPE = {
    **dict.fromkeys(("stage", "step", "steps_done", "loss_count", "processes"), int),
    **dict.fromkeys(("loss_sum", "seconds"), float),
    "optimizers": [{"state": dict, "param_groups": [dict]}],
    "scaler": (None, dict),
    "history": [{"step": int, "seconds": float}],
    "costs": {str: Any},
    "average?": list,
}
_FORMER_OPTIMIZERS = "optimisers"  # the key in the files of version 0.1


class LoopState(TypedDict):
    """The state of a loop, without its model. `loss_sum` and `loss_count` are those since the last log entry.

    `average` has the tensors of a `MovingAverage`. Checkpoints of trainings without one do not have it.
    """

    stage: int
    step: int
    optimizers: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    loss_sum: float
    loss_count: int
    average: NotRequired[list[Tensor]]


class TrainingState(LoopState):
    """The state of a training, without its model: that of its loop, and the results over all stages."""

    steps_done: int
    history: list[dict[str, Any]]
    costs: dict[str, Any]
    seconds: float
    processes: int


class DamagedCheckpoint(FileFormatError):
    """Raised if a checkpoint does not hold what was written to it."""


class Checkpoints:
    """The checkpoints in a folder, named by their step.

    Args:
        folder: The folder of all checkpoints.
        keep: The number of checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return [path for path in self._own() if path.suffix != PART]

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        return next(reversed(self.all()), None)

    def clean(self) -> None:
        """Remove checkpoints that a killed process left half written or half deleted."""
        for path in self._own():
            if path.suffix == PART:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint."""
        going = path.with_suffix(PART)  # a half deleted checkpoint must not have the name of a complete one
        shutil.rmtree(going, ignore_errors=True)
        os.rename(path, going)
        shutil.rmtree(going, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove all checkpoints, and their folder unless it holds something else."""
        self.clean()
        for path in self.all():
            self.remove(path)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _own(self) -> list[Path]:
        """Return the folders with the name of a checkpoint, finished or not, ordered by step."""
        found = ((_NAME.fullmatch(path.name), path) for path in self.folder.glob("step-*") if path.is_dir())
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    # -- writing ------------------------------------------------------------------------------------------------------

    def save(self, step: int, bnn: BayesianModel, state: TrainingState) -> None:
        """Write a checkpoint and delete the oldest. If writing fails, all existing checkpoints stay."""
        target = self.folder / f"step-{step:09d}"
        part = target.with_suffix(PART)
        if target.exists():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save(bnn, part / _MODEL)
            with open(part / _STATE, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            with open(part / _DIGESTS, "w") as text:
                json.dump({name: _digest(part / name) for name in (_MODEL, _STATE)}, text)
                text.flush()
                os.fsync(text.fileno())
            sync_folder(part)
            os.rename(part, target)
            sync_folder(self.folder)
        except (OSError, RuntimeError, LeanBayesError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(part, ignore_errors=True)
            cause = system_error(error)
            if cause is None:
                raise
            latest = self.latest()
            older = f"the checkpoint {latest.name} is intact" if latest else "there is no older checkpoint"
            raise LeanBayesError(
                f"Cannot write the checkpoint {target.name} to {self.folder} ({reason_of(cause)}): free disk space or "
                f"choose another folder; {older}."
            ) from None
        for old in self.all()[: -self.keep]:
            self.remove(old)

    def take_part(self, bnn: BayesianModel) -> None:
        """Take part in `save` of a sharded model, which another process calls."""
        save(bnn, self.folder / _MODEL)

    # -- reading ------------------------------------------------------------------------------------------------------

    def latest_intact(self) -> Path | None:
        """Return the newest checkpoint with the digests that were written, or None."""
        for path in reversed(self.all()):
            with contextlib.suppress(FileFormatError):
                if _has_digests(path):
                    return path
        return None

    def load_latest(self, network: nn.Module) -> tuple[Path, BayesianModel, TrainingState, dict[Path, str]] | None:
        """Load the newest intact checkpoint, or return None if there are no checkpoints.

        Returns:
            The checkpoint, its model and state, and the newer checkpoints that are damaged, with what is wrong.
        """
        damaged: dict[Path, str] = {}
        for path in reversed(self.all()):
            try:
                return path, *self.load(path, network), damaged
            except DamagedCheckpoint as error:
                damaged[path] = str(error).rstrip(".")
        if damaged:
            problem = next(iter(damaged.values()))
            raise FileFormatError(
                f"{problem}, and no older one is intact: overwrite the run (--overwrite) to train it again."
            )
        return None

    def load(self, path: Path, network: nn.Module) -> tuple[BayesianModel, TrainingState]:
        """Read a checkpoint. `network` has the architecture of the saved model."""
        intact = _has_digests(path)
        try:
            bnn = load(path / _MODEL, network)
            state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
            if _FORMER_OPTIMIZERS in state:
                state["optimizers"] = state.pop(_FORMER_OPTIMIZERS)
            missing = TrainingState.__required_keys__ - state.keys()
            if missing:
                raise KeyError(f"{_STATE} has no {min(missing)}")
            _check_state(state)
        except MemoryError:
            raise
        except Exception as error:  # a damaged file may raise anything
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            if isinstance(error, pickle.UnpicklingError):  # torch would advise to load it without its checks
                reason = f"{_STATE} holds more than tensors and plain values"
            if intact:
                raise FileFormatError(f"The checkpoint {path} is intact, but cannot be loaded ({reason}).") from None
            raise DamagedCheckpoint(f"The checkpoint {path} cannot be read ({reason}).") from None
        return bnn, state


def _check_state(state: Any) -> None:
    """Raise a ValueError or TypeError for a state whose values have other types than `TrainingState`."""
    check_shape(state, _SHAPE)
    if min(state[name] for name in ("stage", "step", "steps_done", "loss_count")) < 0 or state["processes"] < 1:
        raise ValueError(f"{_STATE} has a negative number")
    json_text([state["history"], state["costs"]])  # which will be written to the record


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer the state that a checkpoint has; raise an error if it does not fit."""
    try:
        optimizer.load_state_dict(saved)
        fits = all(isinstance(group["lr"], (int, float, Tensor)) for group in optimizer.param_groups)
        for parameter, values in optimizer.state.items():
            sizes = {tensor.shape for tensor in values.values() if isinstance(tensor, Tensor) and tensor.dim()}
            fits = fits and sizes <= {parameter.shape, torch.Size([1])}
        if not fits:
            raise ValueError("its values have other types or shapes")
    except Exception as error:  # a changed state may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise FileFormatError(
            f"The state of the optimizer in the checkpoint does not fit this training ({reason}): overwrite the run "
            "(--overwrite) to train it again."
        ) from None


def _digest(path: Path) -> str:
    if not path.is_file() and path.exists():  # a pipe or a device could be endless
        raise ValueError(f"{path.name} is not a regular file")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_digests(path: Path) -> bool:
    """Compare a checkpoint with its digests, and raise an error if it differs. Version 0.1 wrote no digests."""
    try:
        if not (path / _DIGESTS).exists():
            return False
        written = read_untrusted(path / _DIGESTS)
        found = {name: _digest(path / name) for name in (_MODEL, _STATE)}
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"The checkpoint {path} has no {Path(error.filename).name}.") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"The checkpoint {path} is damaged ({_DIGESTS} cannot be read: {error}).") from None
    except OSError as error:
        kind = DamagedCheckpoint if error.errno == errno.EIO else FileFormatError
        raise kind(f"The checkpoint {path} cannot be read ({reason_of(error)}).") from None
    if written != found:
        wrong = [name for name in found if not isinstance(written, dict) or written.get(name) != found[name]]
        raise DamagedCheckpoint(
            f"The checkpoint {path} is damaged ({' and '.join(wrong) or _DIGESTS} changed after it was written)."
        )
    return True
