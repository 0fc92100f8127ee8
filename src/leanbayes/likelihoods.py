"""Likelihoods p(y | network output): how a loss is counted, and how draws become a prediction."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.gaussian import inverse_softplus
from leanbayes.prediction import (
    Accumulator,
    BinaryPrediction,
    ClassPrediction,
    MomentAccumulator,
    Prediction,
    ProbabilityAccumulator,
    binary_entropy,
)


class Likelihood(nn.Module):
    """Base of all likelihoods. `settings` holds the arguments that rebuild it from a file."""

    settings: dict[str, Any]

    def nll(self, output: Tensor, y: Tensor) -> "NegativeLogLikelihood":
        """Negative log-likelihood of a batch."""
        raise NotImplementedError  # abstract

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Raise one clear sentence where the labels' shape or type does not fit the outputs; costs no waiting."""
        raise NotImplementedError  # abstract

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Raise one clear sentence for labels that cannot be; it has to look at them."""

    def accumulator(self) -> Accumulator:
        """Make what turns draws of the output into a prediction."""
        raise NotImplementedError  # abstract


class NegativeLogLikelihood(NamedTuple):
    """A sum over a batch, and over how many observations (examples, or labelled pixels)."""

    total: Tensor
    observations: Tensor | int


def _float(tensor: Tensor) -> Tensor:
    """Bring half precisions to single, and leave double."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@configurable
class Categorical(Likelihood):
    """Classes from logits along `class_dim`: (batch, classes), or (batch, classes, height, width) for dense prediction.

    Labels equal to `ignore_index` do not count. An observation is a labelled position, so a dense loss has the size of
    a usual cross-entropy, and the KL is divided by the number of labelled positions in the data set.
    """

    def __init__(self, ignore_index: int = -100, class_dim: int = 1) -> None:
        super().__init__()
        self.settings = {"ignore_index": ignore_index, "class_dim": class_dim}
        self.ignore_index, self.class_dim = ignore_index, class_dim

    def nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Cross-entropy, summed over the labelled positions."""
        logits = _float(output).movedim(self.class_dim, 1)
        total = F.cross_entropy(logits, y, ignore_index=self.ignore_index, reduction="sum")
        labelled = (y != self.ignore_index).sum()
        # A batch without labels has no loss, and its KL counts as if all were labelled.
        return NegativeLogLikelihood(total, torch.where(labelled > 0, labelled, y.numel()))

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one integer a position."""
        positions = output.movedim(self.class_dim, -1).shape[:-1]
        if y.dtype != torch.long or y.shape != positions:
            raise LeanBayesError(
                f"Labels must be int64 class indices of shape {tuple(positions)}, but are {y.dtype} of shape "
                f"{tuple(y.shape)}: convert them, or set class_dim."
            )

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Check that labels lie in the range of the classes."""
        classes = output.shape[self.class_dim]
        counted = y[y != self.ignore_index]
        if counted.numel() and (counted.min() < 0 or counted.max() >= classes):
            wrong = counted[(counted < 0) | (counted >= classes)][0].item()
            raise LeanBayesError(
                f"The label {wrong} is out of range for {classes} classes (0 to {classes - 1}): mend the labels, "
                "set ignore_index, or widen the network's output."
            )

    def accumulator(self) -> Accumulator:
        """Average the softmax."""
        dim = self.class_dim

        def kind(**fields: Any) -> Prediction:
            return ClassPrediction(class_dim=dim, **fields)

        return ProbabilityAccumulator(
            lambda output: _float(output).softmax(dim), lambda probs: torch.special.entr(probs).sum(dim), kind
        )


@configurable
class Bernoulli(Likelihood):
    """Independent yes/no outputs from logits; an example with several is one observation."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {}

    def nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Binary cross-entropy, summed over the outputs."""
        logits = _float(output)
        total = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="sum")
        return NegativeLogLikelihood(total, len(y))

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target for each output."""
        _check_shape(output, y)

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Check that targets lie in [0, 1]."""
        if y.numel() and not (y.min() >= 0 and y.max() <= 1):
            raise LeanBayesError("Bernoulli targets must lie in [0, 1]: mend the labels.")

    def accumulator(self) -> Accumulator:
        """Average the sigmoid."""
        return ProbabilityAccumulator(lambda output: _float(output).sigmoid(), binary_entropy, BinaryPrediction)


def _check_shape(mean: Tensor, y: Tensor) -> None:
    if mean.shape != y.shape:
        raise LeanBayesError(
            f"Targets of shape {tuple(y.shape)} do not fit outputs of shape {tuple(mean.shape)}: reshape one of them "
            "(a missing last dimension is the usual cause)."
        )


def _gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> NegativeLogLikelihood:
    terms = (y - mean).square() / variance + (variance.log() + math.log(2 * math.pi))
    return NegativeLogLikelihood(0.5 * terms.sum(), len(y))


@configurable
class Gaussian(Likelihood):
    """y ~ N(output, std²), with a fixed noise or (`learned=True`) one that is trained with the weights."""

    def __init__(self, std: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        if not (math.isfinite(std) and std > 0):
            raise LeanBayesError(f"std={std} must be a positive number.")
        self.settings = {"std": std, "learned": learned}
        self.rho = nn.Parameter(inverse_softplus(torch.tensor(float(std)))) if learned else None

    @property
    def std(self) -> Tensor:
        """The noise of the data."""
        if self.rho is None:
            return torch.tensor(self.settings["std"], dtype=torch.float64)
        return F.softplus(_float(self.rho))

    def nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Gaussian log-density, summed over the outputs of an example."""
        return _gaussian_nll(_float(output), self.std.square(), y)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target for each output."""
        _check_shape(output, y)

    def accumulator(self) -> Accumulator:
        """Average the outputs; their spread is epistemic."""
        return MomentAccumulator(lambda output: (_float(output), self.std.square().to(_float(output))))


@configurable
class HeteroscedasticGaussian(Likelihood):
    """y ~ N(m(x), v(x)): the network's last dimension holds the means, then as many raw variances (softplus)."""

    def __init__(self, min_variance: float = 1e-6) -> None:
        super().__init__()
        if not 0 < min_variance < math.inf:
            raise LeanBayesError(f"min_variance={min_variance} must be a positive number.")
        self.settings = {"min_variance": min_variance}

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Cut an output into mean and variance."""
        if output.shape[-1] % 2:
            raise LeanBayesError(
                f"HeteroscedasticGaussian needs a mean and a raw variance for each target, but the network's last "
                f"dimension is {output.shape[-1]}, which is odd: double its outputs."
            )
        mean, raw = _float(output).chunk(2, dim=-1)
        return mean, F.softplus(raw) + self.settings["min_variance"]

    def nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Gaussian log-density with the network's own variance."""
        return _gaussian_nll(*self.split(output), y)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target for each output."""
        _check_shape(self.split(output)[0], y)

    def accumulator(self) -> Accumulator:
        """Average means and variances."""
        return MomentAccumulator(self.split)
