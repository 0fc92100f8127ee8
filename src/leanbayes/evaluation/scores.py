"""Scores of predictions against what was true, batch by batch; under `torch.distributed`, of all processes together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction

BINS = 15  # of the calibration error: Guo et al. 2017
_TINY = torch.finfo(torch.float32).tiny


class Scores:
    """Takes predictions in, and gives a dict of scores.

    Classes: accuracy, nll, brier, ece (15 equal-width bins, top label), entropy and mutual information (nats), entropy
    where the answer was right and where it was wrong; for dense prediction also miou. Yes/no: accuracy, nll, brier.
    Regression: rmse, nll (of a Gaussian with the predicted mean and variance), std and epistemic_std (mean predicted
    ones), in the unit of the targets times `target_scale`.
    """

    def __init__(self, ignore_index: int = -100, target_scale: Sequence[float] = ()) -> None:
        self.ignore_index = ignore_index
        self.target_scale = target_scale
        self._metrics: dict[str, Any] = {}

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Take in one batch."""
        if isinstance(prediction, ClassPrediction):
            self._classes(prediction, y)
        elif isinstance(prediction, BinaryPrediction):
            self._binary(prediction, y)
        elif isinstance(prediction, RegressionPrediction):
            self._regression(prediction, y)
        else:
            raise LeanBayesError(f"There are no scores for a {type(prediction).__name__}.")

    def compute(self) -> dict[str, float]:
        """Return the scores of everything taken in; nan where nothing counted."""
        if not self._metrics:
            raise LeanBayesError("There is nothing to score: take in at least one batch.")
        scores = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        if "mse" in scores:
            scores = {"rmse": scores.pop("mse") ** 0.5, **scores}
        return scores

    def _classes(self, prediction: ClassPrediction, y: Tensor) -> None:
        from torchmetrics.classification import (
            MulticlassAccuracy,
            MulticlassCalibrationError,
            MulticlassJaccardIndex,
        )

        probs = prediction.probs.movedim(prediction.class_dim, -1)
        classes, dense = probs.shape[-1], y.dim() > 1
        counted = y != self.ignore_index
        p, labels = probs[counted], y[counted]
        if not len(labels):
            return
        entropy, doubt = prediction.entropy[counted], prediction.mutual_information[counted]
        right = p.argmax(-1) == labels
        chosen = p.gather(-1, labels[:, None])[:, 0]
        settings: dict[str, Any] = {"num_classes": classes, "validate_args": False}
        self._take("accuracy", lambda: MulticlassAccuracy(average="micro", **settings), p, labels)
        self._mean("nll", -chosen.clamp_min(_TINY).log())
        self._take("ece", lambda: MulticlassCalibrationError(n_bins=BINS, **settings), p, labels)
        self._mean("brier", p.square().sum(-1) - 2 * chosen + 1)
        if dense:
            self._take("miou", lambda: MulticlassJaccardIndex(**settings), p, labels)
        self._mean("entropy", entropy)
        self._mean("entropy_right", entropy[right])
        self._mean("entropy_wrong", entropy[~right])
        self._mean("mutual_information", doubt)

    def _binary(self, prediction: BinaryPrediction, y: Tensor) -> None:
        p, truth = prediction.probs, y.to(prediction.probs)
        self._mean("accuracy", (prediction.label == (truth >= 0.5)).float())
        self._mean("nll", -(truth * p.clamp_min(_TINY).log() + (1 - truth) * (1 - p).clamp_min(_TINY).log()))
        self._mean("brier", (p - truth).square())
        self._mean("entropy", prediction.entropy)
        self._mean("mutual_information", prediction.mutual_information)

    def _regression(self, prediction: RegressionPrediction, y: Tensor) -> None:
        scale = torch.tensor(self.target_scale or 1.0, dtype=prediction.mean.dtype, device=y.device)
        error = (y - prediction.mean) * scale
        variance = prediction.variance * scale.square()
        self._mean("mse", error.square())
        self._mean("nll", 0.5 * (error.square() / variance + (2 * torch.pi * variance).log()))
        self._mean("std", variance.sqrt())
        self._mean("epistemic_std", prediction.epistemic_variance.sqrt() * scale)

    def _take(self, name: str, make: Callable[[], Any], *values: Tensor) -> None:
        if name not in self._metrics:
            self._metrics[name] = make().to(values[0].device)
        self._metrics[name].update(*values)

    def _mean(self, name: str, values: Tensor) -> None:
        from torchmetrics import MeanMetric

        self._take(name, lambda: MeanMetric(nan_strategy="disable"), values)


def evaluate(
    bnn: BayesianModel,
    batches: Iterable[tuple[Any, Tensor]],
    *,
    samples: int | None = None,
    rule: str | None = None,
    seed: int = 0,
    target_scale: Sequence[float] = (),
) -> dict[str, float]:
    """Predict every batch (x, y) and score it.

    seed: of the draws; the model's own stream of noise is left as it is. target_scale: what one unit of each target
    is in the unit to report, such as the std that the targets were divided by.
    """
    scores = Scores(getattr(bnn.likelihood, "ignore_index", -100), target_scale)
    for number, (x, y) in enumerate(batches):
        # The same draws for every batch, as one large batch would have, or noise of its own for each example.
        generator = torch.Generator().manual_seed(seed + (number << 20 if bnn.noise_per_example else 0))
        scores.update(bnn.predict(x, samples, rule=rule, generator=generator), y)
    return scores.compute()
