"""Outcomes: predictions together with the true values, one row per example or labeled pixel. Metrics take these."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction


@dataclass(frozen=True)
class Outcome:
    """Base class: a dataclass of tensors with one row per example."""

    def __len__(self) -> int:
        return len(getattr(self, dataclasses.fields(self)[0].name))

    def to(self, device: str) -> Any:
        """Return a copy on a device."""
        return self._changed(lambda tensor: tensor.to(device))

    def rows(self, chosen: Tensor) -> Any:
        """Return some rows, by their indices."""
        return self._changed(lambda tensor: tensor[chosen])

    def _changed(self, function: Any) -> Any:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{name: function(v) if isinstance(v, Tensor) else v for name, v in values.items()})


def joined(outcomes: Sequence[Any]) -> Any:
    """Concatenate outcomes of one kind."""
    first = outcomes[0]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        parts = [getattr(one, field.name) for one in outcomes]
        values[field.name] = torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
    return type(first)(**values)


@dataclass(frozen=True)
class ClassOutcome(Outcome):
    """Outcome of a classification: probabilities (rows, classes) and true labels (rows,). dense: rows are pixels."""

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
        """The probability of the predicted class."""
        return self._best.values

    @property
    def answer(self) -> Tensor:
        """The predicted class, which is the most probable one."""
        return self._best.indices

    @cached_property
    def right(self) -> Tensor:
        """Whether the predicted class is the true one."""
        return self.answer == self.labels

    @cached_property
    def chosen(self) -> Tensor:
        """The probability of the true class."""
        return self.probs.gather(-1, self.labels[:, None])[:, 0]


@dataclass(frozen=True)
class BinaryOutcome(Outcome):
    """Outcome of independent binary outputs (rows, ...): the probability of 1, and the true value, 0 or 1."""

    probs: Tensor
    truth: Tensor
    entropy: Tensor
    mutual_information: Tensor


@dataclass(frozen=True)
class RegressionOutcome(Outcome):
    """Outcome of a regression (rows, ...): target minus mean, and the predicted std, all in the unit of the scores."""

    error: Tensor
    std: Tensor
    epistemic_std: Tensor


def outcome_of(
    prediction: Prediction, y: Tensor, ignore_index: int = -100, target_scale: Sequence[float] = ()
) -> Outcome:
    """Combine a prediction with its labels, without the rows that have no label."""
    if isinstance(prediction, ClassPrediction):
        return _of_classes(prediction, y, ignore_index)
    if isinstance(prediction, BinaryPrediction):
        _check_shape(prediction.probs, y)
        p = prediction.probs
        return BinaryOutcome(p, y.to(p), prediction.entropy, prediction.mutual_information)
    if isinstance(prediction, RegressionPrediction):
        return _of_regression(prediction, y, target_scale)
    raise LeanBayesError(
        f"A {type(prediction).__name__} cannot be scored: use a categorical, Bernoulli or Gaussian likelihood."
    )


def _of_classes(prediction: ClassPrediction, y: Tensor, ignore_index: int) -> ClassOutcome:
    probs = prediction.probs.movedim(prediction.class_dim, -1)
    _check_shape(probs[..., 0], y)
    whole = not (y.is_floating_point() or y.is_complex())
    y = prediction.aligned(y.long() if whole else y, ignore_index)  # uint8 cannot hold -100, the label to ignore
    counted = y != ignore_index
    p, labels = probs[counted], y[counted]
    if not whole or (len(labels) and (labels.min() < 0 or labels.max() >= p.shape[-1])):
        raise LeanBayesError(f"Labels must be integers from 0 to {p.shape[-1] - 1}: fix them, or set ignore_index.")
    return ClassOutcome(
        p, labels, prediction.entropy[counted], prediction.mutual_information[counted], dense=y.dim() > 1
    )


def _of_regression(prediction: RegressionPrediction, y: Tensor, target_scale: Sequence[float]) -> RegressionOutcome:
    mean = prediction.mean
    _check_shape(mean, y)
    targets = mean.shape[-1] if mean.dim() > 1 else 1
    if len(target_scale) not in (0, 1, targets):
        raise LeanBayesError(
            f"target_scale has {len(target_scale)} numbers for {targets} targets: pass one per target, or one for all."
        )
    scale = torch.tensor(target_scale or (1.0,), dtype=torch.promote_types(mean.dtype, torch.float32), device=y.device)
    parts = (y - mean, prediction.std, prediction.epistemic_variance.sqrt())
    return RegressionOutcome(*(part * scale for part in parts))


def _check_shape(predicted: Tensor, y: Tensor) -> None:
    if predicted.shape != y.shape:
        raise LeanBayesError(
            f"Labels of shape {tuple(y.shape)} do not match predictions of shape {tuple(predicted.shape)}: reshape one "
            "of them (a missing last dimension is the usual cause)."
        )
