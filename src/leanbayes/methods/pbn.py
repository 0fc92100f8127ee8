"""Partial Bayesian networks (PBN): of all weights, only those to which the outputs are most sensitive are Bayesian."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn

from leanbayes.bayesian import BayesianModel
from leanbayes.config import check_choices, configurable
from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout
from leanbayes.method import Method, Stage, Training
from leanbayes.methods.deterministic import Deterministic
from leanbayes.methods.mean_field import MeanField
from leanbayes.posteriors import PartialPosterior
from leanbayes.posteriors.partial import KLSum
from leanbayes.priors import Normal, Prior
from leanbayes.selection import Per, check_rate, top
from leanbayes.sensitivities import DEFAULT, NEEDS_NO_DATA, Kind, check_kind, score_without_data, scores_of

_BATCHES = 32  # of a training that are looked at: with four sets of signs each, a score is right to about 12 %


@configurable
@dataclass(frozen=True)
class PBN(Method):
    """Partial Bayesian network: the weights to which the outputs are most sensitive are Gaussian, all others points.

    It begins with a plain training, or with a network that is trained. Then the weights are chosen, and means and
    spreads are trained together. Biases and norms are not among them, unless `select=` says so.

    Attributes:
        rate: share of the weights that are Bayesian, from 0 (none) to 1 (mean-field).
        sensitivity: by what they are chosen: jacobian (how the outputs change with them), moment (the same from the
            moment graph), fisher (mean squared gradient), paper (size of the mean gradient), magnitude or random.
        per: choose single weights; or whole rows (outputs of a layer) or layers, as many as fit.
        pretrain: share of the epochs that train the plain network first. 0 for a network that is trained.
        train_means: train means, biases and norms too, not the spreads alone.
        prior: what the Bayesian weights are believed to be before any data are seen: `Normal` or `ScaleMixture`.
        init_std: the first σ.
        relative: take init_std as a share of the std of each layer's weights, not as σ itself.
        kl: sum is that of all Bayesian weights; mean, the authors' way, sums the mean of each layer, and the
            temperature is then its weight beside the mean loss.
        rule: how it is trained and predicts: sample, flipout, local, moments or mean.
        samples: draws of a prediction.
        seed: number that random choices and signs follow from.
    """

    rate: float = 0.05
    sensitivity: Kind = DEFAULT
    per: Per = "weight"
    pretrain: float = 0.5
    train_means: bool = True
    prior: Prior = field(default_factory=Normal)
    init_std: float = 0.05
    relative: bool = True
    kl: KLSum = "sum"
    rule: str = "sample"
    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_kind(self.sensitivity)
        check_choices(self, per=Per, kl=KLSum)
        if not 0 <= self.pretrain < 1:
            raise LeanBayesError(f"pretrain={self.pretrain} must be a share of the epochs, at least 0 and less than 1.")
        if self.kl == "mean" and not isinstance(self.prior, Normal):
            raise LeanBayesError("kl='mean' needs a prior with a closed form: use lb.Normal(), or kl='sum'.")
        self._mean_field()

    @classmethod
    def paper(cls) -> Self:
        """Return the settings of the paper; the randomness of its first ρ ~ N(-3, 1) is left out.

        Its recipe is SGD with samples=5, temperature=0.2, temperature_end=0.01 and temperature_warmup=0.
        """
        return cls(sensitivity="paper", prior=Normal(1.0), init_std=0.05, relative=False, kl="mean", samples=5)

    def _mean_field(self) -> MeanField:
        return MeanField(self.prior, self.init_std, self.relative, self.rule, self.samples)

    # -- a new model --------------------------------------------------------------------------------------------------

    def wrap(self, network: nn.Module) -> nn.Module:
        """Freeze what is not Bayesian where only spreads are trained."""
        return network if self.train_means else network.requires_grad_(False)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> PartialPosterior:
        """Put μ on the given weights; which of them have a σ is known already if that takes no data.

        That σ is an earlier one where there is one.
        """
        known = None if variance is None else torch.where(variance > 0, variance, torch.nan)  # a point has none
        dense = self._mean_field().posterior(layout, mean, known)
        made = PartialPosterior(layout, mean, dense.std().detach(), dense.prior, kl=self.kl)
        made.mu.requires_grad_(self.train_means)
        if self.rate in (0, 1) or self.sensitivity in NEEDS_NO_DATA:
            made.choose(top(layout, score_without_data(mean, self.sensitivity, self.seed), self.rate, self.per))
        return made

    def choose(self, bnn: BayesianModel, batches: Iterable[Any]) -> None:
        """Choose the Bayesian weights on all of these batches."""
        self._choose(bnn, Training(bnn, 0, 0, lambda: batches))

    # -- its training -------------------------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        """Train the plain network, then the partial one."""
        last = Stage(self, 1 - self.pretrain)
        return (Stage(Deterministic(), self.pretrain), last) if self.pretrain else (last,)

    def start(self, training: Training) -> None:
        """Choose the Bayesian weights on a few training batches, unless they are chosen."""
        self._choose(training.model, training, _BATCHES)

    def _choose(self, bnn: BayesianModel, training: Training, most: int | None = None) -> None:
        posterior = bnn.posterior
        assert isinstance(posterior, PartialPosterior)
        if posterior.is_chosen:
            return
        with training.autocast():
            batches = islice(training.batches(), most)
            scores = scores_of(bnn, posterior.mean().detach(), batches, self.sensitivity, self.seed)
        posterior.choose(top(bnn.layout, training.average(scores), self.rate, self.per))
