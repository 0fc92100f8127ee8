"""The settings of a training, and its schedules as functions of the step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import nn

from leanbayes import config
from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError

_DEFAULTS = {"sgd": {"lr": 0.1, "weight_decay": 5e-4}, "adamw": {"lr": 1e-3, "weight_decay": 1e-2}}


@config.configurable
@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: passes over the training data, all stages together.
        batch_size: examples of one optimiser step, over all processes and accumulated parts.
        accumulate: parts that each process cuts its share of a batch into, to save memory.
        optimiser: what trains the means, norms and biases. Adam always trains the spreads.
        lr: learning rate of the means. None means 0.1 for sgd and 0.001 for adamw.
        weight_decay: weight decay of the means. None means 0.0005 for sgd and 0.01 for adamw.
        scale_lr: learning rate of the posterior's spreads, and of the noise of the data where it is learned.
        warmup: share of the steps in which the learning rates rise from 0. Then they fall as a cosine.
        temperature: weight of the KL. 1 is the plain ELBO; networks with more weights than data want a colder one.
        temperature_warmup: share of the steps in which the temperature rises linearly from 0.
        temperature_end: what the temperature moves to, linearly over the rest of the steps. None means that it stays.
        samples: draws of the weights in each training step.
        clip: largest norm of the gradient. A larger one is scaled down.
        precision: number format of the network's arithmetic. None means what `accelerate launch` says, else fp32.
        compile: run the loss through torch.compile. The first steps take a minute, the others are faster.
        channels_last: keep images and convolutions in the memory format that GPUs prefer.
        device: where to train. None means the GPU, if there is one.
        unused_parameters: let several processes train a network some of whose parameters a step may not use.
        workers: processes that read data which is not held in memory.
        evaluate_every: epochs from one evaluation on the held-out split to the next. 0 means only at the end.
        refresh_batchnorm: recompute BatchNorm's statistics under the posterior at the end.
        checkpoint_minutes: minutes from one checkpoint to the next.
        checkpoint_steps: steps from one checkpoint to the next, in addition to the minutes.
        keep: how many checkpoints to keep.
        log_every: steps from one log entry to the next.
        seed: number that all randomness follows from: first weights, data order, augmentation, dropout and draws.
    """

    epochs: int = 30
    batch_size: int = 128
    accumulate: int = 1
    optimiser: Literal["sgd", "adamw"] = "adamw"
    lr: float | None = None
    weight_decay: float | None = None
    scale_lr: float = 1e-2
    warmup: float = 0.05
    temperature: float = 0.01
    temperature_warmup: float = 0.5
    temperature_end: float | None = None
    samples: int = 1
    clip: float | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    compile: bool = False
    channels_last: bool = False
    device: Literal["cpu", "cuda"] | None = None
    unused_parameters: bool = False
    workers: int = 0
    evaluate_every: int = 1
    refresh_batchnorm: bool = True
    checkpoint_minutes: float = 5.0
    checkpoint_steps: int | None = None
    keep: int = 2
    log_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "samples", "keep", "log_every"):
            self._check(name, 1, integer=True)
        for name in ("workers", "evaluate_every"):
            self._check(name, 0, integer=True)
        for name in ("scale_lr", "temperature", "checkpoint_minutes"):
            self._check(name, 0)
        for name in ("warmup", "temperature_warmup"):
            self._check(name, 0, 1)
        for name in ("lr", "weight_decay", "temperature_end", "clip", "checkpoint_steps"):
            if getattr(self, name) is not None:
                self._check(name, 1 if name == "checkpoint_steps" else 0, integer=name == "checkpoint_steps")
        for name, choices in (
            ("optimiser", ("sgd", "adamw")),
            ("precision", ("fp32", "bf16", "fp16", None)),
            ("device", ("cpu", "cuda", None)),
        ):
            if getattr(self, name) not in choices:
                known = ", ".join(repr(choice) for choice in choices if choice)
                raise LeanBayesError(f"{name}={getattr(self, name)!r} is unknown: use one of {known}.")

    def _check(self, name: str, low: float, high: float = math.inf, integer: bool = False) -> None:
        value = getattr(self, name)
        right = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
        if not right or not (low <= value <= high and math.isfinite(value)):
            kind = "a whole number" if integer else "a number"
            limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise LeanBayesError(f"{name}={value!r} must be {kind} {limits}.")

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Return the recipe with some settings changed."""
        return config.change(self, settings)

    def lr_factor(self, step: int, steps: int) -> float:
        """What the learning rates are multiplied by in a step: a linear rise, then a cosine to 0."""
        rise = self.warmup * steps
        if step + 1 < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(steps - rise, 1))) if step > rise else 1.0

    def temperature_at(self, step: int, steps: int) -> float:
        """The temperature of a step: a linear rise, then what was asked for, or from there a line to another."""
        rise = self.temperature_warmup * steps
        if step + 1 < rise:
            return self.temperature * (step + 1) / rise
        if self.temperature_end is None:
            return self.temperature
        done = (step - rise) / max(steps - rise, 1) if step > rise else 0.0
        return self.temperature + done * (self.temperature_end - self.temperature)

    def optimisers(self, bnn: BayesianModel) -> list[torch.optim.Optimizer]:
        """Make the optimiser of the means, and that of the spreads where there are any."""
        noise = [p for p in bnn.likelihood.parameters() if p.requires_grad]
        spreads = [p for p in bnn.scale_parameters() if p.requires_grad] + noise
        known = {id(p) for p in spreads}
        means: list[nn.Parameter] = [p for p in bnn.mean_parameters() if id(p) not in known]
        if not means and not spreads:
            raise LeanBayesError("Nothing in this model is trainable: let some parameters require gradients.")
        fused = bnn.device.type == "cuda"
        settings: dict[str, Any] = {**_DEFAULTS[self.optimiser], "fused": fused}
        settings |= {n: v for n, v in (("lr", self.lr), ("weight_decay", self.weight_decay)) if v is not None}
        made: list[torch.optim.Optimizer] = []
        if means and self.optimiser == "sgd":
            made.append(torch.optim.SGD(means, momentum=0.9, nesterov=True, **settings))
        elif means:
            made.append(torch.optim.AdamW(means, **settings))
        if spreads:
            made.append(torch.optim.Adam(spreads, lr=self.scale_lr, fused=fused))
        return made
