"""The score of a candidate, such as a compressed model: the mean negative log-likelihood of its predictions.

It equals `leanbayes.evaluation.evaluate(...)["nll"]`, which packages above it may not import.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.arguments import checked_value
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from leanbayes.model.bayesian import BayesianModel

_TINY = torch.finfo(torch.float32).tiny


def validation_nll(
    bnn: BayesianModel,
    batches: Iterable[Any],
    samples: int | None = None,
    seed: int = 0,
    target_scale: Sequence[float] = (),
) -> float:
    """Predict every batch (x, y), and return the mean negative log-likelihood per label, for scaled targets."""
    total, count = 0.0, 0
    ignore_index = getattr(bnn.likelihood, "ignore_index", -100)
    for number, batch in enumerate(checked_value("data", batches, Iterable)):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise LeanBayesError("A score needs data of (x, y) batches: pass such batches.")
        x, y = batch
        # All batches share the same Monte Carlo samples, unless each example has its own noise.
        generator = torch.Generator().manual_seed(seed + (number << 20 if bnn.noise_per_example else 0))
        prediction = bnn.predict(x, samples, generator=generator)
        values = _nll(prediction, y, ignore_index)
        if isinstance(prediction, RegressionPrediction):
            values = values + _log_scale(prediction, target_scale)
        total += values.sum(dtype=torch.float64).item()
        count += values.numel()
    if not count:
        raise LeanBayesError(
            "data has no labels, or can be read only once: pass (x, y) batches as a list, a DataLoader, or a function "
            "that returns them."
        )
    return total / count


def _nll(prediction: Prediction, y: Tensor, ignore_index: int) -> Tensor:
    """Return the negative log-likelihood of each label."""
    if isinstance(prediction, ClassPrediction):
        return _class_nll(prediction, y, ignore_index)
    if isinstance(prediction, BinaryPrediction):
        p = _wide(prediction.probs)
        _check_shape(p, y)
        truth = y.to(p)
        return -(truth * _log(p) + (1 - truth) * _log(1 - p))
    if isinstance(prediction, RegressionPrediction):
        _check_shape(prediction.mean, y)
        variance = prediction.std.double().square().clamp_min(_TINY)
        error = y.to(variance.device) - prediction.mean
        return 0.5 * (error.double().square() / variance + (2 * torch.pi * variance).log())
    raise LeanBayesError(f"A {type(prediction).__name__} has no likelihood to compare candidates by.")


def _log_scale(prediction: RegressionPrediction, target_scale: Sequence[float]) -> Tensor:
    targets = prediction.mean.shape[-1] if prediction.mean.dim() > 1 else 1
    if len(target_scale) not in (0, 1, targets):
        raise LeanBayesError(
            f"target_scale has {len(target_scale)} numbers for {targets} targets: pass one per target, or one for all."
        )
    return torch.tensor(target_scale or (1.0,), dtype=torch.float64, device=prediction.mean.device).log()


def _class_nll(prediction: ClassPrediction, y: Tensor, ignore_index: int) -> Tensor:
    probs = prediction.probs.movedim(prediction.class_dim, -1)
    _check_shape(probs[..., 0], y)
    whole = not (y.is_floating_point() or y.is_complex())
    y = y.to(probs.device, torch.int64 if whole else y.dtype)  # a byte cannot equal -100
    y = prediction.aligned(y, ignore_index)
    labeled = y != ignore_index
    p, labels = probs[labeled], y[labeled]
    if not whole or (len(labels) and not 0 <= labels.min() <= labels.max() < p.shape[-1]):
        raise LeanBayesError(f"Labels must be integers from 0 to {p.shape[-1] - 1}: fix them, or set ignore_index.")
    return -_log(_wide(p.gather(-1, labels[:, None])[:, 0]))


def _check_shape(predicted: Tensor, y: Tensor) -> None:
    if predicted.shape != y.shape:
        raise LeanBayesError(
            f"Labels of shape {tuple(y.shape)} do not fit predictions of shape {tuple(predicted.shape)}: reshape one "
            "of them (a missing last dimension is the usual cause)."
        )


def _wide(values: Tensor) -> Tensor:
    """Convert half precision to single: half precision has no number as small as _TINY."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _log(p: Tensor) -> Tensor:
    return p.clamp_min(_TINY).log()
