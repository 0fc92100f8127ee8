"""What sparse training has in common, Bayesian or not: a subspace of constant density that moves meanwhile."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from leanbayes.config import check_choices
from leanbayes.errors import LeanBayesError
from leanbayes.gradients import weight_gradient
from leanbayes.layout import Layout
from leanbayes.method import Method, Training
from leanbayes.noise import mix
from leanbayes.posteriors import SparsePointPosterior
from leanbayes.sparsity.blocks import Blocks, block_shape
from leanbayes.sparsity.densities import Densities, active_counts
from leanbayes.sparsity.replacement import replace_weights

FirstSubspace = Literal["random", "magnitude"]


@dataclass(frozen=True)
class SparseMethod(Method):
    """Base of methods that hold only some weights, and now and then exchange those that matter least for others.

    Attributes:
        density: share of the weights that are active. All others are exactly zero.
        densities: how it is shared out: erk keeps small layers dense, uniform the first layer only.
        drop: share of the active weights that the first exchanges replace. It falls to 0 as a cosine.
        interval: optimiser steps from one exchange to the next.
        until: share of the training after which nothing is exchanged.
        subspace: the first active weights: random ones of a fresh network, divided by the root of their layer's density
            to keep the size of its activations; or the largest ones (magnitude) of a trained network, as they are.
        pattern: weight, or blocks such as 16x16 (outputs x inputs) that are active or zero together, as block-sparse
            kernels want them; layers that such blocks do not divide are free. Counts are rounded to whole blocks.
        seed: number that random ones follow from, together with the weights of the network.
    """

    density: float = 0.05
    densities: Densities = "erk"
    drop: float = 0.3
    interval: int = 100
    until: float = 0.75
    subspace: FirstSubspace = "random"
    pattern: str = "weight"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise LeanBayesError(f"density={self.density} must be a share of the weights, above 0 and at most 1.")
        if not 0 <= self.drop < 1:
            raise LeanBayesError(f"drop={self.drop} must be at least 0 and less than 1.")
        if not 0 <= self.until <= 1:
            raise LeanBayesError(f"until={self.until} must lie between 0 and 1.")
        if self.interval < 1:
            raise LeanBayesError(f"interval={self.interval} must be at least 1.")
        check_choices(self, densities=Densities, subspace=FirstSubspace)
        block_shape(self.pattern)

    # -- the first subspace -------------------------------------------------------------------------------------------

    def first_subspace(
        self, layout: Layout, mean: Tensor, variance: Tensor | None, importance: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Choose the first active positions, and return them with the flat weights to start from.

        Of layers that an earlier posterior knows, those with the highest importance(μ, σ) stay, as they are, and random
        ones fill what room is left.
        """
        seed = mix(self.seed, int(mean.view(torch.int32).sum()))
        generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device has the same
        chosen, scaled, start = [], mean.clone(), 0
        counts = active_counts(layout, self.density, self.densities)
        for slot, wanted in zip(layout, counts, strict=True):
            part, blocks = slice(start, start + slot.numel), Blocks(slot, block_shape(self.pattern))
            count = max(1, round(wanted / blocks.size))
            earlier = None if variance is None or variance[part].isnan().any() else variance[part]
            if earlier is None and self.subspace == "magnitude":
                best = blocks.sums(mean[part].abs()).argsort(descending=True, stable=True)
            else:
                best = torch.randperm(blocks.count, generator=generator, device="cpu").to(mean.device)
            if earlier is not None:
                scores = importance(mean[part], earlier.sqrt())
                absent = (mean[part] == 0) & (earlier == 0)  # what is surely zero was not active
                sums = blocks.sums(scores.masked_fill(absent, float(scores.min())))
                sums = sums.masked_fill(blocks.sums(absent.float()) == blocks.size, -torch.inf)
                best = best[sums[best].argsort(descending=True, stable=True)]
            elif self.subspace == "random":
                scaled[part] /= math.sqrt(count / blocks.count)
            chosen.append(blocks.positions(best[:count]).sort().values + start)
            start += slot.numel
        return torch.cat(chosen), scaled

    # -- its moves ----------------------------------------------------------------------------------------------------

    def after_step(self, training: Training) -> None:
        """Every `interval` steps, exchange a share of each layer's active weights."""
        posterior = training.model.posterior
        assert isinstance(posterior, SparsePointPosterior)
        share = self.share(training)
        if not share or len(posterior.index) == posterior.layout.numel:
            return
        scores, wishes = self.scores(training, posterior), self.wishes(training, posterior)
        replace_weights(posterior, training.optimisers, share, scores, wishes, block_shape(self.pattern))

    def share(self, training: Training) -> float:
        """Return the share to exchange after this step, drop/2·(1 + cos(π·step/end)), or 0 where it is not time."""
        done, end = training.step + 1, self.until * training.steps
        if done % self.interval or done >= end:
            return 0.0
        return 0.5 * self.drop * (1 + math.cos(math.pi * done / end))

    @torch.no_grad()
    def scores(self, training: Training, posterior: Any) -> Tensor:
        """Return how much each active weight matters: |μ|."""
        return posterior.mu.abs()

    @torch.no_grad()
    def wishes(self, training: Training, posterior: Any) -> Tensor:
        """Return how much each weight would matter: |∂L/∂w| of the last batch, averaged over some points."""
        if training.batch is None:
            raise LeanBayesError("The exchange of weights needs a batch: set training.batch before after_step.")
        total, count = torch.zeros((), device=training.model.device), 0
        for weights in self.points(training, posterior):
            with training.autocast():
                gradient = weight_gradient(training.model, weights, *training.batch)
            total = total + training.average(gradient).abs()
            count += 1
        return total / count

    def points(self, training: Training, posterior: Any) -> Iterator[Tensor]:
        """Yield the flat weights to take gradients at: the mean."""
        yield posterior.mean()
