"""Structured Bayesian pruning (Neklyudov et al. 2017): noisy inputs of layers, of which most are removed."""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from leanbayes.core.config import check_choices
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.model.method import Method, Training, register_method
from leanbayes.posteriors import GroupNoisePosterior


@register_method("sbp")
@dataclass(frozen=True)
class SBP(Method):
    """Structured Bayesian pruning: whole inputs of layers (features or channels) are noisy, and pruned at the end.

    All weights of an input have the same random factor θ, with a truncated log-normal posterior and a log-uniform
    prior. After the last step, inputs with a signal-to-noise ratio E[θ]/std[θ] below a limit are set to zero, and only
    the others are stored. The default temperature is 1, as in the paper: at a lower one less is pruned.

    Paper: Neklyudov et al. (2017), "Structured Bayesian Pruning via Log-Normal Multiplicative Noise".

    Attributes:
        snr: inputs with a smaller signal-to-noise ratio are pruned.
        init_std: the initial std of log θ.
        rule: how the model is trained and predicts. example draws the factors for each example of a batch, as the
            authors do, and sample once for the whole batch. mean has no noise. With BatchNorm train by example: the
            factors of a whole batch change its statistics, so that the network learns under others than it predicts
            with.
        samples: number of Monte Carlo samples of a prediction.

    Example:
        >>> bnn = lb.fit(network, lb.SBP(), train_set, epochs=30)
        >>> lb.save(bnn, "model.safetensors")  # only the inputs that are not pruned
    """

    snr: float = 1.0
    init_std: float = 0.01
    rule: Literal["example", "sample", "mean"] = "example"
    samples: int = 30
    default_temperature = 1.0

    def __post_init__(self) -> None:
        check_choices(self, rule=Literal["example", "sample", "mean"])
        for name in ("snr", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be a positive number.")
        if self.samples < 1:
            raise LeanBayesError(f"samples={self.samples} must be at least 1.")

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> GroupNoisePosterior:
        """Set the means of the weights to the given ones."""
        return GroupNoisePosterior(layout, mean, self.init_std, self.snr)

    def finish(self, training: Training) -> None:
        """Prune the inputs."""
        posterior = training.model.posterior
        assert isinstance(posterior, GroupNoisePosterior)
        posterior.prune()
