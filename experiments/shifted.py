"""Corrupted and out-of-distribution images: the metrics of a trained model of `engines.py` beyond its test data."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from leanbayes.data import Batches, Data, ood_partners, read_images
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.detection import auroc
from leanbayes.evaluation.shift.corruptions import CORRUPTIONS, corrupt

Predict = Callable[[Iterable[tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]  # batches to probabilities and labels
SEVERITY = 3  # of 5
_BATCH = 1000


def shift_scores(predict: Predict, data: Data, examples: int, device: torch.device) -> dict[str, Any]:
    """Return the mean NLL and accuracy over all corruptions at one severity, on the first test images."""
    first = Subset(data.test, range(min(examples, len(data.test))))  # type: ignore[arg-type]
    clean = list(Batches(first, _BATCH, device=device, shuffle=False).epoch())

    def corrupted(name: str) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for x, y in clean:
            changed = corrupt(x, name, SEVERITY, generator)
            changed = data.normalize(changed) if data.normalize else changed
            yield changed.contiguous(memory_format=_format(device)), y

    losses, rights = [], []
    for name in CORRUPTIONS:
        probs, labels = predict(corrupted(name))
        losses.append(float(nn.functional.nll_loss(probs.log(), labels)))
        rights.append(float((probs.argmax(1) == labels).double().mean()))
    return {
        "severity": SEVERITY,
        "examples": len(first),
        "nll": statistics.fmean(losses),
        "accuracy": statistics.fmean(rights),
        "nll_by_corruption": dict(zip(CORRUPTIONS, losses, strict=True)),
    }


def ood_scores(
    predict: Predict, data: Data, inside: Tensor, examples: int, root: Path | None, device: torch.device
) -> dict[str, Any]:
    """Return the AUROC by entropy for each known OOD data set that is there, given the probabilities of test images."""
    found: dict[str, Any] = {}
    for name in ood_partners(data.name):
        try:
            images = read_images(name, "test", root)
        except LeanBayesError:  # this machine does not have it
            continue
        some = Subset(images, range(min(examples, len(images))))
        batches = Batches(
            some, _BATCH, device=device, shuffle=False, normalize=data.normalize, channels_last=device.type == "cuda"
        )
        outside, _ = predict(batches.epoch())
        found[name] = {"examples": len(some), "auroc": auroc(_entropy(inside), _entropy(outside))}
    return found


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(1)


def _format(device: torch.device) -> torch.memory_format:
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format
