"""Scores of predictions against what was true, batch by batch; under `torch.distributed`, of all processes together.

All that is kept are sums, so memory does not grow, and processes add theirs up.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction

BINS = 15  # of the calibration error
_TINY = torch.finfo(torch.float32).tiny


class Scores:
    """Takes predictions in, and gives a dict of scores.

    Classes: accuracy, nll, brier, ece (Guo et al. 2017: 15 equal-width bins, top label), entropy and mutual information
    (nats), entropy where the answer was right and where it was wrong; for dense prediction also miou, the mean over the
    classes that occur. Yes/no: accuracy, nll, brier, entropy, mutual information. Regression: rmse, nll (of a Gaussian
    with the predicted mean and variance), std and epistemic_std (mean predicted ones), in the unit of the targets
    times `target_scale`. A score is nan where nothing counts.
    """

    def __init__(self, ignore_index: int = -100, target_scale: Sequence[float] = ()) -> None:
        self.ignore_index = ignore_index
        self.target_scale = target_scale
        self._sums: dict[str, Tensor] = {}  # of a mean: its sum and its count

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Take in one batch."""
        if isinstance(prediction, ClassPrediction):
            self._classes(prediction, y)
        elif isinstance(prediction, BinaryPrediction):
            _check_shape(prediction.probs, y)
            self._binary(prediction, y)
        elif isinstance(prediction, RegressionPrediction):
            _check_shape(prediction.mean, y)
            self._regression(prediction, y)
        else:
            raise LeanBayesError(f"There are no scores for a {type(prediction).__name__}.")

    def compute(self) -> dict[str, float]:
        """Return the scores of everything taken in, by all processes."""
        sums = _over_processes(self._sums)
        if not sums:
            raise LeanBayesError("There is nothing to score: take in at least one labelled batch.")
        scores = {}
        for name, values in sums.items():
            if name == "ece":
                scores[name] = float((values[0] - values[1]).abs().sum() / values[2].sum())
            elif name == "miou":
                both = values.diagonal()
                either = values.sum(0) + values.sum(1) - both
                scores[name] = float((both / either)[either > 0].mean())
            elif name == "mse":
                scores["rmse"] = float(values[0] / values[1]) ** 0.5
            else:
                scores[name] = float(values[0] / values[1])
        return scores

    def _classes(self, prediction: ClassPrediction, y: Tensor) -> None:
        probs = prediction.probs.movedim(prediction.class_dim, -1)
        _check_shape(probs[..., 0], y)
        counted = y != self.ignore_index
        p, labels = probs[counted], y[counted]
        if not len(labels):
            return
        if labels.is_floating_point() or labels.min() < 0 or labels.max() >= p.shape[-1]:
            raise LeanBayesError(
                f"Labels must be integers from 0 to {p.shape[-1] - 1}: mend them, or set ignore_index."
            )
        entropy = prediction.entropy[counted]
        chosen = p.gather(-1, labels[:, None])[:, 0]
        confidence, answer = p.max(-1)
        right = answer == labels
        self._mean("accuracy", right)
        self._mean("nll", -chosen.clamp_min(_TINY).log())
        # A bin reaches from above its lower limit to its upper one, so that a confidence of 1 is in the last.
        limits = torch.linspace(0, 1, BINS + 1, device=p.device, dtype=p.dtype)[1:-1]
        places = torch.bucketize(confidence, limits)
        values = torch.stack([confidence.double(), right.double(), torch.ones_like(confidence, dtype=torch.float64)])
        self._add("ece", torch.zeros(3, BINS, dtype=torch.float64, device=p.device).index_add_(1, places, values))
        self._mean("brier", p.square().sum(-1) - 2 * chosen + 1)
        if y.dim() > 1:
            classes = p.shape[-1]
            pairs = torch.bincount(labels * classes + answer, minlength=classes**2)
            self._add("miou", pairs.view(classes, classes).double())
        self._mean("entropy", entropy)
        self._mean("entropy_right", entropy[right])
        self._mean("entropy_wrong", entropy[~right])
        self._mean("mutual_information", prediction.mutual_information[counted])

    def _binary(self, prediction: BinaryPrediction, y: Tensor) -> None:
        p, truth = prediction.probs, y.to(prediction.probs)
        self._mean("accuracy", prediction.label == (truth >= 0.5))
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

    def _mean(self, name: str, values: Tensor) -> None:
        count = torch.tensor(values.numel(), dtype=torch.float64, device=values.device)
        self._add(name, torch.stack([values.sum(dtype=torch.float64), count]))

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums[name] + values if name in self._sums else values


def _check_shape(predicted: Tensor, y: Tensor) -> None:
    if predicted.shape != y.shape:
        raise LeanBayesError(
            f"Labels of shape {tuple(y.shape)} do not fit predictions of shape {tuple(predicted.shape)}: reshape one "
            "of them (a missing last dimension is the usual cause)."
        )


def _over_processes(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add up the sums of all processes, some of which may have none."""
    sums = {name: values.cpu() for name, values in sums.items()}
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return sums
    every: list[dict[str, Tensor]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(every, sums)
    names = dict.fromkeys(name for one in every for name in one)
    return {name: torch.stack([one[name] for one in every if name in one]).sum(0) for name in names}


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
