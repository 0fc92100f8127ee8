"""The base class of likelihoods p(y | network output), and helpers that several of them use."""

from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import torch
from torch import Tensor, nn

from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.accumulators import Accumulator
from leanbayes.likelihoods.expectations import LOGIT_SAMPLES
from leanbayes.likelihoods.predictive import Prediction
from leanbayes.rules.moments.value import Moments

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # its default lets `BayesianModel` stand for a model of any likelihood

    P = TypeVar("P", bound=Prediction, default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P", bound=Prediction)

MIN_VARIANCE = 1e-3  # of a probability, when a Gaussian scores the labels


class Likelihood(nn.Module, Generic[P]):
    """The base class of likelihoods: how a loss is computed from outputs, and what a prediction is.

    Attributes:
        settings: The arguments that rebuild the likelihood from a file.
        has_logits: Whether the outputs are logits, so that predictions have probabilities.
    """

    settings: dict[str, Any]
    has_logits: bool = False
    described = "an instance such as lb.Categorical()"  # in messages about arguments

    def nll(self, output: Tensor | Moments, y: Tensor, key: Tensor | None = None) -> "NegativeLogLikelihood":
        """Return the negative log-likelihood of a batch, or its expectation if the outputs are `Moments`."""
        return self.expected_nll(output, y, key) if isinstance(output, Moments) else self.output_nll(output, y)

    def output_nll(self, output: Tensor, y: Tensor) -> "NegativeLogLikelihood":
        """Return the negative log-likelihood of a batch, given its outputs."""
        raise NotImplementedError  # abstract

    def observations(self, y: Tensor) -> Tensor | int:
        """Return the number of observations in labels, over which a loss is a mean: one per example, by default."""
        return len(y)

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, samples: int = LOGIT_SAMPLES
    ) -> "NegativeLogLikelihood":
        """Return the expected negative log-likelihood under independent outputs N(loc, variance).

        Args:
            output: Mean and variance of the outputs.
            y: The labels.
            key: The key of the noise, for likelihoods that have to sample. Without one, the noise is always the same.
            samples: The number of samples, for likelihoods that have to sample.
        """
        raise NotImplementedError  # abstract

    def gaussian_nll(self, output: Moments, y: Tensor, min_variance: float = MIN_VARIANCE) -> "NegativeLogLikelihood":
        """Score the labels under a Gaussian with the moments of the prediction (VDP, equation 11).

        Args:
            output: Mean and variance of the outputs.
            y: The labels.
            min_variance: A floor of the variance of a probability. Numerical targets have noise instead.
        """
        raise NotImplementedError  # abstract

    def predict_moments(self, output: Moments) -> P:
        """Return the prediction for outputs N(loc, variance). It is deterministic."""
        raise NotImplementedError  # abstract

    def compiles(self, output: Moments) -> bool:
        """Whether `predict_moments` may be a part of a compiled pass: `torch.compile` understands it, in short time."""
        return False

    def fisher_root(self, output: Tensor, y: Tensor, probe: Tensor) -> Tensor:
        """Return L·probe, where L·Lᵀ is the Fisher information of p(y | output) with respect to the output.

        Args:
            output: The outputs of a batch.
            y: The labels, which say only what does not count: the rows of ignored labels are 0.
            probe: A vector for each example, of the shape of the output.
        """
        raise LeanBayesError(f"{type(self).__name__} has no Fisher information yet: give it a method fisher_root.")

    def logits(self, values: Tensor) -> Tensor | None:
        """Reshape logits, or values of their shape, to (outcomes, classes). Return None if outputs are not logits."""
        return None

    def label_probs(self, y: Tensor, output: Tensor) -> Tensor:
        """Return labels as probabilities of the same shape as `logits`; the row of an ignored label is 0."""
        raise NotImplementedError  # abstract

    def check_output(self, output: Tensor | Moments) -> None:
        """Raise an error if the dtype or shape of outputs cannot be scored. Needs no synchronization."""
        if not output.dtype.is_floating_point:
            kind = str(output.dtype).removeprefix("torch.")
            raise LeanBayesError(
                f"The network returned {kind} numbers, and {type(self).__name__} needs real ones: return "
                f"{'the logits' if self.has_logits else 'numbers'} before any conversion."
            )

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Raise an error if the shape or dtype of the labels does not fit the outputs. Needs no synchronization."""
        raise NotImplementedError  # abstract

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Raise an error for impossible labels. It reads their values, which synchronizes a GPU."""

    def accumulator(self) -> Accumulator:
        """Return an accumulator that turns the outputs of several samples into a prediction."""
        raise NotImplementedError  # abstract


class NegativeLogLikelihood(NamedTuple):
    """The sum over a batch, and the number of observations in it (examples, or labeled pixels)."""

    total: Tensor
    observations: Tensor | int


def as_float(tensor: Tensor) -> Tensor:
    """Convert half precision to single precision. Double precision stays."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def mean_and_variance(output: Moments) -> tuple[Tensor, Tensor]:
    """Return mean and variance in at least single precision."""
    loc = as_float(output.loc)
    return loc, output.variance.to(loc.dtype).expand_as(loc)


def single(output: Moments) -> Moments:
    """Return moments whose mean has at least single precision."""
    return output.like(as_float(output.loc), output.rest, output.common, output.grid)


def label_density(mean: Tensor, variance: Tensor, y: Tensor, min_variance: float) -> Tensor:
    """Return ½[(y - m)²/v + log v], which has no bounds if the variance has no floor.

    A variance that is rounded to 0 counts as the smallest normal number.
    """
    variance = variance.clamp_min(max(min_variance, torch.finfo(variance.dtype).tiny))
    return 0.5 * ((y - mean).square() / variance + variance.log())


def check_same_shape(mean: Tensor, y: Tensor) -> None:
    """Raise an error if targets and outputs differ in shape."""
    if mean.shape != y.shape:
        raise LeanBayesError(
            f"Targets of shape {tuple(y.shape)} do not fit outputs of shape {tuple(mean.shape)}: reshape one of them "
            "(a missing last dimension is the usual cause)."
        )
