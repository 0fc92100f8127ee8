"""AEB (Deng et al. 2019): adaptive empirical Bayes, a chain of sparse weights whose prior adapts to it."""

import math
from dataclasses import dataclass

from torch import Tensor

from leanbayes.core.config import check_choices
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.cyclical_sgmcmc import add_noise
from leanbayes.methods.baselines.snapshots import SnapshotMethod
from leanbayes.methods.sparse_training.densities import Densities, active_counts
from leanbayes.model.method import Training, register_method
from leanbayes.posteriors import SpikeSlabPosterior

_NEAR = math.log(1000)  # the density comes within 1/1000 of its end, which the last pruning reaches


@register_method("aeb")
@dataclass(frozen=True)
class AEB(SnapshotMethod):
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

    def __post_init__(self) -> None:
        check_choices(self, densities=Densities)
        if not 0 < self.density <= 1:
            raise LeanBayesError(f"density={self.density} must be a fraction above 0 and at most 1.")
        self.check_chain_settings()
        for name in ("spike", "slab"):
            if not 0 < getattr(self, name) < math.inf:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be a positive number.")

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SpikeSlabPosterior:
        """Start the chain from the given weights."""
        active_counts(layout, self.density, self.densities)  # refuses a density that is too small
        return SpikeSlabPosterior(layout, mean, self.spike, self.slab)

    def after_step(self, training: Training) -> None:
        """Add noise, adapt the latent variables, and prune or collect weights if that is due."""
        self.check_running(training)
        posterior, done = training.model.posterior, training.step + 1
        assert isinstance(posterior, SpikeSlabPosterior)
        if self.temperature:
            add_noise(training, self.temperature, posterior.mu)
        fixed = self.steps_before(training)
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
        self.collect_if_due(training)
