"""What was predicted beside what was true, one row an example (or a labelled pixel): what metrics look at."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction


@dataclass(frozen=True)
class Outcome:
    """Base: a dataclass whose tensors have one row an example."""

    def __len__(self) -> int:
        return len(getattr(self, dataclasses.fields(self)[0].name))

    def to(self, device: str) -> Any:
        """Move to a device."""
        return self._changed(lambda tensor: tensor.to(device))

    def rows(self, chosen: Tensor) -> Any:
        """Take some rows, by their numbers."""
        return self._changed(lambda tensor: tensor[chosen])

    def _changed(self, function: Any) -> Any:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{name: function(v) if isinstance(v, Tensor) else v for name, v in values.items()})


def joined(outcomes: Sequence[Any]) -> Any:
    """Put the rows of several outcomes of one kind together."""
    first = outcomes[0]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        parts = [getattr(one, field.name) for one in outcomes]
        values[field.name] = torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
    return type(first)(**values)


@dataclass(frozen=True)
class ClassOutcome(Outcome):
    """One of several classes: probabilities (rows, classes) and the true labels (rows,). dense: rows are pixels."""

    probs: Tensor
    labels: Tensor
    entropy: Tensor
    mutual_information: Tensor
    dense: bool = False

    @cached_property
    def _best(self) -> Any:
        return self.probs.max(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class."""
        return self._best.values

    @property
    def answer(self) -> Tensor:
        """The most probable class."""
        return self._best.indices

    @cached_property
    def right(self) -> Tensor:
        """Whether that is the true one."""
        return self.answer == self.labels

    @cached_property
    def chosen(self) -> Tensor:
        """Probability of the true class."""
        return self.probs.gather(-1, self.labels[:, None])[:, 0]


@dataclass(frozen=True)
class BinaryOutcome(Outcome):
    """Independent yes/no outputs (rows, ...): the probability of yes, and the truth, 0 or 1."""

    probs: Tensor
    truth: Tensor
    entropy: Tensor
    mutual_information: Tensor


@dataclass(frozen=True)
class RegressionOutcome(Outcome):
    """Real outputs (rows, ...): truth less mean, and the predicted spread, all in the unit of the report."""

    error: Tensor
    std: Tensor
    epistemic_std: Tensor


def outcome_of(
    prediction: Prediction, y: Tensor, ignore_index: int = -100, target_scale: Sequence[float] = ()
) -> Outcome:
    """Bring a prediction and its labels together, less what has no label."""
    if isinstance(prediction, ClassPrediction):
        return _of_classes(prediction, y, ignore_index)
    if isinstance(prediction, BinaryPrediction):
        _check_shape(prediction.probs, y)
        p = prediction.probs
        return BinaryOutcome(p, y.to(p), prediction.entropy, prediction.mutual_information)
    if isinstance(prediction, RegressionPrediction):
        return _of_regression(prediction, y, target_scale)
    raise LeanBayesError(f"There are no scores for a {type(prediction).__name__}: predict classes, yes/no or numbers.")


def _of_classes(prediction: ClassPrediction, y: Tensor, ignore_index: int) -> ClassOutcome:
    probs = prediction.probs.movedim(prediction.class_dim, -1)
    _check_shape(probs[..., 0], y)
    whole = not (y.is_floating_point() or y.is_complex())
    y = y.long() if whole else y  # a byte has no -100 that could be ignored
    counted = y != ignore_index
    p, labels = probs[counted], y[counted]
    if not whole or (len(labels) and (labels.min() < 0 or labels.max() >= p.shape[-1])):
        raise LeanBayesError(f"Labels must be integers from 0 to {p.shape[-1] - 1}: mend them, or set ignore_index.")
    return ClassOutcome(
        p, labels, prediction.entropy[counted], prediction.mutual_information[counted], dense=y.dim() > 1
    )


def _of_regression(prediction: RegressionPrediction, y: Tensor, target_scale: Sequence[float]) -> RegressionOutcome:
    mean = prediction.mean
    _check_shape(mean, y)
    targets = mean.shape[-1] if mean.dim() > 1 else 1
    if len(target_scale) not in (0, 1, targets):
        raise LeanBayesError(
            f"target_scale has {len(target_scale)} numbers for {targets} targets: give one for each, or one for all."
        )
    scale = torch.tensor(target_scale or (1.0,), dtype=torch.promote_types(mean.dtype, torch.float32), device=y.device)
    parts = (y - mean, prediction.std, prediction.epistemic_variance.sqrt())
    return RegressionOutcome(*(part * scale for part in parts))


def _check_shape(predicted: Tensor, y: Tensor) -> None:
    if predicted.shape != y.shape:
        raise LeanBayesError(
            f"Labels of shape {tuple(y.shape)} do not fit predictions of shape {tuple(predicted.shape)}: reshape one "
            "of them (a missing last dimension is the usual cause)."
        )
