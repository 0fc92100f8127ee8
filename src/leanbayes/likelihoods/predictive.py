"""Predictive distributions, with their uncertainty split into an aleatoric and an epistemic part.

Probabilities are averaged over the samples, never logits. The total uncertainty is split as
    classification: H[E p] = E H[p] (aleatoric) + mutual information (epistemic);
    regression:     Var[y] = E[noise variance] (aleatoric) + Var[mean] (epistemic).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any, TypeVar

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError

_SHOWN = 5  # rows of a printed prediction


@dataclass(frozen=True, repr=False)
class Prediction:
    """A predictive distribution.

    Attributes:
        samples: The number of Monte Carlo samples behind it; 1 for one pass.
        outputs: The raw output of each sample, (samples, batch, ...), if `predict(keep_outputs=True)` kept them.
        rule: The rule that `predict` used, with its settings, such as "adjoint:margins=3". None if it is unknown.

    Example:
        >>> bnn.predict(x, samples=5, keep_outputs=True).outputs.shape
        torch.Size([5, 8, 10])
    """

    samples: int
    outputs: Tensor | None
    rule: str | None = field(default=None, kw_only=True)


P = TypeVar("P", bound=Prediction)


def map_prediction(function: Callable[[Tensor], Tensor], prediction: P) -> P:
    """Apply a function to every tensor of a prediction."""
    return _with_tensors(prediction, lambda name: function(getattr(prediction, name)))


def joined(predictions: Sequence[P]) -> P:
    """Return the prediction of a batch from those of its parts, which kept no outputs."""
    return _with_tensors(predictions[0], lambda name: torch.cat([getattr(part, name) for part in predictions]))


def _with_tensors(prediction: P, function: Callable[[str], Tensor]) -> P:
    """Replace every tensor of a prediction, given its name."""
    names = [field.name for field in fields(prediction) if isinstance(getattr(prediction, field.name), Tensor)]
    changes: dict[str, Any] = {name: function(name) for name in names}
    return replace(prediction, **changes)


@dataclass(frozen=True, repr=False)
class ClassPrediction(Prediction):
    """Classes with probabilities. A dense prediction has one distribution per pixel.

    Attributes:
        probs: The probability of each class, averaged over the samples.
        expected_entropy: The aleatoric uncertainty in nats: the mean entropy of the samples.
        class_dim: The dimension of `probs` that counts classes.
        margin_std: The std of the difference of the two largest mean logits, by `adjoint` and `moments`. None for
            samples, and for maps by `moments`.

    Example:
        >>> prediction = bnn.predict(x)
        >>> prediction.label[prediction.mutual_information > 0.1]  # answers to check by hand
    """

    probs: Tensor
    expected_entropy: Tensor
    class_dim: int
    margin_std: Tensor | None = None

    @property
    def entropy(self) -> Tensor:
        """The total uncertainty in nats: the entropy of the mean probability."""
        return torch.special.entr(self.probs).sum(self.class_dim)

    @property
    def mutual_information(self) -> Tensor:
        """The epistemic uncertainty in nats: how much the samples disagree."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    @property
    def label(self) -> Tensor:
        """The most probable class."""
        return self.probs.argmax(self.class_dim)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class."""
        return self.probs.amax(self.class_dim)

    def aligned(self, y: Tensor, ignore_index: int) -> Tensor:
        """Return the labels that each position predicts: those of the same position."""
        return y

    def __repr__(self) -> str:
        columns = {
            "label": self.label,
            "probability": self.confidence,
            "entropy": self.entropy,
            "epistemic": self.mutual_information,
        }
        return _described(self, f"{self.probs.shape[self.class_dim]} classes", columns)


@dataclass(frozen=True, repr=False)
class BinaryPrediction(Prediction):
    """Independent yes/no outputs.

    Attributes:
        probs: The probability of yes, averaged over the samples.
        expected_entropy: The aleatoric uncertainty of each output in nats: the mean entropy of the samples.

    Example:
        >>> prediction = bnn.predict(x)
        >>> prediction.label & (prediction.mutual_information < 0.05)  # a certain yes
    """

    probs: Tensor
    expected_entropy: Tensor

    @property
    def entropy(self) -> Tensor:
        """The total uncertainty of each output in nats."""
        return binary_entropy(self.probs)

    @property
    def mutual_information(self) -> Tensor:
        """The epistemic uncertainty of each output in nats."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    @property
    def label(self) -> Tensor:
        """Whether yes is at least as probable as no."""
        return self.probs >= 0.5

    def __repr__(self) -> str:
        columns = {"probability": self.probs, "entropy": self.entropy, "epistemic": self.mutual_information}
        return _described(self, "yes/no outputs", columns)


@dataclass(frozen=True, repr=False)
class RegressionPrediction(Prediction):
    """Real outputs with the noise of the data and the uncertainty of the model.

    Attributes:
        mean: The predicted targets.
        aleatoric_variance: The variance of the noise in the data.
        epistemic_variance: The variance of the mean under the posterior.

    Example:
        >>> prediction = bnn.predict(x)
        >>> low, high = prediction.interval(0.95)
    """

    mean: Tensor
    aleatoric_variance: Tensor
    epistemic_variance: Tensor

    @property
    def variance(self) -> Tensor:
        """The total variance: the sum of both parts."""
        return self.aleatoric_variance + self.epistemic_variance

    @property
    def std(self) -> Tensor:
        """The total standard deviation."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval of a Gaussian with this mean and std: mean ± z·std.

        Its coverage depends on the model. Intervals with a guaranteed coverage are those of `lb.decide.fit`.

        Args:
            level: The probability of the interval.

        Raises:
            LeanBayesError: If level is not between 0 and 1.

        Example:
            >>> low, high = bnn.predict(x).interval(0.95)
        """
        if isinstance(level, bool) or not 0 < level < 1:
            raise LeanBayesError(f"level={level} must be between 0 and 1, such as 0.95.")
        half = NormalDist().inv_cdf((1 + level) / 2) * self.std
        return self.mean - half, self.mean + half

    def __repr__(self) -> str:
        columns = {
            "mean": self.mean,
            "std": self.std,
            "aleatoric std": self.aleatoric_variance.sqrt(),
            "epistemic std": self.epistemic_variance.sqrt(),
        }
        return _described(self, "real outputs", columns)


def _described(prediction: Prediction, kind: str, columns: Mapping[str, Tensor]) -> str:
    """Describe a prediction in a headline and a table of its first rows; outputs of several numbers are averaged."""
    first = next(iter(columns.values()))
    passes = "one pass" if prediction.samples == 1 else f"{prediction.samples} samples"
    lines = [f"{type(prediction).__name__}: {len(first):,} examples, {kind}, {passes}"]
    several = first[0].numel() > 1 if len(first) else False
    if several:
        lines[0] += f", {tuple(first.shape[1:])} outputs per example (means below)"
        columns = {name: values for name, values in columns.items() if name != "label"}
    lines.append("  ".join(name.rjust(max(len(name), 8)) for name in columns))
    for row in range(min(_SHOWN, len(first))):
        cells = []
        for name, values in columns.items():
            value = values[row].double().mean().item()
            text = f"{int(value)}" if name == "label" else f"{value:.4g}"
            cells.append(text.rjust(max(len(name), 8)))
        lines.append("  ".join(cells))
    if len(first) > _SHOWN:
        lines.append(f"... and {len(first) - _SHOWN:,} more")
    return "\n".join(lines)


def binary_entropy(probs: Tensor) -> Tensor:
    """Entropy of yes/no probabilities, in nats."""
    return torch.special.entr(probs) + torch.special.entr(1 - probs)
