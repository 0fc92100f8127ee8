"""Checkpoints: folders that appear whole or not at all, of which the last few are kept."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.files import PART, sync_folder
from leanbayes.saving import load

_MODEL, _STATE = "model.safetensors", "training.pt"


class Checkpoints:
    """The checkpoints in a folder, named by their step: the model's file, and beside it the state of the training."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """Return the finished ones, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != PART)

    def latest(self) -> Path | None:
        """Return the newest one, if there is any."""
        return next(reversed(self.all()), None)

    def clean(self) -> None:
        """Remove what a process that was killed has left half written or half deleted."""
        for leftover in self.folder.glob(f"*{PART}"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, bnn: BayesianModel, state: dict[str, Any]) -> None:
        """Write one and drop the oldest; whatever goes wrong, those that were there stay as they are."""
        target = self.folder / f"step-{step:09d}"
        part = target.with_suffix(PART)
        if target.exists():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            bnn.save(part / _MODEL)
            with open(part / _STATE, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(part)
            os.rename(part, target)
            sync_folder(self.folder)
        except (OSError, RuntimeError, LeanBayesError) as error:  # torch reports a full disk as a RuntimeError
            shutil.rmtree(part, ignore_errors=True)
            kept = self.latest()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
            older = f"the checkpoint {kept.name} is intact" if kept else "there is no older checkpoint"
            raise LeanBayesError(
                f"Cannot write the checkpoint {target.name} to {self.folder} ({reason}): make room there or choose "
                f"another folder; {older}."
            ) from None
        for old in self.all()[: -self.keep]:
            going = old.with_suffix(PART)  # so that half a checkpoint never has the name of a whole one
            os.rename(old, going)
            shutil.rmtree(going, ignore_errors=True)

    def load(self, path: Path, network: nn.Module) -> tuple[BayesianModel, dict[str, Any]]:
        """Read one; `network` is of the same architecture."""
        try:
            bnn = load(path / _MODEL, network)
            state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise FileFormatError(
                f"The checkpoint {path} cannot be read ({reason}): delete that folder to go on from "
                "the one before it, or from the start."
            ) from None
        return bnn, state
