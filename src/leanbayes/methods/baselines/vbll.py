"""Variational Bayesian last layer (VBLL, Harrison et al. 2024): a deterministic network with a Gaussian last layer."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from leanbayes.core.last_layer import last_layer
from leanbayes.core.layout import Layout, Select
from leanbayes.likelihoods import Categorical, Likelihood, NegativeLogLikelihood
from leanbayes.methods.gaussian_settings import EngineName, check_gaussian_settings, initial_posterior
from leanbayes.model.method import Method, register_method
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.priors import Normal, Prior
from leanbayes.rules import Moments


@register_method("vbll")
@dataclass(frozen=True)
class VBLL(Method):
    """Variational Bayesian last layer: only the last linear layer is Gaussian, and nothing is sampled.

    The outputs are exactly Gaussian given the features, so training and prediction take one pass. The loss of classes
    is the bound log Σ_c exp(m_c + v_c/2) - m_y of the expected cross-entropy; that of other likelihoods is the
    expected one. Weights have independent stds, and the logits no noise of their own, which the paper also has.

    Paper: Harrison, Willes and Snoek (2024), "Variational Bayesian Last Layers".

    Attributes:
        prior: the prior over the weights and biases of the last layer.
        init_std: the initial σ.
        relative: whether init_std is a fraction of the std of the layer's weights rather than σ itself.
        engine: how means and stds are trained, as in `MeanField`.
        rule: how the model is trained and predicts. moments is the method's own; others sample.
        samples: number of Monte Carlo samples of a prediction, for rules that sample.

    Example:
        >>> bnn = lb.fit(network, lb.VBLL(), train_set, epochs=30)
        >>> bnn = lb.bayesianize(network, lb.VBLL(), select=["head.weight"])  # another last layer
    """

    prior: Prior = field(default_factory=lambda: Normal(1.0))
    init_std: float = 0.05
    relative: bool = True
    engine: EngineName = "backprop"
    rule: str = "moments"
    samples: int = 30

    def __post_init__(self) -> None:
        check_gaussian_settings(self.prior, self.init_std, self.rule, self.samples, self.engine)

    def selected(self, network: nn.Module) -> Select:
        """Return the weight and bias of the last linear layer."""
        return last_layer(network)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> MeanFieldPosterior:
        """Set μ to the given weights, and σ to the earlier one if there is one."""
        return initial_posterior(layout, mean, variance, self.prior, self.init_std, self.relative)

    def expected_nll(self, likelihood: Likelihood, output: Moments, y: Tensor, key: Tensor) -> NegativeLogLikelihood:
        """Return the bound for classes, E log Σ exp z ≤ log Σ exp(m + v/2), and else the expected loss."""
        if isinstance(likelihood, Categorical):
            return likelihood.bounded_nll(output, y)
        return likelihood.expected_nll(output, y, key)
