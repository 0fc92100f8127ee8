"""What the folder of a run holds when `fit` is called again: a finished model, or the state to continue from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from leanbayes.core.files import reason_of
from leanbayes.deploy.loading import load
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.training.checkpoints import Checkpoints, TrainingState
from leanbayes.training.identity import check_same_run
from leanbayes.training.progress import say
from leanbayes.training.recipe import Recipe
from leanbayes.training.record import Record, read_record
from leanbayes.training.run_folder import CHECKPOINTS, MODEL, RECORD, remove_leftovers

T = TypeVar("T")


class SavedRun:
    """The run in a folder, which several processes read together.

    Args:
        folder: The folder.
        network: The plain network.
        record: What the run of this call is; that in the folder must be the same.
        recipe: The recipe of this call.
        accelerator: The accelerator of this process.
    """

    def __init__(
        self, folder: Path, network: nn.Module, record: Record, recipe: Recipe, accelerator: Accelerator
    ) -> None:
        self.folder, self.checkpoints = folder, Checkpoints(folder / CHECKPOINTS, recipe.keep)
        self._network, self._record, self._recipe, self._accelerator = network, record, recipe, accelerator
        self._problem = ""  # what is wrong with the model file of the finished run

    def agreed(self, decide: Callable[[], T]) -> T:
        """Return in every process what the main process decides. All processes raise its error."""
        found: list[Any] = [None, None]
        if self._accelerator.is_main_process:
            try:
                found[0] = decide()
            except LeanBayesError as error:
                found[1] = error
            except OSError as error:
                found[1] = LeanBayesError(f"Cannot use {self.folder} ({reason_of(error)}): choose a writable folder.")
        value, problem = broadcast_object_list(found)
        if problem is not None:
            raise problem
        return value

    def finished(self) -> BayesianModel | None:
        """Return the model of a finished run, or None if there is something to train or to restore."""
        loaded: list[BayesianModel] = []

        def is_finished() -> bool:
            if not (self.folder / RECORD).is_file():
                return False
            old = read_record(self.folder)
            check_same_run(self.folder, old, self._record.config)
            if old["status"] == "finished":
                try:
                    loaded.append(load(self.folder / MODEL, self._network))
                except FileFormatError as error:  # `latest` restores it
                    self._problem = str(error).partition(": save the model")[0].rstrip(".")
            return bool(loaded)

        if not self.agreed(is_finished):
            return None
        bnn = loaded[0] if loaded else load(self.folder / MODEL, self._network)
        return bnn.to(self._accelerator.device).eval()

    def latest(self) -> tuple[BayesianModel | None, TrainingState | None]:
        """Return the model and state of the newest intact checkpoint, or None and None to start a new run."""
        loaded: list[tuple[BayesianModel, TrainingState]] = []

        def choose() -> tuple[Path | None, list[Path]]:
            status = self._status()
            found = None if status is None else self.checkpoints.load_latest(self._network)
            problem = f"The model of the finished run in {self.folder} cannot be read ({self._problem})"
            if found is None:
                if status == "finished":
                    raise FileFormatError(
                        f"{problem}, and it has no checkpoints: overwrite the run (--overwrite) to train it again."
                    )
                return None, []
            path, bnn, state, damaged = found
            loaded.append((bnn, state))
            if status == "finished":
                say(True, f"{problem}: it is restored from {path.name}, without a later calibration.")
            for problem in damaged.values():
                say(True, f"{problem}: it is removed, and the run continues from {path.name}.")
            return path, [*damaged]

        latest, damaged = self.agreed(choose)
        bnn: BayesianModel | None = None
        state: TrainingState | None = None
        if latest is not None:
            bnn, state = loaded[0] if loaded else self.checkpoints.load(latest, self._network)
            # The counter of the noise counts the samples of one process.
            if not self._recipe.shard:
                bnn.noise.state[1] = bnn.noise.state[1] * state["processes"] // self._accelerator.num_processes
        self._accelerator.wait_for_everyone()  # no process may write before all have read

        def clean() -> None:
            for path in damaged:
                self.checkpoints.remove(path)
            remove_leftovers(self.folder)
            if not (self.folder / RECORD).exists():
                self._record.write()  # the first file, so that all others are known to be those of a run

        self.agreed(clean)
        return bnn, state

    def _status(self) -> str | None:
        """Return the status of the run in the folder, or None if there is none. Raise an error for any other run."""
        if not (self.folder / RECORD).is_file():
            if self.checkpoints.latest() is not None:
                raise LeanBayesError(
                    f"{self.folder} holds checkpoints, but no run.json that describes them: remove them, or choose "
                    "another folder."
                )
            if (self.folder / MODEL).exists():
                raise LeanBayesError(
                    f"{self.folder / MODEL} is not that of a run, and training would replace it: choose another folder."
                )
            return None
        old = read_record(self.folder)
        check_same_run(self.folder, old | {"status": "stopped"}, self._record.config)  # steps may be left to train
        return old["status"]
