"""Uncertainties of predictions, one per example, and checks of the settings of decisions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.predictive import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction

_OF_CLASSES: dict[str, Callable[[Any], Tensor]] = {
    "confidence": lambda prediction: 1 - class_probs(prediction).amax(-1),
    "entropy": lambda prediction: prediction.entropy,
    "mutual_information": lambda prediction: prediction.mutual_information,
}
_OF_REGRESSION: dict[str, Callable[[Any], Tensor]] = {
    "std": lambda prediction: prediction.std,
    "epistemic_std": lambda prediction: prediction.epistemic_variance.sqrt(),
}
SCORES = (*_OF_CLASSES, *_OF_REGRESSION)


def uncertainty(prediction: Prediction, score: str) -> Tensor:
    """Return the uncertainty of each example by a score, (examples,) in float64; the highest of several outputs."""
    known = _OF_REGRESSION if isinstance(prediction, RegressionPrediction) else _OF_CLASSES
    if score not in known:
        raise LeanBayesError(f"A {type(prediction).__name__} has no score {score!r}: use {', '.join(known)}.")
    if known is _OF_CLASSES:
        class_probs(prediction)  # refuses several outputs per example
    values = known[score](prediction).double()
    return values.flatten(1).amax(1) if values.dim() > 1 else values


def epistemic_share(prediction: Any) -> Tensor:
    """Return the share of the uncertainty of each example that is epistemic, (examples,); 0 if it is certain."""
    if isinstance(prediction, RegressionPrediction):
        part, total = prediction.epistemic_variance.double(), prediction.variance.double()
    else:
        part, total = prediction.mutual_information.double(), prediction.entropy.double()
    part, total = (values.flatten(1).sum(1) if values.dim() > 1 else values for values in (part, total))
    return torch.where(total > 0, part / total, 0.0)


def class_probs(prediction: Prediction) -> Tensor:
    """Return the probability of each class, (examples, classes) in float64; a yes/no output has the classes 0 and 1."""
    if isinstance(prediction, ClassPrediction) and prediction.probs.dim() == 2:
        return prediction.probs.movedim(prediction.class_dim, -1).double()
    if isinstance(prediction, BinaryPrediction) and prediction.probs[0].numel() == 1:
        yes = prediction.probs.double().flatten()
        return torch.stack([1 - yes, yes], dim=-1)
    raise LeanBayesError(
        f"Decisions need one answer per example, but this {type(prediction).__name__} has several: decide from "
        "prediction.entropy with your own thresholds."
    )


def check_fraction(**settings: Any) -> None:
    """Raise an error for settings that are not strictly between 0 and 1."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            raise LeanBayesError(f"{name}={value!r} must be a fraction between 0 and 1, such as 0.05.")


def check_finite(**settings: Any) -> None:
    """Raise an error for settings that are not finite numbers."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise LeanBayesError(f"{name}={value!r} must be a finite number.")


def check_scores(values: Tensor, what: str) -> Tensor:
    """Return the scores of held-out examples in float64 on the CPU; raise an error if there is none, or one is NaN."""
    values = values.detach().double().cpu()
    if not len(values) or values.isnan().any():
        problem = "There are no held-out examples" if not len(values) else f"The {what} of a held-out example is NaN"
        raise LeanBayesError(f"{problem}: pass labeled batches that the model was not trained on.")
    return values
