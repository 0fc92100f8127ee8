"""Partial Bayesian networks (PBN): only the weights that the outputs are most sensitive to are Bayesian."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.config import check_choices
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.methods.gaussian_settings import EngineChoice, EngineName, check_gaussian_settings, initial_posterior
from leanbayes.methods.pbn.estimators import DEFAULT, NEEDS_NO_DATA, Kind, check_kind, score_without_data, scores_of
from leanbayes.methods.pbn.selection import Per, check_rate, top
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.method import Method, Stage, Training, register_method
from leanbayes.posteriors import PartialPosterior
from leanbayes.posteriors.partial import KLSum
from leanbayes.priors import Normal, Prior

_BATCHES = 32  # training batches to score weights on
_RHO = 0x4E01  # separates the noise of the initial ρ from other noise of the same seed


@register_method("pbn")
@dataclass(frozen=True)
class PBN(Method):
    """Partial Bayesian network: the weights that the outputs are most sensitive to are Gaussian.

    All other weights are deterministic. Training starts with a plain network, or from a trained one. Then the Bayesian
    weights are selected, and means and stds are trained together. Biases and norms are not among them, unless `select=`
    includes them.

    Paper: "Efficient Uncertainty Estimation via Sensitivity-Guided Subnetwork Selection for Scalable Variational
    Inference". `PBN.paper()` has its settings.

    Attributes:
        rate: fraction of the weights that are Bayesian, from 0 (none) to 1 (mean-field).
        sensitivity: how weights are scored: jacobian (how the outputs change with them), moment (the same from the
            moment graph), fisher (mean squared gradient), paper (size of the mean gradient), magnitude or random.
        per: select single weights, or as many whole rows (outputs of a layer) or layers as fit.
        pretrain: fraction of the epochs that train the plain network first. Use 0 for a trained network.
        train_means: train means, biases and norms too, not only the stds.
        prior: the prior over the Bayesian weights: `Normal` or `ScaleMixture`.
        init_std: the initial σ.
        relative: whether init_std is a fraction of the std of each layer's weights rather than σ itself.
        kl: sum adds up the KL of all Bayesian weights. mean, as in the authors' code, adds up the mean of each layer;
            the temperature is then its weight relative to the mean loss.
        engine: how means and stds are trained. backprop takes gradients of the ELBO, with any optimizer. ivon is the
            natural-gradient update of `lb.IVON`, which sets the initial σ itself. auto is ivon if `lb.fit` or the
            command line trains a network with BatchNorm on classes of color images and no setting of an optimizer is
            given, else backprop.
        rule: how the model is trained and predicts: sample, flipout, local, moments or mean.
        samples: number of Monte Carlo samples of a prediction.
        seed: seed of random scores, random signs and the noise of ρ.
        rho_noise: std of Gaussian noise that is added to the initial ρ of each weight, where σ = softplus(ρ).

    Example:
        >>> bnn = lb.fit(network, lb.PBN(rate=0.05), train_set, epochs=30, temperature=0.01)
        >>> bnn = lb.bayesianize(trained, lb.PBN(rate=0.05), data=train_loader)  # for your own loop
    """

    rate: float = 0.05
    sensitivity: Kind = DEFAULT
    per: Per = "weight"
    pretrain: float = 0.5
    train_means: bool = True
    prior: Prior = field(default_factory=lambda: Normal("auto"))
    init_std: float = 0.05
    relative: bool = True
    kl: KLSum = "sum"
    engine: EngineChoice = field(default="auto", metadata={"former_default": "backprop"})
    rule: str = "sample"
    samples: int = 30
    seed: int = 0
    rho_noise: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_kind(self.sensitivity)
        check_choices(self, per=Per, kl=KLSum)
        if not 0 <= self.pretrain < 1:
            raise LeanBayesError(f"pretrain={self.pretrain} must be a fraction of the epochs, from 0 to less than 1.")
        if not 0 <= self.rho_noise < math.inf:
            raise LeanBayesError(f"rho_noise={self.rho_noise} must be a finite number and not negative.")
        if self.kl == "mean" and not getattr(self.prior, "gaussian", False):
            raise LeanBayesError("kl='mean' needs a prior with a closed form: use lb.Normal(), or kl='sum'.")
        if self.kl == "mean" and self.engine == "ivon":
            raise LeanBayesError("engine='ivon' needs the KL of the ELBO: use kl='sum', or engine='backprop'.")
        check_gaussian_settings(self.prior, self.init_std, self.rule, self.samples, self.engine)

    @classmethod
    def paper(cls) -> Self:
        """Return the settings of the paper, with the initial ρ ~ N(-3, 1) and the mean KL of the authors' code.

        Its recipe is optimizer="sgd", scale_optimizer="sgd", lr=0.01, lr_low=1.0 and warmup=0 (a constant rate),
        samples=5, temperature=0.2, temperature_end=0.01 and temperature_warmup=0. The default scale_optimizer, Adam,
        takes large steps along the small gradients of this KL: stds rise toward that of the prior, and the network
        gets worse (experiments/results/pbn/recipe.json).
        """
        std = math.log1p(math.exp(-3))
        return cls(
            sensitivity="paper", prior=Normal(1.0), init_std=std, relative=False, rho_noise=1.0, kl="mean", samples=5
        )

    # -- a new model --------------------------------------------------------------------------------------------------

    def wrap(self, network: nn.Module) -> nn.Module:
        """Freeze the parameters that are not Bayesian if only stds are trained."""
        return network if self.train_means else network.requires_grad_(False)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> PartialPosterior:
        """Set μ to the given weights, and σ to the earlier one if there is one.

        The Bayesian weights are selected at once if that needs no data.
        """
        # Deterministic weights of the earlier posterior have no std.
        known = None if variance is None else torch.where(variance > 0, variance, torch.nan)
        dense = initial_posterior(layout, mean, known, self.prior, self.init_std, self.relative)
        std = dense.std().detach()
        if self.rho_noise:
            noisy = dense.rho.detach() + self.rho_noise * noise.normal(std, noise.make_key(self.seed, _RHO, std.device))
            std = F.softplus(noisy) if known is None else torch.where(known.isnan(), F.softplus(noisy), std)
        partial = PartialPosterior(layout, mean, std, dense.prior, kl=self.kl)
        partial.mu.requires_grad_(self.train_means)
        if self.rate in (0, 1) or self.sensitivity in NEEDS_NO_DATA:
            partial.choose(top(layout, score_without_data(mean, self.sensitivity, self.seed), self.rate, self.per))
        return partial

    def choose(self, bnn: BayesianModel, batches: Iterable[Any]) -> None:
        """Select the Bayesian weights on all of these batches."""
        self._choose(bnn, Training(bnn, 0, 0, lambda: batches))

    # -- training -----------------------------------------------------------------------------------------------------

    def stages(self) -> tuple[Stage, ...]:
        """Train the plain network, then the partial one."""
        last = Stage(self, 1 - self.pretrain)
        engine: EngineName = "ivon" if self.engine == "ivon" else "backprop"
        return (Stage(Deterministic(engine=engine), self.pretrain), last) if self.pretrain else (last,)

    def start(self, training: Training) -> None:
        """Select the Bayesian weights on a few training batches, unless they are selected already."""
        self._choose(training.model, training, _BATCHES)

    def _choose(self, bnn: BayesianModel, training: Training, most: int | None = None) -> None:
        posterior = bnn.posterior
        if bnn.root_units is not None:  # they were chosen before it was sharded
            return
        assert isinstance(posterior, PartialPosterior)
        if posterior.is_chosen:
            return
        with training.autocast():
            batches = islice(training.batches(), most)
            scores = scores_of(bnn, posterior.mean().detach(), batches, self.sensitivity, self.seed)
        posterior.choose(top(bnn.layout, training.average(scores), self.rate, self.per))
