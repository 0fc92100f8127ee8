"""Sparse subspace variational inference (SSVI, Li et al. 2024): Bayesian and sparse from the first step on."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import Any, Literal, Self

import torch
from torch import Tensor

from leanbayes.core.config import check_choices, renamed
from leanbayes.core.layout import Layout
from leanbayes.core.noise import mix
from leanbayes.errors import LeanBayesError
from leanbayes.methods.gaussian_settings import EngineChoice, check_gaussian_settings
from leanbayes.methods.sparse_training.base import SparseMethod
from leanbayes.methods.ssvi.criteria import REMOVAL
from leanbayes.model.gradients import ShardedWeights, averaged, mean_squared_gradient, weights_at
from leanbayes.model.method import Training, register_method
from leanbayes.posteriors import SubspacePosterior
from leanbayes.posteriors.subspace.blocks import block_shape
from leanbayes.priors import Normal, Prior

Removal = Literal["mean", "snr", "absolute_mean", "absolute_snr", "exponential_mean", "exponential_snr", "sensitivity"]
Addition = Literal["sample", "mean", "samples"]
_SENSITIVITY_BATCHES = 8
_ADDITION = 0x55F1  # separates the samples of the addition criterion from those of the training


@register_method("ssvi")
@dataclass(frozen=True)
class SSVI(SparseMethod):
    """Sparse subspace variational inference: a few weights are Gaussian and all others zero throughout training.

    At regular intervals the least important active weights are replaced by inactive ones. The settings of sparse
    training are inherited from `SparseMethod`.

    Paper: Li et al. (2024), "Training Bayesian Neural Networks with Sparse Subspace Variational Inference".
    `SSVI.paper()` has its settings.

    Attributes:
        removal: the importance of active weights, of which the least important are removed: |μ| (mean), |μ|/σ (snr),
            E|θ| (absolute_mean), E|θ|/std|θ| (absolute_snr, the choice of the paper, which ranks weights as |μ|/σ
            does), the same for exp(λ|θ|) (exponential_mean, exponential_snr), or S(μ² + σ²) with S the mean squared
            gradient of a few batches (sensitivity).
        exponent: λ of the exponential criteria.
        addition: where to take the gradient of the loss; the inactive weights with the largest are added. sample and
            mean take the last batch, at one sample of the weights or at their mean. samples averages |gradient| over
            several samples of the weights, the first on the last batch, each other one on a training batch of its own.
        addition_samples: number of samples that addition=samples averages over.
        new_std: σ of weights that are added: the mean σ of their layer (mean), or a number.
        prior: the prior over the active weights: `Normal` or `ScaleMixture`.
        init_std: the initial σ.
        engine: how means and stds are trained. backprop takes gradients of the ELBO, with any optimizer. ivon is the
            natural-gradient update of `lb.IVON`, which sets the initial σ itself. auto is ivon if `lb.fit` or the
            command line trains a network with BatchNorm on classes of color images and no setting of an optimizer is
            given, else backprop.
        rule: how the model is trained and predicts: sample, flipout, local, moments or mean.
        samples: number of Monte Carlo samples of a prediction.

    Example:
        >>> bnn = lb.fit(network, lb.SSVI(density=0.05), train_set, epochs=30, temperature=0.01)
        >>> lb.save(bnn, "model.safetensors")  # only the active weights
    """

    removal: Removal = "absolute_snr"
    exponent: float = 1.0
    addition: Addition = renamed("sample", values={"draw": "sample", "draws": "samples"})  # noqa: RUF009 (it is a field)
    addition_samples: int = renamed(5, "draws")
    new_std: float | Literal["mean"] = "mean"
    prior: Prior = field(default_factory=lambda: Normal("auto", gain=0.5))
    init_std: float = 1e-3
    engine: EngineChoice = field(default="auto", metadata={"former_default": "backprop"})
    rule: str = "sample"
    samples: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, removal=Removal, addition=Addition)
        if not 0 < self.exponent < math.inf:
            raise LeanBayesError(f"exponent={self.exponent} must be a positive number.")
        if self.addition_samples < 1:
            raise LeanBayesError(f"addition_samples={self.addition_samples} must be at least 1.")
        if self.new_std != "mean" and not (isinstance(self.new_std, (int, float)) and 0 < self.new_std < math.inf):
            raise LeanBayesError(f"new_std={self.new_std!r} must be 'mean' or a positive number.")
        check_gaussian_settings(self.prior, self.init_std, self.rule, self.samples, self.engine)
        if getattr(self.prior, "center", "zero") != "zero":
            raise LeanBayesError("SSVI does not store a center for each weight: use a prior with center='zero'.")

    @classmethod
    def paper(cls) -> Self:
        """Return the settings of the paper, but for the randomness of its initial σ; here all start at its mean.

        The paper says that σ is sampled from a Gaussian with a small variance, but not with which one. Its default
        criterion of additions is the first of three, one sample of the weights on one batch, because the others do no
        better. addition="mean" is the second, and addition="samples" the third: it averages |gradient| over samples of
        the weights, each on a batch of its own.

        Its recipe is SGD with lr=0.01, temperature=0.01 and 200 epochs. `lb.fit` trains the stds by Adam, unless
        scale_optimizer="sgd" is set.
        """
        return cls(densities="uniform", prior=Normal(0.005), init_std=6e-4, rule="local", samples=5)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SubspacePosterior:
        """Choose the initial subspace and set μ to the weights in it, and σ to the earlier one if there is one."""
        index, start = self.initial_subspace(layout, mean, variance, self._importance)
        std = torch.full_like(start[index], self.init_std)
        if variance is not None:
            known = variance[index]
            std = torch.where(known > 0, known.sqrt(), std)  # deterministic and unknown weights have no std
        prior = self.prior.bind(layout, start)
        return SubspacePosterior(layout, index, start[index], std, prior, block_shape(self.pattern))

    def _importance(self, mu: Tensor, sigma: Tensor) -> Tensor:
        criterion = REMOVAL["snr" if self.removal == "sensitivity" else self.removal]
        return criterion(mu, sigma.clamp_min(torch.finfo(sigma.dtype).tiny), self.exponent)

    @torch.no_grad()
    def removal_scores(self, training: Training, posterior: SubspacePosterior) -> Tensor:
        """Return the removal criterion of each active weight."""
        mu, sigma = posterior.stored()
        if self.removal != "sensitivity":
            return self._importance(mu, sigma)
        with training.autocast():
            batches = islice(training.batches(), _SENSITIVITY_BATCHES)
            squares = mean_squared_gradient(training.model, weights_at(training.model), batches)
        return posterior.at_index(averaged(training, squares)) * (mu.square() + sigma.square())

    def std_of_new_weights(self) -> float | None:
        """Return σ of weights that an exchange adds, or None for the mean of their layer."""
        return None if self.new_std == "mean" else self.new_std

    def addition_batches(self, training: Training) -> Iterable[Any]:
        """Return the last batch, and for several samples also other batches of the training data."""
        if self.addition != "samples" or self.addition_samples == 1:
            return [training.batch]
        return chain([training.batch], cycle(training.batches()))

    def addition_weights(self, training: Training, posterior: SubspacePosterior) -> Iterator[Tensor | ShardedWeights]:
        """Yield the weights at which the addition criterion takes gradients, the same in every process."""
        model = training.model
        if self.addition == "mean":
            yield weights_at(model)
            return
        seed = mix(int(model.noise.state[0]), training.step, _ADDITION)
        for number in range(self.addition_samples if self.addition == "samples" else 1):
            yield weights_at(model, model.noise.key(seed, number))
