"""A method: how a network becomes Bayesian, and the little that its paper adds to a plain training loop.

A training calls the hooks in this order, in each of the method's stages:

    start                      before the optimisers are made; the posterior may still change its shape here
    before_step, after_step    around every optimiser step

Once trained, `figures` gives what a report shows of this method beside what it shows of every model.

A method is settings alone and has no state: what it must remember lies in buffers of the posterior or in the state of
an optimiser, so that a checkpoint holds it. `lb.fit` calls the hooks; so can any loop (docs/training.md shows one).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leanbayes.errors import LeanBayesError
from leanbayes.figures import Figure, size_against_nll, weights
from leanbayes.layout import Layout
from leanbayes.posteriors import Posterior
from leanbayes.rules import Moments, Rule, get_rule

if TYPE_CHECKING:
    from leanbayes.bayesian import BayesianModel
    from leanbayes.likelihoods import Likelihood, NegativeLogLikelihood


@dataclass(frozen=True)
class Stage:
    """A part of a training: the method it trains with, its share of the epochs, and what differs in the recipe."""

    method: "Method"
    share: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.share < math.inf:
            raise LeanBayesError(f"share={self.share} must be a positive number.")


@dataclass
class Training:
    """What the hooks see of a training loop, which keeps it up to date.

    model is what is trained; `start` may put another in its place. step counts the optimiser steps of this stage, of
    which there are `steps`. batch is the last one that the loss was taken on. batches gives training batches (x, y), in
    a fixed order and not augmented, to choose or measure on. average is the mean of a tensor over all processes:
    whatever a hook derives from data must pass through it, so that every process takes the same decision. autocast
    makes the context in which the loss is taken, for passes of a hook's own.
    """

    model: "BayesianModel"
    steps: int
    num_data: int
    batches: Callable[[], Iterable[Any]] = lambda: ()
    optimisers: list[torch.optim.Optimizer] = field(default_factory=list)
    step: int = 0
    temperature: float = 1.0
    batch: tuple[Any, Tensor] | None = None
    average: Callable[[Tensor], Tensor] = lambda tensor: tensor
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


class Method:
    """Base of all methods: settings in a frozen dataclass, how they make a posterior of a network, and hooks."""

    rule: str = "sample"  # the rule it trains and predicts with by default
    samples: int = 30  # draws of a prediction by default
    bayesian_weights: bool = True  # whether weights leave the network for a posterior

    def wrap(self, network: nn.Module) -> nn.Module:
        """Change the network (a copy of the user's) where the method's randomness is not in the weights."""
        return network

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Posterior:
        """Make q(w) around the given weights.

        variance: that of an earlier posterior which this one continues, nan where there was none.
        """
        raise NotImplementedError  # abstract

    def empty_posterior(self, layout: Layout, mean: Tensor) -> Posterior:
        """Make q(w) for a file to fill: the weights do not matter, so that none need be chosen or clustered."""
        return self.posterior(layout, mean, None)

    def choose(self, bnn: "BayesianModel", batches: Iterable[Any]) -> None:
        """Find on batches (x, y) of training data what the posterior of a new model leaves open."""
        raise LeanBayesError(f"{type(self).__name__} chooses nothing on data: leave data out.")

    def make_rule(self, name: str | Rule) -> Rule:
        """Return the rule of that name, with this method's settings of it where it has any."""
        return get_rule(name)

    def expected_nll(
        self, likelihood: "Likelihood", output: Moments, y: Tensor, key: Tensor
    ) -> "NegativeLogLikelihood":
        """Return the loss of outputs that one pass by moments gives: the expected one."""
        return likelihood.expected_nll(output, y, key)

    def stages(self) -> tuple[Stage, ...]:
        """Return the parts of a training; each takes over the means and variances that the one before has learned."""
        return (Stage(self),)

    def start(self, training: Training) -> None:
        """Prepare the model for the stage; a resumed training does not call this again."""

    def before_step(self, training: Training) -> None:
        """Act before an optimiser step, when its batch is not yet known."""

    def after_step(self, training: Training) -> None:
        """Act after an optimiser step: on the posterior and the optimisers' state, in place."""

    def figures(self, bnn: "BayesianModel", scores: Mapping[str, float], costs: Mapping[str, Any]) -> list[Figure]:
        """Return the figures of a trained model that only its method knows to draw; those of one key are drawn as one.

        scores: on the test data. costs: those of the run, such as file_bytes.
        """
        return [*size_against_nll(scores, costs), *weights(bnn)]
