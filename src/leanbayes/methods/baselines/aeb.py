"""AEB (Deng et al. 2019): adaptive empirical Bayes, a chain of sparse weights whose prior adapts to it."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from leanbayes.core.config import check_choices
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.cyclical_sgmcmc import Chain, add_noise
from leanbayes.methods.sparse_training.densities import Densities, active_counts
from leanbayes.model.method import Method, Stage, Training, register_method
from leanbayes.posteriors import SpikeSlabPosterior

_NEAR = math.log(1000)  # the density comes within 1/1000 of its end, which the last pruning reaches


@register_method("aeb")
@dataclass(frozen=True)
class AEB(Method):
    """Adaptive empirical Bayes: stochastic-gradient MCMC with a spike-and-slab prior that adapts, and pruning.

    SGD with noise samples the weights, while the latent variables of the prior follow them by stochastic approximation.
    The weights with the smallest magnitude are set to zero, ever more of them, until the given density is reached.
    Then the support stays, and snapshots of the chain are collected: its weights, and its own biases, norms and
    statistics of BatchNorm, without which a snapshot is another function. They vote as an ensemble does.

    Paper: Deng et al. (2019), "An Adaptive Empirical Bayesian Method for Sparse Deep Learning".

    Attributes:
        density: fraction of the weights that are not zero at the end.
        densities: how these are distributed over the layers. erk keeps small layers dense; uniform keeps only the first
            layer dense.
        until: share of the training in which weights are pruned. In the rest they are collected.
        snapshots: number of members that are collected, at equal distances.
        spike: v₀, the scale of the Laplace distribution of small weights, relative to σ of their layer.
        slab: v₁, the variance of the Gaussian distribution of large weights, relative to σ².
        interval: number of optimizer steps between two updates of the latent variables and of the pruned weights.
        temperature: variance of the noise, relative to that of the Bayesian posterior. 0 adds none.
        lr_low: learning rate of the last step, as a fraction of the highest one. At 0 the chain would stop.

    Example:
        >>> bnn = lb.fit(network, lb.AEB(density=0.1), train_set, epochs=30, optimizer="sgd", temperature=1.0)
        >>> lb.save(bnn, "model.safetensors")  # the weights that are not zero, of each snapshot
    """

    density: float = 0.1
    densities: Densities = "erk"
    until: float = 0.7
    snapshots: int = 10
    spike: float = 0.1
    slab: float = 1.0
    interval: int = 10
    temperature: float = 1.0
    lr_low: float = 0.1
    samples = 1  # of a chain that has not collected all members
    counts_labels = True

    def __post_init__(self) -> None:
        check_choices(self, densities=Densities)
        if not 0 < self.density <= 1:
            raise LeanBayesError(f"density={self.density} must be a fraction above 0 and at most 1.")
        if not 0 < self.until < 1:
            raise LeanBayesError(f"until={self.until} must be a share of the training, between 0 and 1.")
        for name in ("snapshots", "interval"):
            if getattr(self, name) < 1:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("spike", "slab"):
            if not 0 < getattr(self, name) < math.inf:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be a positive number.")
        if not 0 <= self.temperature < math.inf:
            raise LeanBayesError(f"temperature={self.temperature} must be a finite number and not negative.")
        if not 0 < self.lr_low <= 1:
            raise LeanBayesError(f"lr_low={self.lr_low} must be a fraction of the learning rate, above 0.")

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SpikeSlabPosterior:
        """Start the chain from the given weights."""
        active_counts(layout, self.density, self.densities)  # refuses a density that is too small
        return SpikeSlabPosterior(layout, mean, self.spike, self.slab)

    def stages(self) -> tuple[Stage, ...]:
        """Train by SGD, whose rate does not fall to 0."""
        return (Stage(self, settings={"optimizer": "sgd", "lr_low": self.lr_low}),)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the chain, with places for the parts of its members that are not Bayesian."""
        return SparseChain(network, self.snapshots)

    def start(self, training: Training) -> None:
        """Check that every member has a step of its own."""
        left = training.steps - self._fixed_after(training.steps)
        if left < self.snapshots:
            raise LeanBayesError(
                f"{left} steps after the pruning are too few for {self.snapshots} snapshots: train longer, or in "
                "smaller batches, or set until or snapshots to a smaller value."
            )

    def _fixed_after(self, steps: int) -> int:
        """Return after how many steps the support stays."""
        return max(1, int(self.until * steps))

    def after_step(self, training: Training) -> None:
        """Add noise, adapt the latent variables, and prune or collect weights if that is due."""
        posterior, done = training.model.posterior, training.step + 1
        assert isinstance(posterior, SpikeSlabPosterior)
        if self.temperature:
            add_noise(training, self.temperature, posterior.mu)
        fixed = self._fixed_after(training.steps)
        if done % self.interval == 0:
            updates = done // self.interval
            posterior.adapt(min(1.0, 10 * (updates + 1000) ** -0.7))  # the rates of the paper
        if done < fixed and done % self.interval == 0:
            share = self.density + (1 - self.density) * math.exp(-_NEAR * done / fixed)
            posterior.keep_largest(active_counts(posterior.layout, share, self.densities))
        elif done == fixed:
            posterior.keep_largest(active_counts(posterior.layout, self.density, self.densities))
            posterior.fix()
        elif done > fixed:
            posterior.apply_support()
            left, passed = training.steps - fixed, done - fixed
            if passed * self.snapshots // left > (passed - 1) * self.snapshots // left:
                posterior.collect()
                chain = training.model.network
                assert isinstance(chain, SparseChain)
                chain.collect()

    def finish(self, training: Training) -> None:
        """Drop the chain, and keep what it has collected."""
        posterior, chain = training.model.posterior, training.model.network
        assert isinstance(posterior, SpikeSlabPosterior)
        assert isinstance(chain, SparseChain)
        if chain.members is None:
            raise LeanBayesError("AEB has not collected all its snapshots: train to the last step.")
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
