"""Mean-field variational inference: Bayes by Backprop (Blundell et al. 2015) on any network."""

from dataclasses import dataclass, field

from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.methods.gaussian_settings import EngineChoice, check_gaussian_settings, initial_posterior
from leanbayes.model.method import Method, register_method
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.priors import Normal, Prior


@register_method("mean-field")
@dataclass(frozen=True)
class MeanField(Method):
    """Mean-field variational inference: each weight has its own mean and std, w ~ N(μ, σ²).

    Paper: Blundell et al. (2015), "Weight Uncertainty in Neural Networks" (Bayes by Backprop).

    Attributes:
        prior: the prior over the weights: `Normal` or `ScaleMixture`.
        init_std: the initial σ.
        relative: whether init_std is a fraction of the std of each layer's weights rather than σ itself.
        engine: how means and stds are trained. backprop takes gradients of the ELBO, with any optimizer. ivon is the
            natural-gradient update of `lb.IVON`, which sets the initial σ itself. auto is ivon if `lb.fit` or the
            command line trains a network with BatchNorm on classes of color images and no setting of an optimizer is
            given, else backprop.
        rule: how the model is trained and predicts: sample, flipout, local, moments or mean.
        samples: number of Monte Carlo samples of a prediction.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField(prior=lb.Normal(0.1)))
        >>> loss = lb.elbo_loss(bnn, x, y, num_data=len(train_set))
    """

    prior: Prior = field(default_factory=lambda: Normal("auto"))
    init_std: float = 0.05
    relative: bool = True
    engine: EngineChoice = field(default="auto", metadata={"former_default": "backprop"})
    rule: str = "sample"
    samples: int = 30

    def __post_init__(self) -> None:
        check_gaussian_settings(self.prior, self.init_std, self.rule, self.samples, self.engine)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> MeanFieldPosterior:
        """Set μ to the given weights, and σ to the earlier one if there is one."""
        return initial_posterior(layout, mean, variance, self.prior, self.init_std, self.relative)
