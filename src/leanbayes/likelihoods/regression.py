"""Regression: real targets with Gaussian noise, with one std for all or one that the network predicts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.core.config import configurable
from leanbayes.core.gaussian import inverse_softplus
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.accumulators import Accumulator, MomentAccumulator
from leanbayes.likelihoods.base import (
    MIN_VARIANCE,
    Likelihood,
    NegativeLogLikelihood,
    as_float,
    check_same_shape,
    mean_and_variance,
)
from leanbayes.likelihoods.expectations import LOGIT_SAMPLES, expect, softplus
from leanbayes.likelihoods.predictive import RegressionPrediction
from leanbayes.rules.moments.value import Moments


def _gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> NegativeLogLikelihood:
    terms = (y - mean).square() / variance + (variance.log() + math.log(2 * math.pi))
    return NegativeLogLikelihood(0.5 * terms.sum(), len(y))


@configurable
class Gaussian(Likelihood[RegressionPrediction]):
    """y ~ N(output, std²), with a fixed or a learned std.

    Args:
        std: The std of the noise in the data, or its initial value.
        learned: Train the std together with the weights.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField(), likelihood=lb.Gaussian(0.5, learned=True))
        >>> bnn.predict(x).std  # of the noise and of the model together
    """

    @checked()
    def __init__(self, std: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        if not (math.isfinite(std) and std > 0):
            raise LeanBayesError(f"std={std} must be a positive number.")
        self.settings = {"std": std, "learned": learned}
        self.rho = nn.Parameter(inverse_softplus(torch.tensor(float(std)))) if learned else None

    @property
    def std(self) -> Tensor:
        """The std of the noise in the data."""
        if self.rho is None:
            return torch.tensor(self.settings["std"], dtype=torch.float64)
        return F.softplus(as_float(self.rho))

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Return the negative Gaussian log-density, summed over the outputs of an example."""
        return _gaussian_nll(as_float(output), self.std.square(), y)

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, samples: int = LOGIT_SAMPLES
    ) -> NegativeLogLikelihood:
        """Return ½[((y - m)² + v)/s² + log s² + log 2π]."""
        loc, variance = mean_and_variance(output)
        total, observations = self.output_nll(loc, y)
        return NegativeLogLikelihood(total + 0.5 * (variance / self.std.square()).sum(), observations)

    def gaussian_nll(self, output: Moments, y: Tensor, min_variance: float = MIN_VARIANCE) -> NegativeLogLikelihood:
        """Score the targets with the sum of the variances of output and noise."""
        loc, variance = mean_and_variance(output)
        return _gaussian_nll(loc, variance + self.std.square(), y)

    def predict_moments(self, output: Moments) -> RegressionPrediction:
        """Return a prediction whose epistemic variance is that of the output."""
        loc, variance = mean_and_variance(output)
        return RegressionPrediction(1, None, loc, self.std.square().to(loc).expand_as(loc).clone(), variance)

    def compiles(self, output: Moments) -> bool:
        """Return True."""
        return True

    def fisher_root(self, output: Tensor, y: Tensor, probe: Tensor) -> Tensor:
        """Return probe / std."""
        return probe / self.std.to(probe)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target per output."""
        check_same_shape(output, y)

    def accumulator(self) -> Accumulator:
        """Average the outputs. Their variance is epistemic."""
        return MomentAccumulator(lambda output: (as_float(output), self.std.square().to(as_float(output))))


@configurable
class HeteroscedasticGaussian(Likelihood[RegressionPrediction]):
    """y ~ N(m(x), v(x)): the network predicts the noise of the data too.

    The last dimension of its outputs holds the means, then as many raw variances, which go through softplus.

    Args:
        min_variance: A floor of the variance.

    Example:
        >>> network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))  # mean and raw variance
        >>> bnn = lb.bayesianize(network, lb.MeanField(), likelihood=lb.HeteroscedasticGaussian())
    """

    @checked()
    def __init__(self, min_variance: float = 1e-6) -> None:
        super().__init__()
        if not 0 < min_variance < math.inf:
            raise LeanBayesError(f"min_variance={min_variance} must be a positive number.")
        self.settings = {"min_variance": min_variance}

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Split an output into mean and variance."""
        mean, raw = self._halves(as_float(output))
        return mean, F.softplus(raw) + self.settings["min_variance"]

    def _halves(self, output: Tensor) -> tuple[Tensor, ...]:
        if output.shape[-1] % 2:
            raise LeanBayesError(
                f"HeteroscedasticGaussian needs a mean and a raw variance for each target, but the network's last "
                f"dimension is {output.shape[-1]}, which is odd: double its outputs."
            )
        return output.chunk(2, dim=-1)

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Return the negative Gaussian log-density with the variance that the network predicts."""
        return _gaussian_nll(*self.split(output), y)

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, samples: int = LOGIT_SAMPLES
    ) -> NegativeLogLikelihood:
        """Return ½[((y - m)² + v)·E[1/s²] + E[log s²] + log 2π], where s² comes from a separate Gaussian output."""
        (mean, raw), (variance, raw_variance) = map(self._halves, mean_and_variance(output))
        precision = expect(self._precision, raw, raw_variance)
        log_noise = expect(self._log_noise, raw, raw_variance)
        terms = ((y - mean).square() + variance) * precision + log_noise + math.log(2 * math.pi)
        return NegativeLogLikelihood(0.5 * terms.sum(), len(y))

    def _precision(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return 1/s² and its derivatives."""
        value, first, second = self._noise(raw)
        return 1 / value, -first / value, (2 * first.square() - second) / value

    def _log_noise(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log s² and its derivatives."""
        value, first, second = self._noise(raw)
        return value.log(), first, second - first.square()

    def _noise(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return s² = softplus(raw) + min_variance, and its two derivatives divided by s²."""
        value, first, second = softplus(raw)
        value = value + self.settings["min_variance"]
        return value, first / value, second / value

    def gaussian_nll(self, output: Moments, y: Tensor, min_variance: float = MIN_VARIANCE) -> NegativeLogLikelihood:
        """Score the targets with the variance of the mean plus the expected variance of the noise."""
        (mean, raw), (variance, raw_variance) = map(self._halves, mean_and_variance(output))
        return _gaussian_nll(mean, variance + self._mean_noise(raw, raw_variance), y)

    def _mean_noise(self, raw: Tensor, variance: Tensor) -> Tensor:
        return expect(softplus, raw, variance) + self.settings["min_variance"]

    def predict_moments(self, output: Moments) -> RegressionPrediction:
        """Return a prediction: the variance of the mean is epistemic, the expected noise variance aleatoric."""
        (mean, raw), (variance, raw_variance) = map(self._halves, mean_and_variance(output))
        return RegressionPrediction(1, None, mean, self._mean_noise(raw, raw_variance), variance)

    def compiles(self, output: Moments) -> bool:
        """Return True."""
        return True

    def fisher_root(self, output: Tensor, y: Tensor, probe: Tensor) -> Tensor:
        """Return probe / √v for the mean, and probe · v'/(√2·v) for the raw variance r with v = softplus(r) + floor."""
        _, variance = self.split(output)
        slope = self._halves(as_float(output))[1].sigmoid()
        first, second = self._halves(probe)
        return torch.cat([first / variance.sqrt(), second * slope / (math.sqrt(2) * variance)], -1)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target per output."""
        check_same_shape(self.split(output)[0], y)

    def accumulator(self) -> Accumulator:
        """Average means and variances."""
        return MomentAccumulator(self.split)
