"""The base class of methods: how a network becomes Bayesian, and what a paper adds to a plain training loop.

A training calls the hooks in this order, in each of the method's stages:

    start         before the optimizers are made; the posterior may still change its shape here
    after_step    after every optimizer step
    finish        after the last step; the posterior may change its shape here too

A method is settings only and has no state. What it must remember is in buffers of the posterior or in the state of an
optimizer, so that a checkpoint holds it. `lb.fit` calls the hooks, and so can any loop (docs/training.md shows one).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from leanbayes.core.config import configurable
from leanbayes.core.layout import Layout, Select
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood, NegativeLogLikelihood
from leanbayes.posteriors import Posterior
from leanbayes.rules import RULES, Moments, Rule, get_rule, rule_text

if TYPE_CHECKING:
    from leanbayes.model.bayesian import BayesianModel


@dataclass(frozen=True)
class Stage:
    """One part of a training.

    Attributes:
        method: The method that this part trains with.
        share: Its share of the epochs. A stage with 0 takes no steps: only `start` is called.
        settings: Recipe settings that differ in this part.

    Example:
        >>> lb.Stage(lb.Deterministic(), share=0.5, settings={"lr": 0.1})
    """

    method: "Method"
    share: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.share < math.inf:
            raise LeanBayesError(f"share={self.share} must be a number of at least 0.")


@dataclass
class Training:
    """What the hooks of a method see of a training loop. The loop keeps it up to date.

    Attributes:
        model: The model in training. `start` may replace it.
        steps: The number of optimizer steps of this stage.
        num_data: The number of training examples.
        batches: Returns training batches (x, y) in a fixed order and not augmented, to choose or measure on.
        optimizers: The optimizers of this stage.
        step: The number of optimizer steps taken in this stage.
        temperature: The weight of the KL in this step.
        batch: The last batch that the loss was computed on.
        average: Returns the mean of a tensor over all processes. A hook passes everything that it derives from data
            through it, so that all processes make the same decision.
        autocast: Returns the context in which the loss is computed, for passes of a hook's own.
        held_out: Returns batches (x, y) that are not trained on, to choose settings by.
        labels_per_example: The mean number of labels of an example, if the loss is a mean over several of them, as for
            `lb.IVON`. Methods with `counts_labels` need it.

    Example:
        >>> training = lb.Training(bnn, steps=1000, num_data=len(train_set), batches=lambda: loader)
        >>> bnn.method.start(training)
    """

    model: "BayesianModel"
    steps: int
    num_data: int
    batches: Callable[[], Iterable[Any]] = lambda: ()
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    step: int = 0
    temperature: float = 1.0
    batch: tuple[Any, Tensor] | None = None
    average: Callable[[Tensor], Tensor] = lambda tensor: tensor
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    held_out: Callable[[], Iterable[Any]] = lambda: ()
    labels_per_example: float | None = None


class Method:
    """The base class of methods: settings in a frozen dataclass, how they make a posterior, and hooks.

    A new method is a frozen dataclass that subclasses `Method` and is decorated with `register_method`.

    Attributes:
        rule: The rule that it trains and predicts with by default.
        samples: The default number of Monte Carlo samples of a prediction.
        engine: How means and stds are trained: "backprop" (gradients of the ELBO, with any optimizer) or "ivon" (the
            natural-gradient update, with `lb.IVON`). A method may also have "auto", which a model never has: `lb.fit`
            and the command line use ivon for networks with BatchNorm and classes of color images, else backprop.
        bayesian_weights: Whether weights move from the network into a posterior.
        has_kl: Whether its posterior has a KL that is trained, which the temperature of the recipe weighs.
        default_temperature: The temperature that its paper needs; None for the default of the engine.
        chooses_parameters: Whether `selected`, and not the user, says which parameters are Bayesian. None is a weight.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField(init_std=0.02))
    """

    described = "an instance such as lb.MeanField()"  # in messages about arguments
    rule: str = "sample"
    samples: int = 30
    engine: str = "backprop"
    bayesian_weights: bool = True
    has_kl: bool = True
    default_temperature: float | None = None
    chooses_parameters: bool = False

    @property
    def random_weights(self) -> bool:
        """Whether weights of layers are Bayesian, and not only factors or norms that the method chooses."""
        return self.bayesian_weights and not self.chooses_parameters

    @property
    def shareable_weights(self) -> bool:
        """Whether `lb.compress` can share the weights: they are Bayesian, and those of one network."""
        return self.random_weights

    @property
    def counts_labels(self) -> bool:
        """Whether training weighs the loss by the number of all labels, which loops then count."""
        return self.engine == "ivon"

    @property
    def has_temperature(self) -> bool:
        """Whether the temperature of a recipe changes the training."""
        return self.bayesian_weights and self.has_kl and self.rule != "mean"

    def prepare(self, network: nn.Module) -> nn.Module:
        """Return a copy of the user's network with more parameters, if the method adds some that are Bayesian.

        What needs no Bayesian parameter belongs into `wrap`, which changes the copy that the model has anyway.
        """
        return network

    def selected(self, network: nn.Module) -> Select:
        """Return which parameters are Bayesian if the user does not say so. None means the weights of layers."""
        return None

    def wrap(self, network: nn.Module) -> nn.Module:
        """Change the copy of the user's network, if the method's randomness is not in the weights."""
        return network

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Posterior:
        """Make q(w) around the given weights.

        Args:
            layout: The place of each parameter in the flat vector.
            mean: The flat weights.
            variance: The variances of an earlier posterior that this one continues, nan where there was none.
        """
        raise NotImplementedError  # abstract

    def empty_posterior(self, layout: Layout, mean: Tensor) -> Posterior:
        """Make q(w) for a file to fill. The weights do not matter, so that none need be chosen or clustered."""
        return self.posterior(layout, mean, None)

    def choose(self, bnn: "BayesianModel", batches: Iterable[Any]) -> None:
        """Decide on training batches (x, y) what the posterior of a new model leaves open."""
        raise LeanBayesError(f"{type(self).__name__} chooses nothing on data: leave data out.")

    def make_rule(self, name: str | Rule) -> Rule:
        """Return the rule of that name, with this method's settings of it if it has any.

        The name may have settings that differ from these, as in "adjoint:mean=moments,margins=3".
        """
        return get_rule(name, self.named_rule)

    def text_of_rule(self, rule: Rule) -> str:
        """Return the text of which `make_rule` makes a rule: its name, and settings that differ from the method's."""
        return rule_text(rule, self.make_rule(rule.name) if rule.name in RULES else None)

    def named_rule(self, name: str) -> Rule:
        """Return the rule of a name without settings. A method may have settings of its own for some rules."""
        return get_rule(name)

    def expected_nll(
        self, likelihood: Likelihood[Any], output: Moments, y: Tensor, key: Tensor
    ) -> NegativeLogLikelihood:
        """Return the loss of outputs that one pass by moments gives: by default the expected one."""
        return likelihood.expected_nll(output, y, key)

    def stages(self) -> tuple[Stage, ...]:
        """Return the parts of a training. Each starts from the means and variances of the one before."""
        return (Stage(self),)

    def start(self, training: Training) -> None:
        """Prepare the model for the stage. A resumed training does not call this again."""

    def after_step(self, training: Training) -> None:
        """Act after an optimizer step, on the posterior and on the optimizers' state, in place."""

    def finish(self, training: Training) -> None:
        """Act after the last step, when the optimizers are no longer used. Parameters may be replaced."""


METHODS: dict[str, Method] = {}  # by the name on the command line, with the settings that it starts from there
M = TypeVar("M", bound=type[Method])


def register_method(name: str, **preset: Any) -> Callable[[M], M]:
    """Register a method: files may contain it, and the command line offers it as `name`, with the settings `preset`."""

    def register(cls: M) -> M:
        METHODS[name] = configurable(cls)(**preset)
        return cls

    return register
