"""mBNN (Kong et al. 2023): masked Bayesian neural networks, a chain of weights and of masks of nodes."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.core.noise import mix
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.cyclical_sgmcmc import add_noise, number_of_labels
from leanbayes.methods.baselines.mask_moves import MOST, Evidence, MaskPrior, moved
from leanbayes.methods.baselines.snapshots import SnapshotMethod
from leanbayes.model.gradients import mean_nll, nll_and_gradient
from leanbayes.model.method import Training, register_method
from leanbayes.posteriors import MaskedPosterior

_MOVES = 0x3B11  # separates the random choices of moves from other noise


@register_method("mbnn")
@dataclass(frozen=True)
class MBNN(SnapshotMethod):
    """Masked Bayesian neural networks: MCMC over the weights, and over which nodes of each layer there are.

    A node is an input of a layer (a feature or a channel), except for the first Bayesian layer. SGD with noise samples
    the weights, whose prior is a Cauchy distribution. At regular intervals a Metropolis-Hastings step removes a few
    nodes or returns some, by the likelihood of the last batch and a prior that prefers few nodes. In the last part of
    the training snapshots are collected: masked weights, and their own biases, norms and statistics of BatchNorm. They
    vote as an ensemble does.

    The chain samples the posterior if both temperatures are 1, its own and that of the recipe, which weighs the prior
    of the weights. The defaults have the lowest loss on held-out digits.

    Paper: Kong et al. (2023), "Masked Bayesian Neural Networks: Theoretical Guarantee and its Posterior Inference".

    Attributes:
        sparsity: λ of the prior of masks, exp(-(λ log n)⁵ s²) for s active nodes of a layer and n labels of the
            training data.
        prior_scale: scale of the Cauchy prior of the weights.
        interval: number of optimizer steps between two moves of the masks.
        largest_move: largest number of nodes that a move removes or returns.
        until: share of the training before the first snapshot.
        snapshots: number of members that are collected, at equal distances.
        temperature: variance of the noise of the weights, relative to that of the Bayesian posterior. 0 adds none.
        lr_low: learning rate of the last step, as a fraction of the highest one. At 0 the chain would stop.

    Example:
        >>> bnn = lb.fit(network, lb.MBNN(), train_set, epochs=30, optimizer="sgd")
        >>> lb.save(bnn, "model.safetensors")  # the weights of nodes that any snapshot has
    """

    sparsity: float = 0.05
    prior_scale: float = 0.1
    interval: int = 2
    largest_move: int = 3
    until: float = 0.5
    snapshots: int = 5
    temperature: float = 0.001
    lr_low: float = 0.1
    default_temperature = 0.1

    def __post_init__(self) -> None:
        self.check_chain_settings()
        if not 0 <= self.sparsity < math.inf:
            raise LeanBayesError(f"sparsity={self.sparsity} must be a finite number and not negative.")
        if not 0 < self.prior_scale < math.inf:
            raise LeanBayesError(f"prior_scale={self.prior_scale} must be a positive number.")
        if not 1 <= self.largest_move <= MOST:
            raise LeanBayesError(f"largest_move={self.largest_move} must be from 1 to {MOST}.")

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> MaskedPosterior:
        """Start the chain from the given weights, with all nodes."""
        posterior = MaskedPosterior(layout, mean, self.prior_scale)
        if not posterior.masked_layers():
            raise LeanBayesError(
                "MBNN masks the inputs of all Bayesian layers but the first, and here is none: use a network with a "
                "hidden layer of at least two nodes, or select more layers."
            )
        return posterior

    def after_step(self, training: Training) -> None:
        """Add noise, and move the masks or collect the weights if that is due."""
        self.check_running(training)
        posterior = training.model.posterior
        assert isinstance(posterior, MaskedPosterior)
        if self.temperature:
            add_noise(training, self.temperature, posterior.mu)
        if (training.step + 1) % self.interval == 0:
            self._move(training, posterior)
        self.collect_if_due(training)

    @torch.no_grad()
    def _move(self, training: Training, posterior: MaskedPosterior) -> None:
        """Take a Metropolis-Hastings step of the masks, the same one in all processes."""
        if training.batch is None:
            raise LeanBayesError("The masks of MBNN need a batch: set training.batch before after_step.")
        layers = posterior.masked_layers()
        maskable = torch.zeros(posterior.nodes.total, dtype=torch.bool)
        for layer in layers:
            maskable[layer] = True
        prior = MaskPrior(layers, (self.sparsity * math.log(number_of_labels(training))) ** 5)
        seed = mix(int(training.model.noise.state[0]), training.step, _MOVES)
        generator = torch.Generator().manual_seed(seed)
        evidence = partial(_evidence, training)
        posterior.mask.copy_(moved(posterior.mask.cpu(), maskable, prior, evidence, self.largest_move, generator))


def _evidence(training: Training, mask: Tensor, with_slopes: bool) -> Evidence:
    """Estimate the log likelihood of all training data at a mask, and its slopes, by those of the last batch."""
    posterior = training.model.posterior
    assert isinstance(posterior, MaskedPosterior)
    assert training.batch is not None
    weights = posterior.masked(mask.to(posterior.mask.device))
    with training.autocast():
        if with_slopes:
            nll, gradient = nll_and_gradient(training.model, weights, *training.batch)
            found = torch.cat([nll.double()[None], posterior.nodes.sums(posterior.mu * gradient).double()])
        else:
            found = mean_nll(training.model, weights, *training.batch).double()[None]
    found = (-number_of_labels(training) * training.average(found)).cpu()
    return Evidence(found[0].item(), found[1:])
