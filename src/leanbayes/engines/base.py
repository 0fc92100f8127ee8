"""The base class of engines. A new engine is a subclass in its own file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from leanbayes.core.names import lookup
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel


@dataclass(frozen=True)
class OptimizerSettings:
    """What a training tells an engine.

    Attributes:
        num_data: The number of training examples.
        optimizer: The optimizer of the means, norms and biases, for engines that leave the choice.
        lr: The learning rate. None means the default of the engine.
        weight_decay: The weight decay. None means the default of the engine.
        scale_lr: The learning rate of the stds and of the noise of the data.
        scale_optimizer: The optimizer of the stds and of the noise of the data, for engines that leave the choice.
        temperature: The weight of the KL.
        hess_init: The initial curvature of the engine "ivon".
        labels_per_example: The mean number of labels of an example, or None for one label.
        keep_std: Whether the stds of the model stay as they are, because a training continues.
    """

    num_data: int
    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: float | None = None
    weight_decay: float | None = None
    scale_lr: float = 1e-2
    scale_optimizer: Literal["adam", "sgd"] = "adam"
    temperature: float = 1.0
    hess_init: float | None = None
    labels_per_example: float | None = None
    keep_std: bool = False


class Engine:
    """The base class of engines."""

    def optimizers(self, bnn: BayesianModel, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
        """Return the optimizers of all trainable parameters of a model."""
        raise NotImplementedError  # abstract


ENGINES: dict[str, Engine] = {}
E = TypeVar("E", bound=type[Engine])


def register_engine(name: str) -> Callable[[E], E]:
    """Register an engine under the name that methods select it by."""

    def register(cls: E) -> E:
        ENGINES[name] = cls()
        return cls

    return register


def make_optimizers(bnn: BayesianModel, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the engine of the model's method trains it with.

    Raises:
        LeanBayesError: No parameter of the model requires a gradient, or the engine cannot train this posterior.
    """
    if not any(p.requires_grad for p in bnn.parameters()):
        raise LeanBayesError("Nothing in this model is trainable: let some parameters require gradients.")
    return ENGINES[lookup("engine", bnn.method.engine, ENGINES)].optimizers(bnn, settings)


def likelihood_parameters(bnn: BayesianModel) -> list[nn.Parameter]:
    """Return the trainable parameters of the likelihood, such as the noise in the data if it is learned."""
    return [p for p in bnn.likelihood.parameters() if p.requires_grad]
