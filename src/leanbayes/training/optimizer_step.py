"""One optimizer step: the loss of a batch, its gradients, and the updates of all optimizers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from leanbayes.model.method import Training
from leanbayes.model.objective import elbo_loss
from leanbayes.training.recipe import Recipe

Part = tuple[Any, Tensor]


class TakesSteps(Protocol):
    """What a loop needs to take a step."""

    def take(self, parts: Iterator[Part], seeds: Sequence[int]) -> None:
        """Take a step on the next parts of a batch, one per seed. The seeds are those of the network's dropout."""


class OptimizerStep:
    """Takes optimizer steps, operation by operation. A loss that cannot be compiled runs without.

    Args:
        model: The model as accelerate has prepared it.
        training: The training, with the model and its optimizers.
        recipe: The settings of the stage.
        accelerator: The accelerator of the run.
        say: Prints a sentence.

    Attributes:
        temperature: The weight of the KL, a tensor to fill before each step. So the loss is compiled only once.
        loss_sum: The sum of the losses of all steps, a tensor on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        training: Training,
        recipe: Recipe,
        accelerator: Accelerator,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._training, self._recipe, self._accelerator = model, training, recipe, accelerator
        self._say = say
        self.temperature = torch.zeros((), device=accelerator.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self._compiled = torch.compile(self._plain_loss) if recipe.compile else None

    def take(self, parts: Iterator[Part], seeds: Sequence[int]) -> None:
        """Take a step on the next parts of a batch, one per seed. The seeds are those of the network's dropout."""
        for number, seed in enumerate(seeds):
            self._training.batch = batch = next(parts)
            torch.manual_seed(seed)
            self._add_gradients(batch, last=number == len(seeds) - 1)
        self._update()

    def run(self, batch: Part) -> None:
        """Take a step on a batch of one part, without a seed."""
        self._add_gradients(batch, last=True)
        self._update()

    def _add_gradients(self, batch: Part, last: bool) -> None:
        accelerator, parts = self._accelerator, self._recipe.accumulate
        with contextlib.nullcontext() if last else accelerator.no_sync(self._model):
            with accelerator.autocast():
                loss = self._loss(batch)
            part = loss / parts
            (part if accelerator.scaler is None else accelerator.scaler.scale(part)).backward()
        self.loss_sum += loss.detach() / parts

    def _loss(self, batch: Part) -> Tensor:
        if self._compiled is not None:
            try:
                return self._compiled(*batch)
            except torch._dynamo.exc.TorchDynamoException as error:  # before the code runs
                reason = (str(error).strip().splitlines() or [""])[0].rstrip(".:")
                self._compiled = None
            loss = self._plain_loss(*batch)  # if this fails too, its error is the clearer one
            self._say(f"The loss is not compiled: {reason}.")
            return loss
        return self._plain_loss(*batch)

    def _plain_loss(self, x: Any, y: Tensor) -> Tensor:
        return elbo_loss(
            self._model,
            x,
            y,
            num_data=self._training.num_data,
            temperature=self.temperature,
            samples=self._recipe.samples,
        )

    def _update(self) -> None:
        """Update the parameters. With fp16 all optimizers see gradients of the same scale, or none takes a step."""
        training, scaler = self._training, self._accelerator.scaler
        if self._recipe.clip is not None:
            for optimizer in training.optimizers if scaler is not None else ():
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), self._recipe.clip)
        for optimizer in training.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
