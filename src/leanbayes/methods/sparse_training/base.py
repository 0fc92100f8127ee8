"""The base class of sparse methods: a constant number of active weights, some of which are exchanged now and then."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.config import check_choices
from leanbayes.core.layout import Layout
from leanbayes.core.noise import mix
from leanbayes.errors import LeanBayesError
from leanbayes.methods.sparse_training.densities import Densities, active_counts
from leanbayes.methods.sparse_training.exchange import replace_weights
from leanbayes.methods.sparse_training.initial_subspace import Importance, InitialSubspace, initial_subspace
from leanbayes.model.gradients import ShardedWeights, averaged, weight_gradient
from leanbayes.model.method import Method, Training
from leanbayes.posteriors.subspace.blocks import block_shape


@dataclass(frozen=True)
class SparseMethod(Method):
    """The base class of sparse methods. At regular intervals they replace the least important active weights.

    Attributes:
        density: fraction of the weights that are active. All others are exactly zero.
        densities: how active weights are distributed over the layers. erk keeps small layers dense; uniform keeps
            only the first layer dense.
        drop: fraction of the active weights that the first exchanges replace. It falls to 0 along a cosine.
        interval: number of optimizer steps between two exchanges.
        until: fraction of the training after which no weights are exchanged.
        subspace: the initial active weights. random is for a new network; the weights are divided by the square root
            of their layer's density, which preserves the scale of its activations. magnitude keeps the largest
            weights of a trained network unchanged.
        pattern: weight, or blocks such as 16x16 (outputs x inputs) that are active or zero together, as block-sparse
            kernels require. Layers that the blocks do not divide evenly use single weights. Counts are rounded to
            whole blocks.
        seed: seed of random choices, combined with the weights of the network.
    """

    density: float = 0.05
    densities: Densities = "erk"
    drop: float = 0.3
    interval: int = 100
    until: float = 0.75
    subspace: InitialSubspace = "random"
    pattern: str = "weight"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise LeanBayesError(f"density={self.density} must be a fraction above 0 and at most 1.")
        if not 0 <= self.drop < 1:
            raise LeanBayesError(f"drop={self.drop} must be at least 0 and less than 1.")
        if not 0 <= self.until <= 1:
            raise LeanBayesError(f"until={self.until} must be a fraction from 0 to 1.")
        if self.interval < 1:
            raise LeanBayesError(f"interval={self.interval} must be at least 1.")
        check_choices(self, densities=Densities, subspace=InitialSubspace)
        block_shape(self.pattern)

    def initial_subspace(
        self, layout: Layout, mean: Tensor, variance: Tensor | None, importance: Importance
    ) -> tuple[Tensor, Tensor]:
        """Return the initial active positions and the flat weights to start from; see `initial_subspace`."""
        seed = mix(self.seed, int(mean.view(torch.int32).sum()))
        counts = active_counts(layout, self.density, self.densities)
        block = block_shape(self.pattern)
        return initial_subspace(layout, mean, variance, counts, block, self.subspace, seed, importance)

    def after_step(self, training: Training) -> None:
        """Exchange a fraction of each layer's active weights every `interval` steps."""
        posterior: Any = training.model.posterior
        share = self.exchanged_share(training)
        if not share or self.density == 1:
            return
        scores = self.removal_scores(training, posterior), self.addition_scores(training, posterior)
        for piece, removal, addition in posterior.pieces(*scores):
            replace_weights(
                piece,
                training.optimizers,
                share,
                removal,
                addition,
                block_shape(self.pattern),
                by_precision=self.engine == "ivon",
                new_std=self.std_of_new_weights(),
            )

    def std_of_new_weights(self) -> float | None:
        """Return σ of weights that an exchange adds, or None for the mean of their layer."""
        return None

    def exchanged_share(self, training: Training) -> float:
        """Return the fraction to exchange after this step: drop/2·(1 + cos(π·step/end)), or 0 between exchanges."""
        done, end = training.step + 1, self.until * training.steps
        if done % self.interval or done >= end:
            return 0.0
        return 0.5 * self.drop * (1 + math.cos(math.pi * done / end))

    @torch.no_grad()
    def removal_scores(self, training: Training, posterior: Any) -> Tensor:
        """Return the importance |μ| of each active weight."""
        return posterior.mu.abs()

    @torch.no_grad()
    def addition_scores(self, training: Training, posterior: Any) -> Tensor:
        """Return |∂L/∂w| of every weight, averaged over `addition_weights`, each on its own of `addition_batches`."""
        if training.batch is None:
            raise LeanBayesError("The exchange of weights needs a batch: set training.batch before after_step.")
        total, count = torch.zeros((), device=training.model.device), 0
        batches = iter(self.addition_batches(training))
        for weights in self.addition_weights(training, posterior):
            batch = next(batches, None)
            if batch is None:
                raise LeanBayesError(
                    "addition='samples' takes a batch for each sample: pass lb.Training(batches=...) a function that "
                    "returns training batches, or set addition='sample'."
                )
            with training.autocast():
                gradient = weight_gradient(training.model, weights, *batch)
            total = total + averaged(training, gradient).abs()
            count += 1
        return total / count

    def addition_batches(self, training: Training) -> Iterable[Any]:
        """Return the batches on which `addition_scores` takes gradients: the last one."""
        return [training.batch]

    def addition_weights(self, training: Training, posterior: Any) -> Iterator[Tensor | ShardedWeights]:
        """Yield the weights at which `addition_scores` takes gradients: the mean."""
        yield posterior.mean()
