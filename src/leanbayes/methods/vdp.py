"""Variational density propagation (VDP++): the moments of the weights go through the network in one pass."""

from dataclasses import dataclass, field
from typing import Literal, Self

from torch import Tensor

from leanbayes.config import check_choices, configurable
from leanbayes.errors import LeanBayesError
from leanbayes.expectations import LOGIT_DRAWS
from leanbayes.layout import Layout
from leanbayes.likelihoods import Likelihood, NegativeLogLikelihood
from leanbayes.method import Method
from leanbayes.methods.mean_field import MeanField
from leanbayes.posteriors import Posterior, RowPosterior
from leanbayes.priors import Normal, Prior
from leanbayes.rules import MomentPropagation, Moments, Rule

Objective = Literal["expected_cross_entropy", "gaussian", "cross_entropy"]
Variance = Literal["weight", "row"]


@configurable
@dataclass(frozen=True)
class VDP(Method):
    """Variational density propagation (VDP++): mean and variance of the outputs in one pass, without draws.

    Attributes:
        prior: what the weights are believed to be before any data are seen: `Normal` or `ScaleMixture`.
        init_std: the first σ.
        relative: take init_std as a share of the std of each layer's weights, not as σ itself.
        objective: what is minimised: expected_cross_entropy (of any likelihood, under the moments of the outputs),
            gaussian (the labels under a Gaussian with the moments of the prediction), or cross_entropy of the means,
            from which σ learns only as far as the means depend on it, and with activations=taylor nothing.
        variance: one σ for each weight, or for each row of a weight matrix.
        correlation: common keeps the noise that all positions of a convolution share; none forgets it.
        activations: exact takes a Gaussian through an activation function, taylor only its slope at the mean.
        logit_draws: draws of the logits, not of the network, for the expected cross-entropy of a training step.
        rule: how it is trained and predicts: moments, or covariance for small networks.
        samples: draws of a prediction where it is made with a rule that draws.
    """

    prior: Prior = field(default_factory=Normal)
    init_std: float = 0.05
    relative: bool = True
    objective: Objective = "expected_cross_entropy"
    variance: Variance = "weight"
    correlation: Literal["common", "none"] = "common"
    activations: Literal["exact", "taylor"] = "exact"
    logit_draws: int = LOGIT_DRAWS
    rule: str = "moments"
    samples: int = 30

    def __post_init__(self) -> None:
        check_choices(self, objective=Objective, variance=Variance)
        if self.logit_draws < 1:
            raise LeanBayesError(f"logit_draws={self.logit_draws} must be at least 1.")
        MomentPropagation(self.correlation, self.activations)
        self._mean_field()

    @classmethod
    def paper(cls) -> Self:
        """Return the settings of the paper: rows, equation 11, slopes, no correlations, and a prior N(0, 1)."""
        return cls(Normal(1.0), objective="gaussian", variance="row", correlation="none", activations="taylor")

    def _mean_field(self) -> MeanField:
        return MeanField(self.prior, self.init_std, self.relative, self.rule, self.samples)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> Posterior:
        """Put μ on the given weights, and σ on an earlier one where there is one."""
        posterior = self._mean_field().posterior(layout, mean, variance)
        if self.variance == "weight":
            return posterior
        return RowPosterior(layout, mean, posterior.std().detach(), posterior.prior)

    def make_rule(self, name: str | Rule) -> Rule:
        """Return the rule of that name, `moments` with the settings of this method."""
        return MomentPropagation(self.correlation, self.activations) if name == "moments" else super().make_rule(name)

    def expected_nll(self, likelihood: Likelihood, output: Moments, y: Tensor, key: Tensor) -> NegativeLogLikelihood:
        """Score outputs by the objective."""
        if self.objective == "cross_entropy":
            return likelihood.nll(output.loc, y)
        if self.objective == "gaussian":
            return likelihood.gaussian_nll(output, y)
        return likelihood.expected_nll(output, y, key, self.logit_draws)
