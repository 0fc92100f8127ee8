"""Multi-label classification: independent yes/no outputs from logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.accumulators import Accumulator, ProbabilityAccumulator
from leanbayes.likelihoods.base import (
    MIN_VARIANCE,
    Likelihood,
    NegativeLogLikelihood,
    as_float,
    check_same_shape,
    label_density,
    mean_and_variance,
    single,
)
from leanbayes.likelihoods.expectations import LOGIT_SAMPLES, expect, gaussian_means, softplus
from leanbayes.likelihoods.predictive import BinaryPrediction, binary_entropy
from leanbayes.rules.moments.value import Moments


@configurable
class Bernoulli(Likelihood[BinaryPrediction]):
    """Independent yes/no outputs from logits. An example with several outputs is one observation.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField(), likelihood=lb.Bernoulli())
        >>> lb.elbo_loss(bnn, x, tags.float(), num_data=len(train_set))
    """

    has_logits = True

    def __init__(self) -> None:
        super().__init__()
        self.settings = {}

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Return the binary cross-entropy, summed over the outputs."""
        logits = as_float(output)
        total = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="sum")
        return NegativeLogLikelihood(total, len(y))

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, samples: int = LOGIT_SAMPLES
    ) -> NegativeLogLikelihood:
        """Return the expected binary cross-entropy E softplus(z) - y·m, by quadrature."""
        (loc, variance), y = mean_and_variance(output), y.to(as_float(output.loc).dtype)
        yes = (y > 0.5).to(y.dtype)
        # softplus(z) = softplus(-z) + z: rounding beside a large m does not swallow the small loss of a correct yes.
        terms = expect(softplus, (1 - 2 * yes) * loc, variance) + (yes - y) * loc
        return NegativeLogLikelihood(terms.sum(), len(y))

    def gaussian_nll(self, output: Moments, y: Tensor, min_variance: float = MIN_VARIANCE) -> NegativeLogLikelihood:
        """Score the labels by the mean and variance of the probabilities."""
        mean, variance = mean_and_variance(single(output).sigmoid())
        return NegativeLogLikelihood(label_density(mean, variance, y.to(mean.dtype), min_variance).sum(), len(y))

    def predict_moments(self, output: Moments) -> BinaryPrediction:
        """Average the sigmoid by quadrature."""

        def functions(logits: Tensor) -> tuple[Tensor, Tensor]:
            probs = logits.sigmoid()
            return probs, binary_entropy(probs)

        probs, entropy = gaussian_means(functions, *mean_and_variance(output))
        return BinaryPrediction(1, None, probs, entropy)

    def compiles(self, output: Moments) -> bool:
        """Return True."""
        return True

    def fisher_root(self, output: Tensor, y: Tensor, probe: Tensor) -> Tensor:
        """Return √(p(1 - p))·probe."""
        logits = as_float(output)
        return (logits.sigmoid() * (-logits).sigmoid()).sqrt() * probe

    def logits(self, values: Tensor) -> Tensor:
        """Pair each logit with a logit of 0 for no: their softmax is the sigmoid."""
        return torch.stack([values.flatten(), torch.zeros_like(values).flatten()], -1)

    def label_probs(self, y: Tensor, output: Tensor) -> Tensor:
        """Return the probabilities of yes and no."""
        yes = y.to(output.dtype).flatten()
        return torch.stack([yes, 1 - yes], -1)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target per output."""
        check_same_shape(output, y)

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Check that targets are in [0, 1]."""
        if y.numel() and not (y.min() >= 0 and y.max() <= 1):
            raise LeanBayesError("Bernoulli targets must be in [0, 1]: fix the labels.")

    def accumulator(self) -> Accumulator:
        """Average the sigmoid."""
        return ProbabilityAccumulator(lambda output: as_float(output).sigmoid(), binary_entropy, BinaryPrediction)
