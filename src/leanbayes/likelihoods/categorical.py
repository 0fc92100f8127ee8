"""Classification: classes from logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core import noise
from leanbayes.core.arguments import checked
from leanbayes.core.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.accumulators import Accumulator, ProbabilityAccumulator
from leanbayes.likelihoods.base import (
    MIN_VARIANCE,
    Likelihood,
    NegativeLogLikelihood,
    as_float,
    label_density,
    mean_and_variance,
    single,
)
from leanbayes.likelihoods.cross_entropy import cross_entropy
from leanbayes.likelihoods.expectations import LOGIT_SAMPLES, expected_cross_entropy, is_fused, softmax_means
from leanbayes.likelihoods.predictive import ClassPrediction, Prediction
from leanbayes.rules.margins import margin_variances
from leanbayes.rules.moments.value import Moments

_FEW = 1 << 18  # logits; the samples of more would be a large program


@configurable
class Categorical(Likelihood[ClassPrediction]):
    """Classes from logits, (batch, classes), or (batch, classes, height, width) for dense prediction.

    An observation is a labeled position. So a dense loss has the scale of the usual cross-entropy, and the KL is
    divided by the number of labeled positions in the data set.

    Args:
        ignore_index: Labels with this value do not count.
        class_dim: The dimension of the outputs that counts classes.

    Example:
        >>> bnn = lb.bayesianize(segmentation_network, lb.MeanField(), likelihood=lb.Categorical(ignore_index=255))
    """

    has_logits = True
    prediction_type: type[ClassPrediction] = ClassPrediction

    @checked()
    def __init__(self, ignore_index: int = -100, class_dim: int = 1) -> None:
        super().__init__()
        self.settings = {"ignore_index": ignore_index, "class_dim": class_dim}
        self.ignore_index, self.class_dim = ignore_index, class_dim

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Return the cross-entropy, summed over the labeled positions."""
        labels = self.aligned(y)
        if self.class_dim % output.dim() == output.dim() - 1:  # rows of classes, without a copy
            total = cross_entropy(output.flatten(0, -2), labels.flatten(), self.ignore_index)
        else:
            logits = as_float(output).movedim(self.class_dim, 1)
            total = F.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="sum")
        return NegativeLogLikelihood(total, self.observations(y))

    def aligned(self, y: Tensor) -> Tensor:
        """Return the labels that the outputs of each position predict: those of the same position."""
        return y

    def observations(self, y: Tensor) -> Tensor:
        """Return the number of labels that count."""
        y = self.aligned(y)
        labeled = (y != self.ignore_index).sum()
        # A batch without labels has no loss, and its KL is weighted as if all positions were labeled.
        return torch.where(labeled > 0, labeled, y.numel())

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, samples: int = LOGIT_SAMPLES
    ) -> NegativeLogLikelihood:
        """Return the expected cross-entropy, from samples of the logits."""
        loc, variance = (part.movedim(self.class_dim, -1) for part in mean_and_variance(output))
        key = noise.make_key(0, device=loc.device) if key is None else key
        labels = self.aligned(y)
        labeled = labels != self.ignore_index
        total = expected_cross_entropy(loc, variance, labels.where(labeled, 0), labeled, key, samples)
        return NegativeLogLikelihood(total, self.observations(y))

    def bounded_nll(self, output: Moments, y: Tensor) -> NegativeLogLikelihood:
        """Return an upper bound of `expected_nll` without samples: log Σ_c exp(m_c + v_c/2) - m_y, by Jensen."""
        loc, variance = (part.movedim(self.class_dim, -1) for part in mean_and_variance(output))
        labels = self.aligned(y)
        labeled = labels != self.ignore_index
        chosen = loc.gather(-1, labels.where(labeled, 0).unsqueeze(-1)).squeeze(-1)
        terms = (loc + 0.5 * variance).logsumexp(-1) - chosen
        return NegativeLogLikelihood((terms * labeled).sum(), self.observations(y))

    def gaussian_nll(self, output: Moments, y: Tensor, min_variance: float = MIN_VARIANCE) -> NegativeLogLikelihood:
        """Score one-hot labels by the mean and variance of the probabilities."""
        probs = single(output).softmax(self.class_dim)
        mean, variance = (part.movedim(self.class_dim, -1) for part in mean_and_variance(probs))
        labels = self.aligned(y)
        labeled = labels != self.ignore_index
        target = torch.zeros_like(mean).scatter(-1, labels.where(labeled, 0).unsqueeze(-1), 1.0)
        total = (label_density(mean, variance, target, min_variance).sum(-1) * labeled).sum()
        return NegativeLogLikelihood(total, self.observations(y))

    def predict_moments(self, output: Moments) -> ClassPrediction:
        """Average the softmax over fixed samples of the logits, with their covariance."""
        loc, variance, common = self.logit_moments(output)
        probs, entropy = softmax_means(loc, variance, common, output.within.coherent)
        margin_std = None
        if common is None or loc.dim() <= 2:  # for maps it would take much memory
            margin_std = _margin_variance(loc, variance, common).sqrt()
        probs = probs.movedim(-1, self.class_dim)
        # By keyword: up to torch 2.11 the compiler cannot bind a default behind a keyword-only field by position.
        return self.prediction_type(1, None, probs, entropy, self.class_dim, margin_std=margin_std)

    def margin_variance(self, output: Moments) -> Tensor:
        """Return the variance of the difference of the two largest mean logits, without the dimension of classes."""
        return _margin_variance(*self.logit_moments(output))

    def compiles(self, output: Moments) -> bool:
        """Whether there are few logits, or a kernel for all samples of them."""
        loc, _, common = self.logit_moments(output)
        return loc.numel() <= _FEW or is_fused(loc, common)

    def logit_moments(self, output: Moments) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mean, independent variance and common noise of the logits, with the classes last.

        In a coherent pass the variance is the whole one, and the common noise only gives the correlations of classes.
        """
        output = output.plain()
        loc = as_float(output.loc)
        variance = output.variance if output.within.coherent else output.independent
        variance = variance.to(loc.dtype).expand_as(loc)
        moved = loc.movedim(self.class_dim, -1), variance.movedim(self.class_dim, -1)
        if output.common is None:
            return *moved, None
        dim = self.class_dim + 1 if self.class_dim >= 0 else self.class_dim
        return *moved, output.common.to(loc.dtype).movedim(dim, -1)

    def fisher_root(self, output: Tensor, y: Tensor, probe: Tensor) -> Tensor:
        """Return L·probe with L = diag(√p) - p·√pᵀ, so that L·Lᵀ = diag(p) - p·pᵀ."""
        probs = as_float(output).softmax(self.class_dim)
        scaled = probs.sqrt() * probe
        root = scaled - probs * scaled.sum(self.class_dim, keepdim=True)
        return root * (self.aligned(y) != self.ignore_index).unsqueeze(self.class_dim)

    def logits(self, values: Tensor) -> Tensor:
        """Move the classes to the last dimension."""
        values = values.movedim(self.class_dim, -1)
        return values.reshape(-1, values.shape[-1])

    def label_probs(self, y: Tensor, output: Tensor) -> Tensor:
        """Return one-hot labels."""
        y = self.aligned(y)
        labeled = (y != self.ignore_index).flatten()
        probs = F.one_hot(y.flatten().where(labeled, 0), output.shape[self.class_dim])
        return (probs * labeled[:, None]).to(output.dtype)

    def check_output(self, output: Tensor | Moments) -> None:
        """Check that there is a dimension of classes."""
        super().check_output(output)
        dims = output.dim()
        if not -dims <= self.class_dim < dims or dims < 2 or not output.shape[self.class_dim]:
            raise LeanBayesError(
                f"The network returned outputs of shape {tuple(output.shape)}, which have no classes along dimension "
                f"{self.class_dim}: return (batch, classes), or pass another likelihood or class_dim."
            )

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one integer per position."""
        positions = output.movedim(self.class_dim, -1).shape[:-1]
        if y.dtype != torch.long or y.shape != positions:
            raise LeanBayesError(
                f"Labels must be int64 class indices of shape {tuple(positions)}, but are {y.dtype} of shape "
                f"{tuple(y.shape)}: convert them, or set class_dim."
            )

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Check that labels are in the range of the classes."""
        classes = output.shape[self.class_dim]
        counted = y[y != self.ignore_index]
        if counted.numel() and (counted.min() < 0 or counted.max() >= classes):
            wrong = counted[(counted < 0) | (counted >= classes)][0].item()
            raise LeanBayesError(
                f"The label {wrong} is out of range for {classes} classes (0 to {classes - 1}): fix the labels, "
                "set ignore_index, or widen the network's output."
            )

    def accumulator(self) -> Accumulator:
        """Average the softmax."""
        dim, made = self.class_dim, self.prediction_type

        def kind(**fields: Any) -> Prediction:
            return made(class_dim=dim, **fields)

        return ProbabilityAccumulator(
            lambda output: as_float(output).softmax(dim), lambda probs: torch.special.entr(probs).sum(dim), kind
        )


def _margin_variance(loc: Tensor, variance: Tensor, common: Tensor | None) -> Tensor:
    """Return the variance of the difference of the two largest logits; of one class that of its logit."""
    if loc.shape[-1] > 1:
        return margin_variances(variance, common, loc.topk(2, -1).indices)[..., 0]
    return variance[..., 0] if common is None else variance[..., 0] + common[..., 0].square().sum(0)
