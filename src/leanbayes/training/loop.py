"""The steps of one stage: loss, gradients, optimisers, hooks, and now and then a log entry or a checkpoint."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leanbayes.errors import NotFiniteError
from leanbayes.method import Method, Training
from leanbayes.noise import mix
from leanbayes.objective import elbo
from leanbayes.training.recipe import Recipe

if TYPE_CHECKING:
    from leanbayes.training.run import Run

_REMEDY = "lower the learning rate, clip the gradient, or look for NaN in the data."


class Loop:
    """Takes the steps of a stage that are left; `state` is that of a checkpoint."""

    def __init__(
        self, run: "Run", number: int, recipe: Recipe, method: Method, training: Training, state: dict[str, Any] | None
    ) -> None:
        self._run, self._number, self._recipe, self._method, self._training = run, number, recipe, method, training
        self._accelerator, self._clock = run.accelerator, run.clock
        for optimiser in training.optimisers:
            for group in optimiser.param_groups:
                group["full_lr"] = group["lr"]
        self._model = self._accelerator.prepare(training.model)
        device = self._accelerator.device
        self._temperature = torch.zeros((), device=device)  # a tensor, so that a compiled loss need not be made anew
        self._loss = torch.compile(self._plain_loss) if recipe.compile else self._plain_loss
        self._loss_sum, self._loss_count = torch.zeros((), dtype=torch.float64, device=device), 0
        self._last_checkpoint = time.monotonic()
        if state is not None:
            for optimiser, saved in zip(training.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            if self._accelerator.scaler is not None:
                self._accelerator.scaler.load_state_dict(state["scaler"])
            self._loss_sum, self._loss_count = self._loss_sum + state["loss_sum"], state["loss_count"]

    def run(self) -> None:
        """Take the steps, epoch by epoch; the stage ends with a checkpoint."""
        training, run = self._training, self._run
        self._clock.start()
        try:
            while training.step < training.steps:
                # Epochs are counted over all stages, so that no two have the same order.
                epoch, skipped = divmod(run.steps_done, len(run.batches))
                begun = self._clock.read()
                parts = iter(run.batches.epoch(epoch, skipped))
                for _ in range(skipped, len(run.batches)):
                    self._step(parts)
                    run.progress.advance()
                    if run.steps_done % len(run.batches) == 0:
                        self._end_of_epoch(epoch + 1, None if skipped else begun)
                    elif training.step % self._recipe.log_every == 0:
                        self._log({})
                    if self._all_agree(run.stop.came):
                        self._checkpoint()
                        raise KeyboardInterrupt(
                            f"Stopped at step {run.steps_done}; the same command goes on from there."
                        )
                    if self._checkpoint_is_due():
                        self._checkpoint()
            self._checkpoint()
        finally:
            for name in ("forward", "_original_forward"):  # accelerate's mixed precision leaves its own there
                vars(training.model).pop(name, None)
            self._accelerator.free_memory()

    def _plain_loss(self, x: Any, y: Tensor) -> Tensor:
        return elbo(
            self._model,
            x,
            y,
            num_data=self._training.num_data,
            temperature=self._temperature,
            samples=self._recipe.samples,
        )

    def _step(self, parts: Iterator[tuple[Any, Tensor]]) -> None:
        training, recipe, accelerator = self._training, self._recipe, self._accelerator
        factor = recipe.lr_factor(training.step, training.steps)
        for optimiser in training.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["full_lr"] * factor
        training.temperature = recipe.temperature_at(training.step, training.steps)
        self._method.before_step(training)
        self._temperature.fill_(training.temperature)  # which the method may have changed
        for number in range(recipe.accumulate):
            training.batch = x, y = next(parts)
            place = number * accelerator.num_processes + accelerator.process_index
            torch.manual_seed(mix(recipe.seed, self._run.steps_done, place))  # for the network's own dropout
            last = number == recipe.accumulate - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self._model):
                with accelerator.autocast():
                    loss = self._loss_or_stop(x, y)
                part = loss / recipe.accumulate
                (part if accelerator.scaler is None else accelerator.scaler.scale(part)).backward()
            self._loss_sum += loss.detach() / recipe.accumulate
        self._update()
        self._loss_count += 1
        self._method.after_step(training)
        training.step += 1
        self._run.steps_done += 1

    def _update(self) -> None:
        """Let the optimisers take a step; with fp16 both see gradients of one scale, or neither steps."""
        training, scaler = self._training, self._accelerator.scaler
        if self._recipe.clip is not None:
            for optimiser in training.optimisers if scaler is not None else ():
                scaler.unscale_(optimiser)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), self._recipe.clip)
        for optimiser in training.optimisers:
            optimiser.step() if scaler is None else scaler.step(optimiser)
        if scaler is not None:
            scaler.update()
        for optimiser in training.optimisers:
            optimiser.zero_grad()

    def _loss_or_stop(self, x: Any, y: Tensor) -> Tensor:
        try:
            return self._loss(x, y)
        except NotFiniteError as error:
            raise self._run.stopped(str(error)) from None

    def _checkpoint_is_due(self) -> bool:
        minutes, steps = self._recipe.checkpoint_minutes, self._recipe.checkpoint_steps
        if steps is not None and self._run.steps_done % steps == 0:
            return True
        return self._all_agree(time.monotonic() - self._last_checkpoint > 60 * minutes)

    def _all_agree(self, wish: bool) -> bool:
        """Whether any process wishes it; they come together for this after a log entry, and one alone need not."""
        if self._accelerator.num_processes == 1:
            return wish
        return self._loss_count == 0 and self._run.average(self._loss_sum.new_tensor(wish)).item() > 0

    def _end_of_epoch(self, epoch: int, begun: float | None) -> None:
        """Score on the held-out split; `begun` is when the epoch began, if it was a whole one."""
        costs = self._run.record.values["costs"]
        entry: dict[str, Any] = {"epoch": epoch}
        if begun is not None:
            costs.setdefault("epoch_seconds", []).append(self._clock.read() - begun)
        every = self._recipe.evaluate_every
        if every and epoch % every == 0 and epoch < self._run.recipe.epochs:  # the last is scored when all is done
            with self._clock.stopped():
                entry["validation"] = self._run.evaluate(self._training.model, samples=1)
            self._run.progress.log(entry["validation"], "validation")
        self._log(entry)
        costs["train_seconds"] = self._clock.read()
        if self._accelerator.device.type == "cuda":
            costs["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self._accelerator.device)

    @torch.no_grad()
    def _log(self, entry: dict[str, Any]) -> None:
        """Add the loss since the last entry, over all processes, and how the posterior stands, to the history."""
        training, run = self._training, self._run
        bnn, history = training.model, run.record.values["history"]
        with self._clock.stopped():
            loss = run.average(self._loss_sum / self._loss_count).item()
            if not math.isfinite(loss):
                raise run.stopped(f"The loss is {loss}: {_REMEDY}")
            self._loss_sum.zero_()
            self._loss_count = 0
            values = {"loss": loss / (bnn.members or 1)}  # an ensemble's is the sum of its members'
            if len(bnn.layout):
                values["kl"] = bnn.kl(torch.Generator().manual_seed(0)).item()
                stds = bnn.posterior.variance().sqrt()
                values["sigma"] = (stds.sum() / (stds > 0).sum().clamp_min(1)).item()  # of the weights that have one
            values["temperature"] = training.temperature
            values["lr"] = training.optimisers[0].param_groups[0]["lr"]
        seconds = self._clock.read()
        before = history[-1] if history else {"step": 0, "seconds": 0.0}
        examples = (run.steps_done - before["step"]) * run.batches.batch_size
        values["examples_per_second"] = examples / (seconds - before["seconds"])
        run.progress.log(values)
        run.progress.line()
        history.append({"step": run.steps_done, "seconds": seconds, **values, **entry})

    def _checkpoint(self) -> None:
        """Write a checkpoint; all processes come together for it."""
        if self._run.checkpoints is None:
            return
        with self._clock.stopped():
            loss_sum = self._run.average(self._loss_sum).item()
            if not math.isfinite(loss_sum):
                raise self._run.stopped(f"The loss is NaN or infinite: {_REMEDY}")
            scaler = self._accelerator.scaler
            state = {
                "loss_sum": loss_sum,
                "loss_count": self._loss_count,
                "scaler": None if scaler is None else scaler.state_dict(),
            }
            self._run.checkpoint(self._number, self._training, state)
        self._last_checkpoint = time.monotonic()
