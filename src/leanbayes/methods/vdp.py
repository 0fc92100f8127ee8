"""Variational density propagation (VDP++): the moments of the weights go through the network in one pass."""

import math
from dataclasses import dataclass, field
from typing import Literal, Self

from torch import Tensor

from leanbayes.core.config import check_choices, renamed
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood, NegativeLogLikelihood
from leanbayes.likelihoods.base import MIN_VARIANCE
from leanbayes.likelihoods.expectations import LOGIT_SAMPLES
from leanbayes.methods.gaussian_settings import check_gaussian_settings, initial_posterior
from leanbayes.model.method import Method, register_method
from leanbayes.posteriors import Posterior, RowPosterior
from leanbayes.priors import Normal, Prior
from leanbayes.rules import MomentPropagation, Moments, Rule

Objective = Literal["expected_cross_entropy", "gaussian", "cross_entropy"]
Variance = Literal["weight", "row"]


@register_method("vdp")
@dataclass(frozen=True)
class VDP(Method):
    """Variational density propagation (VDP++): mean and variance of the outputs in one pass, without sampling.

    Paper: "Efficient Scaling of Bayesian Neural Networks", which extends Dera et al. (2019).
    The settings of the paper are `VDP.paper()`.

    In training, BatchNorm divides by the expected variance of the batch, the noise of the activations included. So its
    outputs have a mean square of at most 1, as in every sample, and training is stable even with two examples per batch
    and a feature map of one pixel, where the variance of the means can be nearly 0. With activations=taylor the
    means are those of the plain network, unless a channel has only two values in a batch: there its gradients are
    unbounded.

    Attributes:
        prior: the prior over the weights: `Normal` or `ScaleMixture`.
        init_std: the initial σ.
        relative: whether init_std is a fraction of the std of each layer's weights rather than σ itself.
        objective: the loss. expected_cross_entropy is the expected negative log-likelihood under the moments of the
            outputs, for any likelihood. gaussian scores the labels under a Gaussian with the moments of the prediction.
            cross_entropy scores only the means, so that σ learns only as far as the means depend on it, and not at all
            with activations=taylor.
        variance: one σ per weight, or per row of a weight matrix.
        correlation: common propagates the noise that all positions of a convolution share; none ignores it.
        activations: exact propagates a Gaussian through an activation function; taylor uses only its slope at the mean;
            paper is taylor with equations 9 and 14 of the paper for softmax and layer norm. Equation 14 prints the mean
            of the inputs where the weight of the norm must be; the weight is used.
        logit_samples: number of samples of the logits (not of the network) for the expected cross-entropy of a step.
        rule: how the model is trained and predicts: moments, or covariance for small networks.
        samples: number of Monte Carlo samples of a prediction, for rules that sample.
        min_variance: the smallest variance of a probability under objective=gaussian. At 0, as in the paper, the loss
            has no lower bound, and that of a wrong label with a small variance is huge.

    Example:
        >>> bnn = lb.fit(network, lb.VDP(), train_set, epochs=30, temperature=0.01)
        >>> prediction = bnn.predict(x)  # one pass
    """

    prior: Prior = field(default_factory=Normal)
    init_std: float = 0.05
    relative: bool = True
    objective: Objective = "expected_cross_entropy"
    variance: Variance = "weight"
    correlation: Literal["common", "none"] = "common"
    activations: Literal["exact", "taylor", "paper"] = "exact"
    logit_samples: int = renamed(LOGIT_SAMPLES, "logit_draws")
    rule: str = "moments"
    samples: int = 30
    min_variance: float = MIN_VARIANCE

    def __post_init__(self) -> None:
        check_choices(self, objective=Objective, variance=Variance)
        if not 0 <= self.min_variance < math.inf:
            raise LeanBayesError(f"min_variance={self.min_variance} must be a finite number and not negative.")
        if self.logit_samples < 1:
            raise LeanBayesError(f"logit_samples={self.logit_samples} must be at least 1.")
        MomentPropagation(self.correlation, self.activations)  # raises an error for invalid settings
        check_gaussian_settings(self.prior, self.init_std, self.rule, self.samples)

    @classmethod
    def paper(cls) -> Self:
        """Return the settings of the paper: equations 2 to 12 and 14, one variance per row, and a prior N(0, 1).

        Equation 11 has no floor of the variance, so min_variance is 0. On digits the same settings with the default
        floor are significantly better in accuracy and NLL (experiments/results/digits_vdp_paper.json). Three things
        differ from the text. Equation 11 has ½ before both terms, as in its second line; the last line prints it before
        one. Equation 13 has the Jacobian of a whole residual block; here the variances of its two paths add up. And
        biases have no variance, unless `select` includes them.
        """
        return cls(
            Normal(1.0), objective="gaussian", variance="row", correlation="none", activations="paper", min_variance=0.0
        )

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Posterior:
        """Set μ to the given weights, and σ to the earlier one if there is one."""
        posterior = initial_posterior(layout, mean, variance, self.prior, self.init_std, self.relative)
        if self.variance == "weight":
            return posterior
        return RowPosterior(layout, mean, posterior.std().detach(), posterior.prior)

    def named_rule(self, name: str) -> Rule:
        """Return the rule of that name; `moments` has the settings of this method."""
        return MomentPropagation(self.correlation, self.activations) if name == "moments" else super().named_rule(name)

    def expected_nll(self, likelihood: Likelihood, output: Moments, y: Tensor, key: Tensor) -> NegativeLogLikelihood:
        """Return the loss of outputs under the objective."""
        if self.objective == "cross_entropy":
            return likelihood.nll(output.loc, y)
        if self.objective == "gaussian":
            return likelihood.gaussian_nll(output, y, self.min_variance)
        return likelihood.expected_nll(output, y, key, self.logit_samples)
