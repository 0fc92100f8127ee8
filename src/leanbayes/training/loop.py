"""The steps of one stage: schedules, updates, hooks, and log entries and checkpoints when they are due."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from leanbayes.core.noise import mix
from leanbayes.data import Batches
from leanbayes.errors import FileFormatError, NotFiniteError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.method import Training
from leanbayes.training.averaging import MovingAverage
from leanbayes.training.captured_step import CapturedStep, not_captured, obstacle
from leanbayes.training.checkpoints import LoopState, restore_optimizer
from leanbayes.training.journal import Journal
from leanbayes.training.learning_rates import LearningRates
from leanbayes.training.optimizer_step import OptimizerStep, TakesSteps
from leanbayes.training.plan import StagePlan
from leanbayes.training.sharded_run import cut_state, gathered_state
from leanbayes.training.stopping import StopSignals

_REMEDY = "lower the learning rate, clip the gradient, or check the data for NaN."


class Loop:
    """Takes the remaining steps of one stage.

    Args:
        plan: The stage to train.
        training: What the hooks of the method see, with the model and its optimizers. The loop keeps it up to date.
        batches: This process's parts of the training batches.
        accelerator: The accelerator of the run.
        journal: Where the results go.
        evaluate: Returns the scores of a model on the held-out split.
        stop: The signals that ask the loop to stop.
        state: The state of the checkpoint to continue from, or None at the start of the stage.
    """

    def __init__(
        self,
        plan: StagePlan,
        training: Training,
        batches: Batches,
        accelerator: Accelerator,
        journal: Journal,
        evaluate: Callable[[BayesianModel], dict[str, float]],
        stop: StopSignals,
        state: LoopState | None,
    ) -> None:
        self._number, self._method, self._recipe = plan.number, plan.method, plan.recipe
        self._training, self._batches, self._accelerator = training, batches, accelerator
        self._journal, self._evaluate, self._stop = journal, evaluate, stop
        self._rates = LearningRates(training.optimizers)
        self._forward = vars(training.model)["forward"]
        self._is_sharded = training.model.root_units is not None
        prepared = training.model if self._is_sharded else accelerator.prepare(training.model)
        step = OptimizerStep(prepared, training, self._recipe, accelerator, journal.say)
        self._temperature, self._loss_sum, self._loss_count = step.temperature, step.loss_sum, 0
        self._last_checkpoint = time.monotonic()
        if state is not None:
            if len(state["optimizers"]) != len(training.optimizers):
                raise FileFormatError("The checkpoint has other optimizers than this training: overwrite the run.")
            for optimizer, saved in zip(training.optimizers, state["optimizers"], strict=True):
                restore_optimizer(optimizer, cut_state(optimizer, saved) if self._is_sharded else saved)
            if accelerator.scaler is not None:
                accelerator.scaler.load_state_dict(state["scaler"])
            self._loss_sum += state["loss_sum"]
            self._loss_count = state["loss_count"]
        self._optimizer_step = self._captured(step) if self._recipe.compile else step
        self._average: MovingAverage | None = None
        if self._recipe.average is not None:
            averages = None if state is None else state["average"]
            self._average = MovingAverage(training.model, self._recipe.average, training.average, averages)

    def _captured(self, step: OptimizerStep) -> TakesSteps:
        """Return the step as a CUDA graph, or the step itself if it cannot be captured."""
        reason = obstacle(self._recipe, self._accelerator)
        if reason is None:
            return CapturedStep(step, self._rates, self._training, self._method, self._journal.say)
        self._journal.say(not_captured(reason))
        return step

    def run(self) -> None:
        """Take the steps, epoch by epoch. The stage ends with a checkpoint and, if it averages, the averaged model."""
        training, journal, length = self._training, self._journal, len(self._batches)
        journal.start()
        try:
            while training.step < training.steps:
                # Epochs are counted over all stages, so that each has its own order of the data.
                epoch, skipped = divmod(journal.steps_done, length)
                started = journal.seconds()
                parts = iter(self._batches.epoch(epoch, skipped))
                for _ in range(skipped, length):
                    self._step(parts)
                    if journal.steps_done % length == 0:
                        self._end_epoch(epoch + 1, None if skipped else started)
                    elif training.step % self._recipe.log_every == 0:
                        self._log()
                    if self._any_process(self._stop.received):
                        self._checkpoint()
                        raise KeyboardInterrupt(
                            f"Stopped at step {journal.steps_done}; run the same command again to continue."
                        )
                    if self._checkpoint_is_due():
                        self._checkpoint()
            self._checkpoint()
            if self._average is not None:
                self._average.adopt()
        finally:
            vars(training.model).pop("_original_forward", None)  # accelerate's mixed precision sets this
            vars(training.model)["forward"] = self._forward  # and replaces this
            self._accelerator.free_memory()

    # -- one step -----------------------------------------------------------------------------------------------------

    def _step(self, parts: Iterator[tuple[Any, Tensor]]) -> None:
        training, recipe, accelerator = self._training, self._recipe, self._accelerator
        self._rates.set(recipe.lr_factor(training.step, training.steps))
        training.temperature = recipe.temperature_at(training.step, training.steps)
        self._temperature.fill_(training.temperature)
        first, count = accelerator.process_index, accelerator.num_processes
        places = range(first, count * recipe.accumulate, count)
        try:
            self._optimizer_step.take(parts, [mix(recipe.seed, self._journal.steps_done, place) for place in places])
        except NotFiniteError as error:
            raise self._journal.failure(str(error)) from None
        self._loss_count += 1
        self._method.after_step(training)
        if self._average is not None:
            self._average.update(training.step)
        training.step += 1
        self._journal.step_done()

    # -- between steps ------------------------------------------------------------------------------------------------

    def _end_epoch(self, epoch: int, started: float | None) -> None:
        """Evaluate and log. `started` is when the epoch started, or None if it was resumed in the middle."""
        seconds = None if started is None else self._journal.seconds() - started
        every, validation = self._recipe.evaluate_every, None
        if every and epoch % every == 0 and epoch < self._recipe.epochs:  # the run evaluates the final model
            averaged = contextlib.nullcontext() if self._average is None else self._average.averaged()
            with self._journal.paused(), averaged:
                validation = self._evaluate(self._training.model)
        self._log(epoch, validation)
        self._journal.epoch_done(seconds)

    @torch.no_grad()
    def _log(self, epoch: int | None = None, validation: dict[str, float] | None = None) -> None:
        """Log the mean loss since the last entry, over all processes, and the state of the posterior."""
        training, bnn = self._training, self._training.model
        with self._journal.paused():
            loss = training.average(self._loss_sum / self._loss_count).item()
            if not math.isfinite(loss):
                raise self._journal.failure(f"The loss is {loss}: {_REMEDY}")
            self._loss_sum.zero_()
            self._loss_count = 0
            values = {"loss": loss / bnn.summed_members}  # the loss of an ensemble is the sum over its members
            if len(bnn.layout):
                values["kl"] = bnn.kl(torch.Generator().manual_seed(0)).item()
                values["sigma"] = bnn.posterior.mean_std().item()
            values["temperature"] = training.temperature
            values["lr"] = self._rates.first
        self._journal.log(values, epoch=epoch, validation=validation)

    def _checkpoint_is_due(self) -> bool:
        minutes, steps = self._recipe.checkpoint_minutes, self._recipe.checkpoint_steps
        if steps is not None and self._journal.steps_done % steps == 0:
            return True
        return self._any_process(time.monotonic() - self._last_checkpoint > 60 * minutes)

    def _any_process(self, condition: bool) -> bool:
        """Whether the condition holds in any process. Several processes exchange it only after a log entry."""
        if self._accelerator.num_processes == 1:
            return condition
        return self._loss_count == 0 and self._training.average(self._loss_sum.new_tensor(condition)).item() > 0

    def _optimizer_states(self) -> list[dict[str, Any]]:
        states, first = self._rates.optimizer_states(), self._accelerator.is_main_process
        return [gathered_state(state, first) for state in states] if self._is_sharded else states

    def _checkpoint(self) -> None:
        """Write a checkpoint. All processes take part."""
        if not self._journal.has_checkpoints:
            return
        training, scaler = self._training, self._accelerator.scaler
        with self._journal.paused():
            loss_sum = training.average(self._loss_sum).item()
            if not math.isfinite(loss_sum):
                raise self._journal.failure(f"The loss is NaN or infinite: {_REMEDY}")
            state: LoopState = {
                "stage": self._number,
                "step": training.step,
                "optimizers": self._optimizer_states(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "loss_sum": loss_sum,
                "loss_count": self._loss_count,
            }
            if self._average is not None:
                state["average"] = self._average.state()
            self._journal.checkpoint(training.model, state)
        self._last_checkpoint = time.monotonic()
