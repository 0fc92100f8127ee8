"""Where the results of a run go: `run.json`, the progress display, TensorBoard and the checkpoints."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator

from leanbayes.core.parts import local_part
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.training.checkpoints import Checkpoints, LoopState, TrainingState
from leanbayes.training.clock import Clock
from leanbayes.training.progress import Progress, duration, in_words
from leanbayes.training.record import Record
from leanbayes.training.tracking import OnLog

_ESTIMATED = (2, 5)  # the steps of a run between which its speed is measured
_LONG = 3600  # seconds from which a training is called long


class Journal:
    """Collects the results of one run, and counts its steps and its seconds over all stages.

    A run makes the journal and a loop reports to it. Every process has one; only the main process writes files.

    Args:
        record: The record of the run.
        progress: The display, which is open already.
        checkpoints: The checkpoints of the run, or None if it has no folder.
        accelerator: The accelerator of the run.
        batch_size: The number of examples per step.
        state: The state of the checkpoint that the run continues from, or None.
        on_log: Gets the number of steps done and the metrics of each entry.

    Attributes:
        steps_done: The number of optimizer steps taken in all stages.
    """

    def __init__(
        self,
        record: Record,
        progress: Progress,
        checkpoints: Checkpoints | None,
        accelerator: Accelerator,
        batch_size: int,
        state: TrainingState | None,
        on_log: OnLog,
    ) -> None:
        self._record, self._progress, self._checkpoints, self._on_log = record, progress, checkpoints, on_log
        self._accelerator, self._batch_size = accelerator, batch_size
        self.steps_done = self._steps_now = 0
        self._saved: int | None = None  # the step of the last checkpoint
        self._estimate_start, self._said_long = 0.0, False
        self._clock = Clock(accelerator.device)
        if state is not None:
            self.steps_done = self._saved = state["steps_done"]
            self._clock = Clock(accelerator.device, state["seconds"])
            record.history, record.costs = state["history"], state["costs"]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Write the record now, and again with the reason if the block is stopped or fails."""
        self._write_record()
        try:
            yield
        except BaseException as error:
            self._record.status = "stopped" if isinstance(error, KeyboardInterrupt) else f"failed: {error}"
            with contextlib.suppress(LeanBayesError):  # the first error is the one to report
                self._write_record()
            raise

    def running(self) -> None:
        """Record that the run trains, and that a signal now leaves a checkpoint."""
        self._record.status = "running"
        self._write_record()

    def stage(self, name: str) -> None:
        """Show which stage starts."""
        self._progress.stage(name)

    def say(self, text: str) -> None:
        """Print a sentence."""
        self._progress.say(text)

    def warn(self, text: str) -> None:
        """Print a sentence, or log it as a warning if the progress is not shown."""
        if self._accelerator.is_main_process:
            self._progress.warn(text)

    # -- time ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to count the seconds of training."""
        self._clock.start()

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return self._clock.read()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose seconds are not counted."""
        return self._clock.stopped()

    # -- results ------------------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """Count one optimizer step."""
        self.steps_done += 1
        self._progress.advance()
        self._steps_now += 1
        if self._steps_now == _ESTIMATED[0]:
            self._estimate_start = self.seconds()
        elif self._steps_now == _ESTIMATED[1] and not self._said_long:
            self.say_if_long((self.seconds() - self._estimate_start) / (_ESTIMATED[1] - _ESTIMATED[0]))

    def say_if_long(self, seconds: float) -> None:
        """Say that the training will take hours, if the seconds of a step make it so."""
        left = seconds * (self._progress.total - self.steps_done)
        if left > _LONG:
            self._said_long = True
            self.say(
                f"This training takes about {duration(left)} on this machine ({self._progress.total:,} steps of "
                f"{seconds:.2g} s): for a first try, use fewer epochs, a smaller network or data set, or a GPU."
            )

    def log(
        self, values: dict[str, float], *, epoch: int | None = None, validation: dict[str, float] | None = None
    ) -> None:
        """Add an entry to the history and show it.

        Args:
            values: The values of this step.
            epoch: The number of epochs done, at the end of an epoch.
            validation: The scores on the held-out split, if it was evaluated.
        """
        history, seconds = self._record.history, self.seconds()
        before = history[-1] if history else {"step": 0, "seconds": 0.0}
        examples = (self.steps_done - before["step"]) * self._batch_size
        values = values | {"examples_per_second": examples / (seconds - before["seconds"])}
        if validation is not None:
            self._progress.log(validation, "validation")
        self._progress.log(values)
        self._progress.line()
        optional = {"epoch": epoch, "validation": validation}
        found = {name: value for name, value in optional.items() if value is not None}
        history.append({"step": self.steps_done, "seconds": seconds, **values, **found})
        self._pass_on(train=values, validation=validation or {})

    def _pass_on(self, **groups: Mapping[str, float]) -> None:
        """Hand metrics to the caller and to trackers, named as for TensorBoard: train/loss."""
        with self.paused():
            flat = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
            self._on_log(self.steps_done, flat)

    def epoch_done(self, seconds: float | None) -> None:
        """Update the costs after an epoch. `seconds` is its duration, or None if it was resumed in the middle."""
        costs, device = self._record.costs, self._accelerator.device
        if seconds is not None:
            costs.setdefault("epoch_seconds", []).append(seconds)
        costs["train_seconds"] = self.seconds()
        if device.type == "cuda":
            costs["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)

    def add_costs(self, costs: dict[str, int]) -> None:
        """Add costs of the trained model, such as its size."""
        self._record.costs |= costs

    def finish(self, scores: dict[str, float]) -> None:
        """Write the record of the finished run, with the scores of its model on the held-out split."""
        self._record.scores["validation"] = scores
        self._record.status = "finished"
        self._write_record()
        self._progress.say(f"Held-out split: {in_words(scores)}")
        self._pass_on(final=scores)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run writes checkpoints."""
        return self._checkpoints is not None

    def checkpoint(self, bnn: BayesianModel, state: LoopState) -> None:
        """Write a checkpoint and the record. A model with NaN or infinity is not written, but raises an error."""
        if self._checkpoints is None or self.steps_done == self._saved:
            return
        self._saved = self.steps_done
        first = self._accelerator.is_main_process
        if not first and bnn.root_units is None:
            return
        for name, parameter in bnn.named_parameters():
            if not local_part(parameter).isfinite().all():
                raise self.failure(f"{name} contains NaN or infinity: lower the learning rate or clip the gradient.")
        complete: TrainingState = {
            **state,
            "steps_done": self.steps_done,
            "history": self._record.history,
            "costs": self._record.costs,
            "seconds": self.seconds(),
            "processes": self._accelerator.num_processes,
        }
        if first:
            self._checkpoints.save(self.steps_done, bnn, complete)
            self._write_record()
        else:  # all processes gather the model
            self._checkpoints.take_part(bnn)

    def failure(self, reason: str) -> LeanBayesError:
        """Return the error of a training that cannot continue."""
        latest = self._checkpoints.latest() if self._checkpoints is not None else None
        intact = f" The checkpoint {latest.name} in {self._record.folder} is intact." if latest else ""
        return LeanBayesError(f"Training stopped at step {self.steps_done}. {reason}{intact}")

    def _write_record(self) -> None:
        if self._accelerator.is_main_process:
            self._record.write()
