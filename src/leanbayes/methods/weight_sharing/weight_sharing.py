"""Stochastic weight sharing (2DGBNN, Lin et al. 2025): all weights share few Gaussians of the (μ, σ) plane."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Self

import torch
from torch import Tensor

from leanbayes.core.config import check_choices, renamed
from leanbayes.core.layout import Layout
from leanbayes.core.network import evaluation_mode
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.methods.gaussian_settings import check_gaussian_settings, initial_posterior
from leanbayes.methods.weight_sharing.assignment import Dissolve
from leanbayes.methods.weight_sharing.codebook import SharingSettings, share_codes
from leanbayes.methods.weight_sharing.merging import MergeRule
from leanbayes.methods.weight_sharing.mixture import CHI2_95
from leanbayes.methods.weight_sharing.plane import Metric
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.gradients import no_batches, weight_gradient
from leanbayes.model.method import Method, Stage, Training, register_method
from leanbayes.posteriors import SharedPosterior
from leanbayes.posteriors.shared.codes import Codes
from leanbayes.posteriors.shared.schemes import Sampling
from leanbayes.priors import Normal, Prior

Scope = Literal["global", "layer"]
_BATCHES = 50  # training batches that gradients are measured on


@register_method("weight-sharing")
@dataclass(frozen=True)
class WeightSharing(SharingSettings, Method):
    """Stochastic weight sharing: a codebook of few Gaussians, and for each weight the number of its Gaussian.

    It starts from a network or from any Bayesian model. Zeros of a sparse model stay zero and cost nothing, and
    deterministic weights of a partial model share with each other only. Training then changes the codebook, outliers
    and blends; the labels stay. If settings need gradients or sensitivities, they are measured on the `data` passed to
    bayesianize, or on the first 50 batches of a training; until then the model cannot be used.

    Paper: Lin et al. (2025), "Stochastic Weight Sharing for Bayesian Neural Networks" (2DGBNN). `WeightSharing.paper()`
    has its settings.

    Attributes:
        scope: whether all layers share one set of components (global), or each layer has its own components (layer), in
            proportion to its weights.
        sampling: each weight has its own noise (independent), or first samples its own (μ, σ) from its component
            (hierarchical); or a component is sampled once for all its weights (tied).
        pretrain: fraction of the epochs that train the plain network first. Use 0 for a trained network.
        pretrain_std: fraction of the epochs that then train mean and std of each weight. Use 0 for a trained Bayesian
            model.
        rounds: how often weights are trained separately and then share again. Each round starts from the codes of the
            one before, so that weights can change their codes.
        prior: the prior over the weights: `Normal` or `ScaleMixture`.
        init_std: the initial σ of weights that have none yet.
        relative: whether init_std is a fraction of the std of each layer's weights rather than σ itself.
        rule: how the model is trained and predicts: sample, flipout, local, moments or mean.
        samples: number of Monte Carlo samples of a prediction.

    Raises:
        LeanBayesError: If a setting is invalid, or two settings exclude each other.

    Example:
        >>> shared = lb.fit(bnn, lb.WeightSharing(components=256, pretrain_std=0), train_set, epochs=10)
        >>> lb.compress(shared, "model.lbc")
    """

    components: int | None = 256
    threshold: float | None = None
    gradient_share: float = 0.0
    border: float | None = None
    scope: Scope = "global"
    sampling: Sampling = "independent"
    pretrain: float = 0.0
    pretrain_std: float = renamed(0.5, "pretrain_spreads")
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
        if not (min(self.pretrain, self.pretrain_std) >= 0 and self.pretrain + self.pretrain_std < 1):
            raise LeanBayesError("pretrain and pretrain_std must be fractions of the epochs with a sum below 1.")
        if self.rounds > 1 and not self.pretrain_std:
            raise LeanBayesError(f"rounds={self.rounds} needs epochs for single weights: set pretrain_std above 0.")
        if self.bit_price is not None and (self.border is not None or self.metric == "sensitivity"):
            raise LeanBayesError("bit_price gives each weight one code by its 1/σ²: leave out border and metric.")
        if self.sampling == "tied" and not (
            isinstance(self.prior, Normal) and self.prior.center == "zero" and not isinstance(self.prior.scale, str)
        ):
            raise LeanBayesError("sampling='tied' needs one prior for all weights: use lb.Normal(0.1).")
        check_gaussian_settings(self.prior, self.init_std, self.rule, self.samples)

    @classmethod
    def paper(cls) -> Self:
        """Return the settings that the paper prints, and its sampling of weights (line 28 of Algorithm 1).

        The paper prints no bounds for `merge_gradient` and `merge_variance`, and no fractions of the epochs. Four
        things differ from its text. Components merge by their moments, which equation 6 does not preserve. The KL
        counts a Gaussian once for each of its weights, which equation 10 does not. The initial σ is a fraction of the
        std of the layer; the paper draws it from a uniform distribution around 0, with negative values. And the prior
        is N(0, 0.1²), which the paper has for networks that are not pretrained; prior=lb.Normal(center="pretrained") is
        that around a trained network.

        Its recipe is SGD with lr=0.1, batch_size=256 and 250 epochs for the plain network.
        """
        return cls(
            components=6000,
            threshold=0.2,
            gradient_share=0.01,
            border=CHI2_95,
            merge_distance=1.5e-7,
            sampling="hierarchical",
            pretrain=0.5,
            pretrain_std=0.25,
        )

    # -- a new model --------------------------------------------------------------------------------------------------

    @property
    def needs_data(self) -> bool:
        """Whether gradients decide which weights share."""
        by_gradient = self.gradient_share > 0 or self.merge_gradient < float("inf") or self.metric == "sensitivity"
        return self.components is not None and by_gradient

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SharedPosterior:
        """Let the given weights share, if that needs no data. σ is the earlier one if there is one."""
        dense = initial_posterior(layout, mean, variance, self.prior, self.init_std, self.relative)
        std = dense.std().detach()
        if variance is not None:
            std = torch.where(variance == 0, 0.0, std)
        settings = replace(self, components=None) if self.needs_data else self
        codes = self._codes(layout, mean, std, settings)
        return SharedPosterior(layout, codes, dense.prior, self.sampling, shared=not self.needs_data)

    def empty_posterior(self, layout: Layout, mean: Tensor) -> SharedPosterior:
        """Return a posterior without codes."""
        codes = Codes.without_blends(mean[:0], mean[:0], torch.zeros_like(mean, dtype=torch.int32))
        return SharedPosterior(layout, codes, self.prior.bind(layout, mean), self.sampling)

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
        """Measure gradients on all batches, and let weights share."""
        self._choose(bnn, Training(bnn, 0, 0, lambda: batches))

    # -- its training -------------------------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        """Train the plain network, and then `rounds` times mean and std of each weight and the codebook."""
        single = replace(self, components=None, sampling="independent", pretrain=0.0, pretrain_std=0.0, rounds=1)
        rest = 1 - self.pretrain - self.pretrain_std
        each = (single, self.pretrain_std / self.rounds), (self, rest / self.rounds)
        shares = (Deterministic(), self.pretrain), *each * self.rounds
        return tuple(Stage(method, share) for method, share in shares if share)

    def start(self, training: Training) -> None:
        """Let weights share, with gradients of a few training batches, unless they share already."""
        self._choose(training.model, training, _BATCHES)

    def _choose(self, bnn: BayesianModel, training: Training, limit: int | None = None) -> None:
        posterior = bnn.posterior
        assert isinstance(posterior, SharedPosterior)
        if posterior.is_shared:
            return
        with training.autocast():
            magnitudes, squares = _gradients(bnn, islice(training.batches(), limit))
        mean, std = posterior.mean().detach(), posterior.expand(posterior.codes_std()).detach()
        gradients = training.average(magnitudes), training.average(squares)
        posterior.share(self._codes(bnn.layout, mean, std, self, *gradients))


def _gradients(bnn: BayesianModel, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Return the means of |∂L/∂w| and (∂L/∂w)² over batches, at the mean weights."""
    weights = bnn.posterior.mean().detach()
    magnitudes, squares, count = torch.zeros_like(weights), torch.zeros_like(weights), 0
    with evaluation_mode(bnn):
        for batch in batches:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
                raise LeanBayesError("Gradients need batches of pairs (x, y): pass such batches as data.")
            gradient = weight_gradient(bnn, weights, *batch)
            magnitudes += gradient.abs()
            squares += gradient.square()
            count += 1
    if not count:
        raise no_batches()
    return magnitudes / count, squares / count
