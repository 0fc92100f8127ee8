"""The settings of a training, and its schedules as functions of the step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, TypedDict

import torch

from leanbayes.core import config
from leanbayes.engines import OptimizerSettings, make_optimizers
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.defaults import defaults_for
from leanbayes.model.method import Method


def _setting(default: Any, *, whole_run: bool = False, free_on_resume: bool = False, **metadata: Any) -> Any:
    """Declare a setting that is not of the usual kind, which a stage may change and a resumed run may not.

    Args:
        default: The default of the setting.
        whole_run: It is the same in all stages of a run.
        free_on_resume: It does not change the result, so it may differ when a run is resumed.
        **metadata: What `config.current_settings` needs to know, such as the `former_default` of a new setting.
    """
    return field(default=default, metadata={"whole_run": whole_run, "free_on_resume": free_on_resume, **metadata})


@config.configurable
@dataclass(frozen=True)
class Recipe:
    """How to train: optimizers, schedules, precision, checkpoints and seed.

    Attributes:
        epochs: passes over the training data, in all stages together.
        batch_size: examples per optimizer step, over all processes and accumulated parts.
        accumulate: parts that each process splits its share of a batch into, to save memory.
        augment: augmentation of training images. "standard" is that of the data set, such as crops and flips for
            CIFAR; "trivial" adds TrivialAugment (see `leanbayes.data.Augment`); "none" leaves images as they are.
        optimizer: optimizer of the means, norms and biases under the engine backprop. The engine ivon is itself an
            optimizer.
        lr: learning rate of the means. None means 0.1 for sgd, 0.001 for adamw, and 1 for the engine ivon, or 0.1 for a
            regression.
        weight_decay: weight decay of the means. None means 0.0005 for sgd and 0.01 for adamw. Under the engine ivon the
            prior takes its place, and 0.0005 is that of norms, biases and deterministic weights.
        scale_lr: learning rate of the stds of the posterior, and of the noise of the data if it is learned.
        scale_optimizer: optimizer of the stds and of this noise under the engine backprop. By sgd, as in some papers,
            stds hardly change.
        hess_init: curvature that the engine ivon starts the stds from. None chooses it by the number of examples.
        warmup: share of the steps in which the learning rates rise from 0. Then they fall as a cosine.
        lr_high: fraction of the learning rates at which a cosine starts.
        lr_low: fraction of the learning rates at which a cosine ends. If equal to lr_high, the rates are constant.
        cycles: number of cosines, one after the other.
        temperature: weight of the KL, or auto to train with 1, 0.1, 0.01 and 0.001 and keep the model with the best
            held-out likelihood, at four times the cost. 1 is the plain ELBO, which targets the Bayesian posterior. None
            means 1 for the engine ivon, and for backprop 0.003 for classes and 0.1 for a regression.
        temperature_warmup: share of the steps in which the temperature rises linearly from 0. Under the engine ivon the
            temperature is constant.
        temperature_end: temperature of the last step, reached linearly after the warmup. None means that it stays.
        samples: Monte Carlo samples of the weights per training step.
        clip: largest norm of the gradient. A larger gradient is scaled down.
        average: decay per step, e.g. 0.999, of an exponential moving average of all trainable parameters, or equal to
            average all steps of a stage with equal weights (SWA). Each stage ends with the averaged model, which is
            also the one that is evaluated during training. None means no average.
        precision: number format of the network's arithmetic. None means that of `accelerate launch`, or fp32.
        compile: run the loss through torch.compile and, on one GPU, the whole step as a CUDA graph. The first steps
            take a minute, the others are faster. What Python does in a step of the graph is done only once. A network
            that cannot be compiled is trained without, and a log line says why.
        channels_last: store images and convolutions in the memory format that GPUs prefer.
        device: where to train. None means the GPU, if there is one.
        unused_parameters: let several processes train a network in which a step may not use some parameters.
        shard: cut means, stds and the state of optimizers into parts, one per process (`lb.fully_shard`), instead of a
            copy in each. Then processes share the sample of a step, and another number of them can resume the run.
        workers: processes that read data sets that are not in memory.
        evaluate_every: epochs from one evaluation on the held-out split to the next. 0 means only at the end.
        refresh_batchnorm: recompute the statistics of BatchNorm under the posterior at the end.
        checkpoint_minutes: minutes from one checkpoint to the next.
        checkpoint_steps: steps from one checkpoint to the next, in addition to the minutes.
        keep: number of checkpoints to keep.
        log_every: steps from one log entry to the next.
        seed: seed of all randomness: initial weights, data order, augmentation, dropout and Monte Carlo samples.

    Raises:
        LeanBayesError: A value is of the wrong type or out of range.

    Example:
        >>> recipe = lb.Recipe(epochs=60, optimizer="sgd")
        >>> bnn = lb.fit(network, lb.MeanField(), train_set, recipe=recipe, seed=1)
    """

    epochs: int = _setting(30, whole_run=True)
    batch_size: int = _setting(128, whole_run=True)
    accumulate: int = _setting(1, whole_run=True, free_on_resume=True)
    augment: Literal["standard", "trivial", "none"] = _setting("standard", whole_run=True, former_default="standard")
    optimizer: Literal["sgd", "adamw"] = config.renamed("adamw", "optimiser")
    lr: float | None = None
    weight_decay: float | None = None
    scale_lr: float = 1e-2
    scale_optimizer: Literal["adam", "sgd"] = _setting("adam", former_default="adam")
    hess_init: float | None = _setting(None, former_default=None)
    warmup: float = 0.05
    lr_high: float = _setting(1.0, former_default=1.0)
    lr_low: float = _setting(0.0, former_default=0.0)
    cycles: int = _setting(1, former_default=1)
    temperature: float | Literal["auto"] | None = None
    temperature_warmup: float = 0.5
    temperature_end: float | None = None
    samples: int = 1
    clip: float | None = None
    average: float | Literal["equal"] | None = _setting(None, former_default=None)
    # A resumed run compares the precision in use, which accelerate may choose.
    precision: Literal["fp32", "bf16", "fp16"] | None = _setting(None, whole_run=True, free_on_resume=True)
    compile: bool = False
    channels_last: bool = _setting(False, whole_run=True)
    device: Literal["cpu", "cuda"] | None = _setting(None, whole_run=True, free_on_resume=True)
    unused_parameters: bool = _setting(False, whole_run=True, free_on_resume=True)
    shard: bool = _setting(False, whole_run=True, former_default=False)
    workers: int = _setting(0, whole_run=True, free_on_resume=True)
    evaluate_every: int = _setting(1, free_on_resume=True)
    refresh_batchnorm: bool = _setting(True, whole_run=True)
    checkpoint_minutes: float = _setting(5.0, free_on_resume=True)
    checkpoint_steps: int | None = _setting(None, free_on_resume=True)
    keep: int = _setting(2, whole_run=True, free_on_resume=True)
    log_every: int = _setting(50, free_on_resume=True)
    seed: int = _setting(0, whole_run=True)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "cycles", "samples", "keep", "log_every"):
            self._check(name, 1, integer=True)
        for name in ("workers", "evaluate_every"):
            self._check(name, 0, integer=True)
        for name in ("scale_lr", "checkpoint_minutes"):
            self._check(name, 0)
        if self.temperature not in ("auto", None):
            self._check("temperature", 0)
        for name in ("warmup", "lr_high", "lr_low", "temperature_warmup"):
            self._check(name, 0, 1)
        for name in ("lr", "weight_decay", "hess_init", "temperature_end", "clip", "checkpoint_steps"):
            if getattr(self, name) is not None:
                self._check(name, 1 if name == "checkpoint_steps" else 0, integer=name == "checkpoint_steps")
        if self.average not in (None, "equal"):
            self._check("average", 0, 1)
        for name, choices in (
            ("augment", ("standard", "trivial", "none")),
            ("optimizer", ("sgd", "adamw")),
            ("scale_optimizer", ("adam", "sgd")),
            ("precision", ("fp32", "bf16", "fp16", None)),
            ("device", ("cpu", "cuda", None)),
        ):
            if getattr(self, name) not in choices:
                known = ", ".join(repr(choice) for choice in choices if choice)
                raise LeanBayesError(f"{name}={getattr(self, name)!r} is unknown: use one of {known}.")

        for name, works in (("compile", False), ("average", None), ("samples", 1)):
            if self.shard and getattr(self, name) != works:
                raise LeanBayesError(
                    f"shard=True does not work with {name}={getattr(self, name)!r}: leave one of them out."
                )

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
        """Return the factor of the learning rates in a step: a linear rise to `lr_high`, then cosines to `lr_low`.

        Args:
            step: The number of the step, from 0.
            steps: The number of steps.
        """
        rise = self.warmup * steps
        if step + 1 < rise:
            return self.lr_high * ((step + 1) / rise)
        done = (step - rise) / max(steps - rise, 1) if step > rise else 0.0
        return self.lr_low + (self.lr_high - self.lr_low) * 0.5 * (1 + math.cos(math.pi * (done * self.cycles % 1.0)))

    def temperature_at(self, step: int, steps: int) -> float:
        """Return the temperature in a step: a linear rise to `temperature`, then linear to `temperature_end`, if set.

        Args:
            step: The number of the step, from 0.
            steps: The number of steps.
        """
        if self.temperature is None or self.temperature == "auto":
            raise LeanBayesError(f"temperature={self.temperature!r} is chosen by lb.fit: give a number here.")
        temperature, rise = self.temperature, self.temperature_warmup * steps
        if step + 1 < rise:
            return temperature * (step + 1) / rise
        if self.temperature_end is None:
            return temperature
        done = (step - rise) / max(steps - rise, 1) if step > rise else 0.0
        return temperature + done * (self.temperature_end - temperature)

    def for_task(self, method: Method, likelihood: Likelihood) -> Self:
        """Return the recipe with the temperature that a method has by default for a likelihood, unless it is set."""
        if self.temperature is not None:
            return self
        return self.changed({"temperature": defaults_for(method, likelihood).temperature})

    def optimizers(
        self, bnn: BayesianModel, num_data: int, *, keep_std: bool = False, labels_per_example: float | None = None
    ) -> list[torch.optim.Optimizer]:
        """Return the optimizers that the engine of the model's method trains it with.

        Args:
            bnn: The model.
            num_data: The number of training examples.
            keep_std: Whether a training continues, so that the stds stay as they are.
            labels_per_example: The mean number of labels of an example, if the loss is a mean over several of them.

        Raises:
            LeanBayesError: No parameter of the model requires a gradient, or the engine cannot train this posterior.
        """
        names = ("optimizer", "lr", "weight_decay", "scale_lr", "scale_optimizer", "hess_init")
        temperature = self.for_task(bnn.method, bnn.likelihood).temperature
        if temperature == "auto":
            raise LeanBayesError("temperature='auto' is chosen by lb.fit: give a number here.")
        settings = {name: getattr(self, name) for name in names} | {"temperature": temperature}
        settings |= {"keep_std": keep_std, "labels_per_example": labels_per_example}
        return make_optimizers(bnn, OptimizerSettings(num_data=num_data, **settings))


WHOLE_RUN = tuple(one.name for one in fields(Recipe) if one.metadata.get("whole_run"))
FREE_ON_RESUME = tuple(one.name for one in fields(Recipe) if one.metadata.get("free_on_resume"))


class RecipeSettings(TypedDict, total=False):
    """Some of the settings of a `Recipe`, which documents them, as keyword arguments of `fit`.

    Example:
        >>> settings: RecipeSettings = {"epochs": 60, "optimizer": "sgd"}
        >>> bnn = lb.fit(network, lb.MeanField(), train_set, **settings)
    """

    epochs: int
    batch_size: int
    accumulate: int
    augment: Literal["standard", "trivial", "none"]
    optimizer: Literal["sgd", "adamw"]
    lr: float | None
    weight_decay: float | None
    scale_lr: float
    scale_optimizer: Literal["adam", "sgd"]
    hess_init: float | None
    warmup: float
    lr_high: float
    lr_low: float
    cycles: int
    temperature: float | Literal["auto"] | None
    temperature_warmup: float
    temperature_end: float | None
    samples: int
    clip: float | None
    average: float | Literal["equal"] | None
    precision: Literal["fp32", "bf16", "fp16"] | None
    compile: bool
    channels_last: bool
    device: Literal["cpu", "cuda"] | None
    unused_parameters: bool
    shard: bool
    workers: int
    evaluate_every: int
    refresh_batchnorm: bool
    checkpoint_minutes: float
    checkpoint_steps: int | None
    keep: int
    log_every: int
    seed: int
