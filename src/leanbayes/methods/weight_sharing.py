"""Stochastic weight sharing (2DGBNN, Lin et al. 2025): all weights are members of few Gaussians of the (μ, σ) plane."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Self

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.compression.assignment import Dissolve
from leanbayes.compression.codes import Codes
from leanbayes.compression.merging import MergeRule
from leanbayes.compression.mixture import CHI2_95
from leanbayes.compression.plane import Metric
from leanbayes.compression.sharing import SharingSettings, share_codes
from leanbayes.config import check_choices, configurable
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.gradients import no_batches, weight_gradient
from leanbayes.layout import Layout
from leanbayes.method import Method, Stage, Training
from leanbayes.methods.deterministic import Deterministic
from leanbayes.methods.mean_field import MeanField
from leanbayes.network import evaluation_mode
from leanbayes.posteriors import SharedPosterior
from leanbayes.posteriors.shared import Sampling
from leanbayes.priors import Normal, Prior
from leanbayes.rules import Rule

Scope = Literal["global", "layer"]
_BATCHES = 50  # of a training that gradients are measured on


@configurable
@dataclass(frozen=True)
class WeightSharing(SharingSettings, Method):
    """Stochastic weight sharing: few Gaussians in a codebook, and for every weight the number of its own.

    It begins with a network, or with any Bayesian model: zeros of a sparse one stay zero and cost nothing, points of a
    partial one share with points. Once weights share, the codebook, outliers and blends are trained, and labels stay.
    Gradients and sensitivities, where settings ask for them, are measured on the data of `bayesianize`, or on the first
    50 batches of a training; until then the model does nothing.

    Attributes:
        scope: whether layers share with each other (global), or each has components of its own (layer), as many as its
            part of all weights.
        sampling: each weight has noise of its own (independent), or before it draws its own (μ, σ) from its component
            (hierarchical); or a component is drawn once for all its weights (tied).
        pretrain: share of the epochs that train the plain network first. 0 for a network that is trained.
        pretrain_spreads: share of the epochs that then train mean and spread of every weight. 0 for a Bayesian model
            that is trained.
        rounds: how often that is done, and weights share: from the codes of one round the weights of the next go out,
            each on its own, and share again, so that they may change their codes.
        prior: what the weights are believed to be before any data are seen: `Normal` or `ScaleMixture`.
        init_std: the first σ, where there is no earlier one.
        relative: take init_std as a share of the std of each layer's weights, not as σ itself.
        rule: how it is trained and predicts: sample, flipout, local, moments or mean.
        samples: draws of a prediction.
    """

    components: int | None = 256
    threshold: float | None = None
    gradient_share: float = 0.0
    border: float | None = None
    scope: Scope = "global"
    sampling: Sampling = "independent"
    pretrain: float = 0.0
    pretrain_spreads: float = 0.5
    rounds: int = 1
    prior: Prior = field(default_factory=Normal)
    init_std: float = 0.05
    relative: bool = True
    rule: str = "sample"
    samples: int = 30

    def __post_init__(self) -> None:
        check_choices(self, metric=Metric, dissolve=Dissolve, merge_rule=MergeRule, scope=Scope, sampling=Sampling)
        for setting in ("components", "minimum", "nearest", "rounds"):
            if getattr(self, setting) is not None and getattr(self, setting) < 1:
                raise LeanBayesError(f"{setting}={getattr(self, setting)} must be at least 1.")
        for setting in ("threshold", "border", "merge_distance", "merge_gradient", "merge_variance", "bit_price"):
            if getattr(self, setting) is not None and not getattr(self, setting) >= 0:
                raise LeanBayesError(f"{setting}={getattr(self, setting)} must not be negative.")
        if not 0 <= self.gradient_share < 1:
            raise LeanBayesError(f"gradient_share={self.gradient_share} must be at least 0 and less than 1.")
        if not (min(self.pretrain, self.pretrain_spreads) >= 0 and self.pretrain + self.pretrain_spreads < 1):
            raise LeanBayesError("pretrain and pretrain_spreads must be shares of the epochs, less than 1 together.")
        if self.rounds > 1 and not self.pretrain_spreads:
            raise LeanBayesError(f"rounds={self.rounds} need epochs in which weights move: give pretrain_spreads.")
        if self.bit_price is not None and (self.border is not None or self.metric == "sensitivity"):
            raise LeanBayesError("bit_price gives each weight one code by its own 1/σ²: leave border and metric out.")
        if self.sampling == "tied" and not (
            isinstance(self.prior, Normal) and self.prior.center == "zero" and not isinstance(self.prior.scale, str)
        ):
            raise LeanBayesError("sampling='tied' needs one prior for all weights: use one such as lb.Normal(0.1).")
        self._mean_field()
        self.make_rule(self.rule)

    @classmethod
    def paper(cls) -> Self:
        """Return the settings of the paper; how the epochs are shared out among the stages is not from it.

        Its recipe is SGD with lr=0.1, batch_size=256 and 250 epochs for the plain network.
        """
        return cls(
            components=6000,
            threshold=0.2,
            gradient_share=0.01,
            border=CHI2_95,
            merge_distance=1.5e-7,
            pretrain=0.5,
            pretrain_spreads=0.25,
        )

    def _mean_field(self) -> MeanField:
        return MeanField(self.prior, self.init_std, self.relative, self.rule, self.samples)

    def make_rule(self, name: str | Rule) -> Rule:
        """Return the rule of that name; what is drawn once for many weights can only be sampled."""
        rule = super().make_rule(name)
        if self.sampling == "tied" and rule.name not in ("sample", "mean"):
            raise UnsupportedOperation(
                f"The rule {rule.name!r} takes weights for independent, and sampling='tied' gives many one noise: use "
                "the rule 'sample' or 'mean'."
            )
        return rule

    # -- a new model --------------------------------------------------------------------------------------------------

    @property
    def needs_data(self) -> bool:
        """Whether it takes gradients to say which weights share."""
        by_gradient = self.gradient_share > 0 or self.merge_gradient < float("inf") or self.metric == "sensitivity"
        return self.components is not None and by_gradient

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SharedPosterior:
        """Let the given weights share, if that takes no data; σ is an earlier one where there is one."""
        dense = self._mean_field().posterior(layout, mean, variance)
        std = dense.std().detach()
        if variance is not None:
            std = torch.where(variance == 0, 0.0, std)
        waits = self.needs_data
        codes = self._codes(layout, mean, std, replace(self, components=None) if waits else self)
        return SharedPosterior.of(layout, codes, dense.prior, self.sampling, shared=not waits)

    def empty_posterior(self, layout: Layout, mean: Tensor) -> SharedPosterior:
        """Make one without codes."""
        labels = torch.zeros_like(mean, dtype=torch.int32)
        prior = self.prior.bind(layout, mean)
        return SharedPosterior(layout, mean[:0], mean[:0], labels, prior, sampling=self.sampling)

    def _codes(
        self,
        layout: Layout,
        mean: Tensor,
        std: Tensor,
        settings: SharingSettings,
        gradient: Tensor | None = None,
        sensitivity: Tensor | None = None,
    ) -> Codes:
        layers = layout.sizes if self.scope == "layer" else None
        return share_codes(mean, std, settings, gradient, sensitivity, layers)

    def choose(self, bnn: BayesianModel, batches: Iterable[Any]) -> None:
        """Measure gradients on all of these batches, and let weights share."""
        self._choose(bnn, Training(bnn, 0, 0, lambda: batches))

    # -- its training -------------------------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        """Train the plain network, then each weight's own mean and spread, then what they share; and so on."""
        own = replace(self, components=None, sampling="independent", pretrain=0.0, pretrain_spreads=0.0, rounds=1)
        rest = 1 - self.pretrain - self.pretrain_spreads
        each = (own, self.pretrain_spreads / self.rounds), (self, rest / self.rounds)
        shares = (Deterministic(), self.pretrain), *each * self.rounds
        return tuple(Stage(method, share) for method, share in shares if share)

    def start(self, training: Training) -> None:
        """Let weights share, with gradients of a few training batches, unless they do."""
        self._choose(training.model, training, _BATCHES)

    def _choose(self, bnn: BayesianModel, training: Training, most: int | None = None) -> None:
        posterior = bnn.posterior
        assert isinstance(posterior, SharedPosterior)
        if posterior.is_shared:
            return
        with training.autocast():
            sizes, squares = _gradients(bnn, islice(training.batches(), most))
        mean, std = posterior.mean().detach(), posterior.spread(posterior.codes_std()).detach()
        gradients = training.average(sizes), training.average(squares)
        posterior.share(self._codes(bnn.layout, mean, std, self, *gradients))


def _gradients(bnn: BayesianModel, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Return the means of |∂L/∂w| and of (∂L/∂w)² over batches, at the mean weights."""
    weights = bnn.posterior.mean().detach()
    sizes, squares, count = torch.zeros_like(weights), torch.zeros_like(weights), 0
    with evaluation_mode(bnn):
        for batch in batches:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
                raise LeanBayesError("The batches that gradients are taken on must be pairs (x, y): pass those.")
            gradient = weight_gradient(bnn, weights, *batch)
            sizes += gradient.abs()
            squares += gradient.square()
            count += 1
    if not count:
        raise no_batches()
    return sizes / count, squares / count
