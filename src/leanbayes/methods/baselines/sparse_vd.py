"""Sparse variational dropout (Molchanov et al. 2017): a log-uniform prior turns most weights into noise around zero."""

import math
from dataclasses import dataclass

from torch import Tensor

from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.methods.gaussian_settings import check_gaussian_settings, initial_stds
from leanbayes.model.method import Method, Training, register_method
from leanbayes.posteriors import VariationalDropoutPosterior
from leanbayes.priors import Normal


@register_method("sparse-vd")
@dataclass(frozen=True)
class SparseVD(Method):
    """Sparse variational dropout: Gaussian weights with a log-uniform prior, most of which are pruned at the end.

    The prior drives α = σ²/μ² of weights that the data do not need to infinity. After the last step, weights with
    log α above a limit are set to zero, and only the others are stored. The temperature decides how many these are.
    The paper has 1, which leaves too few for a small data set. The default of 0.1 is the largest of 1, 0.1, 0.01 and
    0.001 with about the accuracy of the plain network on held-out digits.

    Paper: Molchanov et al. (2017), "Variational Dropout Sparsifies Deep Neural Networks".

    Attributes:
        log_alpha: weights with a larger log α are pruned.
        init_std: the initial σ.
        relative: whether init_std is a fraction of the std of each layer's weights rather than σ itself.
        rule: how the model is trained and predicts: sample, flipout, local, moments or mean.
        samples: number of Monte Carlo samples of a prediction.

    Example:
        >>> bnn = lb.fit(network, lb.SparseVD(), train_set, epochs=30)
        >>> lb.save(bnn, "model.safetensors")  # only the weights that are not pruned
    """

    log_alpha: float = 3.0
    init_std: float = 0.05
    relative: bool = True
    rule: str = "local"
    samples: int = 30
    default_temperature = 0.1

    def __post_init__(self) -> None:
        if not math.isfinite(self.log_alpha):
            raise LeanBayesError(f"log_alpha={self.log_alpha} must be a finite number; the paper has 3.")
        check_gaussian_settings(Normal(), self.init_std, self.rule, self.samples)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> VariationalDropoutPosterior:
        """Set μ to the given weights, and σ to the earlier one if there is one."""
        std = initial_stds(layout, mean, variance, self.init_std, self.relative)
        return VariationalDropoutPosterior(layout, mean, std, self.log_alpha)

    def finish(self, training: Training) -> None:
        """Prune the weights."""
        posterior = training.model.posterior
        assert isinstance(posterior, VariationalDropoutPosterior)
        posterior.prune()
