"""Sparse subspace variational inference (SSVI, Li et al. 2024): Bayesian and sparse from the first step on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Self

import torch
from torch import Tensor

from leanbayes.config import check_choices, configurable
from leanbayes.errors import LeanBayesError
from leanbayes.gradients import mean_squared_gradient
from leanbayes.layout import Layout
from leanbayes.method import Training
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.sparse import SparseMethod
from leanbayes.noise import make_key, mix
from leanbayes.posteriors import SubspacePosterior
from leanbayes.priors import Normal, Prior
from leanbayes.sparsity.blocks import block_shape
from leanbayes.sparsity.criteria import REMOVAL

Removal = Literal["mean", "snr", "absolute_mean", "absolute_snr", "exponential_mean", "exponential_snr", "sensitivity"]
Addition = Literal["draw", "mean", "draws"]
_SENSITIVITY_BATCHES = 8
_ADDITION = 0x55F1  # sets the draws of the addition criterion apart from those of the training


@configurable
@dataclass(frozen=True)
class SSVI(SparseMethod):
    """Sparse subspace variational inference: a few weights are Gaussian, all others are zero, from start to end.

    Attributes:
        removal: which active weights matter least: those with the smallest |μ| (mean), |μ|/σ (snr), E|θ|
            (absolute_mean), E|θ|/std|θ| (absolute_snr, the paper's choice, which ranks as |μ|/σ), the same of e^{λ|θ|}
            (exponential_mean, exponential_snr), or S(μ² + σ²) with S the mean squared gradient of a few batches
            (sensitivity).
        exponent: λ of the exponential criteria.
        addition: which inactive weights come: those with the largest gradient of the last batch, at one draw of the
            weights, at their mean, or on average over several draws.
        draws: how many draws addition=draws takes.
        prior: what the active weights are believed to be before any data are seen: `Normal` or `ScaleMixture`.
        init_std: the first σ.
        rule: how it is trained and predicts: sample, flipout, local, moments or mean.
        samples: draws of a prediction.
    """

    removal: Removal = "absolute_snr"
    exponent: float = 1.0
    addition: Addition = "draw"
    draws: int = 5
    prior: Prior = field(default_factory=lambda: Normal(0.05))
    init_std: float = 1e-3
    rule: str = "sample"
    samples: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, removal=Removal, addition=Addition)
        if not 0 < self.exponent < math.inf:
            raise LeanBayesError(f"exponent={self.exponent} must be a positive number.")
        if self.draws < 1:
            raise LeanBayesError(f"draws={self.draws} must be at least 1.")
        MeanField(self.prior, self.init_std, rule=self.rule, samples=self.samples)  # the same checks
        if getattr(self.prior, "center", None) == "pretrained":
            raise LeanBayesError("SSVI holds no weights to centre its prior on: use center='zero'.")

    @classmethod
    def paper(cls) -> Self:
        """Return the settings of the paper; its recipe is SGD with lr=0.01, temperature=0.01 and 200 epochs."""
        return cls(densities="uniform", prior=Normal(0.005), init_std=6e-4, rule="local", samples=5)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SubspacePosterior:
        """Choose the first subspace, and put μ on the weights there; σ is an earlier one where there is one."""
        index, start = self.first_subspace(layout, mean, variance, self._importance)
        std = torch.full_like(start[index], self.init_std)
        if variance is not None:
            known = variance[index]
            std = torch.where(known > 0, known.sqrt(), std)  # a weight that was a point, or unknown, has none
        prior = self.prior.bind(layout, start)
        return SubspacePosterior(layout, index, start[index], std, prior, block_shape(self.pattern))

    def _importance(self, mu: Tensor, sigma: Tensor) -> Tensor:
        criterion = REMOVAL["snr" if self.removal == "sensitivity" else self.removal]
        return criterion(mu, sigma.clamp_min(torch.finfo(sigma.dtype).tiny), self.exponent)

    @torch.no_grad()
    def scores(self, training: Training, posterior: SubspacePosterior) -> Tensor:
        """Return the removal criterion of each active weight."""
        mu, sigma = posterior.mu, posterior.std()
        if self.removal != "sensitivity":
            return self._importance(mu, sigma)
        with training.autocast():
            batches = islice(training.batches(), _SENSITIVITY_BATCHES)
            squares = mean_squared_gradient(training.model, posterior.mean(), batches)
        return training.average(squares)[posterior.index] * (mu.square() + sigma.square())

    def points(self, training: Training, posterior: SubspacePosterior) -> Iterator[Tensor]:
        """Yield the flat weights of the addition criterion; a draw is the same in every process."""
        if self.addition == "mean":
            yield posterior.mean()
            return
        seed = mix(int(training.model.noise.state[0]), training.step, _ADDITION)
        for number in range(self.draws if self.addition == "draws" else 1):
            yield posterior.sample(make_key(seed, number, posterior.index.device))
