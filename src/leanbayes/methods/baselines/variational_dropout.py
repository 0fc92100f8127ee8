"""Variational dropout (Kingma, Salimans and Welling 2015): Gaussian dropout whose rate is learned."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from leanbayes.core.config import check_choices
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.model.method import Method, register_method
from leanbayes.posteriors import GaussianDropoutPosterior
from leanbayes.posteriors.gaussian_dropout import Per
from leanbayes.rules import get_rule


@register_method("variational-dropout")
@dataclass(frozen=True)
class VariationalDropout(Method):
    """Variational dropout: Gaussian dropout with learned rates, as a posterior with a log-uniform prior.

    The noise of a weight is in proportion to its size: w ~ N(μ, α·μ²), and α is learned, up to 1. In type A of the
    paper each weight has its own noise, and local reparameterization trains it. In type B all weights of an input share
    a factor, which is noise that multiplies the inputs of layers. `SparseVD` has no limit for α, and prunes. The paper
    has the temperature 1. The default of 0.1 is the largest of 1, 0.1, 0.01 and 0.001 with the accuracy of the plain
    network on held-out digits.

    Paper: Kingma, Salimans and Welling (2015), "Variational Dropout and the Local Reparameterization Trick".

    Attributes:
        noise: weights for independent noise (type A), or inputs for a factor of all weights of an input (type B).
        per: what has an α of its own: each layer, input or weight.
        init_alpha: the initial α. Dropout with the rate p has α = p/(1 - p).
        rule: how the model is trained and predicts: local, sample, flipout, moments or mean for noise=weights; example
            (factors for each example of a batch), sample or mean for noise=inputs.
        samples: number of Monte Carlo samples of a prediction.

    Example:
        >>> bnn = lb.fit(network, lb.VariationalDropout(), train_set, epochs=30)
        >>> bnn = lb.fit(network, lb.VariationalDropout("inputs", rule="example"), train_set, epochs=30)
    """

    noise: Literal["weights", "inputs"] = "weights"
    per: Per = "layer"
    init_alpha: float = 0.1
    rule: str = "local"
    samples: int = 30
    default_temperature = 0.1

    def __post_init__(self) -> None:
        check_choices(self, noise=Literal["weights", "inputs"], per=Per)
        if not 0 < self.init_alpha < 1:
            raise LeanBayesError(f"init_alpha={self.init_alpha} must be between 0 and 1.")
        if self.samples < 1:
            raise LeanBayesError(f"samples={self.samples} must be at least 1.")
        get_rule(self.rule)
        if self.noise == "inputs" and self.rule not in ("example", "sample", "mean"):
            raise LeanBayesError(
                f"rule={self.rule!r} needs independent weights: use rule='example', 'sample' or 'mean' with "
                "noise='inputs'."
            )
        if self.noise == "weights" and self.rule == "example":
            raise LeanBayesError("rule='example' is for factors of inputs: use noise='inputs', or rule='local'.")
        if self.noise == "inputs" and self.per == "weight":
            raise LeanBayesError(
                "The weights of an input share their noise: use per='input' or 'layer', or noise='weights'."
            )

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> GaussianDropoutPosterior:
        """Set μ to the given weights."""
        return GaussianDropoutPosterior(layout, mean, self.init_alpha, self.per, self.noise == "inputs")
