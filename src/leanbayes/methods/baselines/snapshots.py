"""What methods have in common whose members are sparse snapshots of one chain of weights (AEB, mBNN)."""

import math

from torch import nn

from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.cyclical_sgmcmc import Chain
from leanbayes.model.method import Method, Stage, Training
from leanbayes.posteriors.subspace.collected import CollectedPosterior


class SnapshotMethod(Method):
    """The base class of methods that run a chain by noisy SGD, and collect snapshots in the last part of a training.

    A subclass has the settings below, calls `check_chain_settings` and, after each step, `check_running` and
    `collect_if_due`.

    Attributes:
        until: The share of the training before the first snapshot.
        snapshots: The number of members that are collected, at equal distances.
        interval: The number of optimizer steps between two changes of the latent variables.
        temperature: The variance of the noise, relative to that of the Bayesian posterior.
        lr_low: The learning rate of the last step, as a fraction of the highest one.
    """

    until: float
    snapshots: int
    interval: int
    temperature: float
    lr_low: float
    samples = 1  # of a chain that has not collected all members
    counts_labels = True

    @property
    def shareable_weights(self) -> bool:
        """Snapshots are several networks."""
        return False

    def check_chain_settings(self) -> None:
        """Raise an error if one of the settings is out of range."""
        if not 0 < self.until < 1:
            raise LeanBayesError(f"until={self.until} must be a share of the training, between 0 and 1.")
        for name in ("snapshots", "interval"):
            if getattr(self, name) < 1:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 0 <= self.temperature < math.inf:
            raise LeanBayesError(f"temperature={self.temperature} must be a finite number and not negative.")
        if not 0 < self.lr_low <= 1:
            raise LeanBayesError(f"lr_low={self.lr_low} must be a fraction of the learning rate, above 0.")

    def stages(self) -> tuple[Stage, ...]:
        """Train by SGD, whose rate does not fall to 0."""
        return (Stage(self, settings={"optimizer": "sgd", "lr_low": self.lr_low}),)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the chain, with places for the parts of its members that are not Bayesian."""
        return SparseChain(network, self.snapshots)

    def start(self, training: Training) -> None:
        """Check that every member has a step of its own."""
        self.check_running(training)
        left = training.steps - self.steps_before(training)
        if left < self.snapshots:
            raise LeanBayesError(
                f"{left} steps after the first part of the training are too few for {self.snapshots} snapshots: train "
                "longer, or in smaller batches, or set until or snapshots to a smaller value."
            )

    def steps_before(self, training: Training) -> int:
        """Return the number of steps after which snapshots are collected."""
        return max(1, int(self.until * training.steps))

    def check_running(self, training: Training) -> None:
        """Raise an error if the chain has ended: it has no weights to move, and only their mean and differences."""
        posterior = training.model.posterior
        assert isinstance(posterior, CollectedPosterior)
        if posterior.is_finished:
            name = type(self).__name__
            raise LeanBayesError(f"The chain of this {name} model has ended: make a new model to sample others.")

    def collect_if_due(self, training: Training) -> None:
        """Collect the weights, and all else that the network has, if a snapshot is due after this step."""
        before = self.steps_before(training)
        passed, left = training.step + 1 - before, training.steps - before
        if passed > 0 and passed * self.snapshots // left > (passed - 1) * self.snapshots // left:
            posterior, chain = training.model.posterior, training.model.network
            assert isinstance(posterior, CollectedPosterior)
            assert isinstance(chain, SparseChain)
            posterior.collect()
            chain.collect()

    def finish(self, training: Training) -> None:
        """Drop the chain, and keep what it has collected."""
        self.check_running(training)
        posterior, chain = training.model.posterior, training.model.network
        assert isinstance(posterior, CollectedPosterior)
        assert isinstance(chain, SparseChain)
        if chain.members is None:
            name = type(self).__name__
            raise LeanBayesError(f"{name} has not collected all its snapshots: train to the last step.")
        posterior.finish()


class SparseChain(Chain):
    """A chain whose Bayesian weights are in the posterior. Its copies of the network have all other tensors."""

    def weight_names(self, name: str) -> list[str]:
        """Return the names of a weight in all copies, which use the same one in a pass."""
        return [f"networks.{number}.{name}" for number in range(len(self.networks))]

    def plain(self) -> nn.Module:
        """Return the chain before it has collected its members, which are not a single network."""
        if self.members is None:
            return self.networks[-1]
        raise LeanBayesError("The snapshots of a chain are not a single network: use bnn.member(i).")
