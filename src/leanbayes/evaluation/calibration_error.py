"""Calibration errors: the gap between predicted probabilities and observed frequencies.

Bins of equal width are sums, which can be added over batches and processes. Bins of equal mass need all examples at
once.
"""

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError

BINS = 15
_SLACK = 0.01  # mean probabilities in half precision can slightly exceed 1
_CHUNK = 1 << 22  # probabilities processed at a time: about 200 MB


def bin_sums(confidence: Tensor, right: Tensor, bins: int = BINS) -> Tensor:
    """Sum confidence (n,), correctness (n,) and counts over bins of equal width: (3, bins) in float64.

    A bin excludes its lower limit and includes its upper limit; the first bin also includes 0. Limits k/bins are
    rounded to the dtype of the confidences, so that 0.2 is on the limit 3/15 in every dtype.
    """
    confidence, right = _probabilities(confidence).flatten(), _matching(right, confidence).flatten()
    return _sums(confidence, right, _equal_width(confidence, bins), bins)


def class_bin_sums(probs: Tensor, labels: Tensor, bins: int = BINS) -> Tensor:
    """Return the `bin_sums` of p_k against [y = k] for each class k: probs (n, C) and labels (n,) give (C, 3, bins)."""
    probs, labels = _class_probabilities(probs, labels)
    classes = probs.shape[1]
    sums = torch.zeros(classes, 3, bins, dtype=torch.float64, device=probs.device)
    flat = sums.view(-1)
    confidences, hits, counts = flat, flat[bins:], flat[2 * bins :]
    starts = 3 * bins * torch.arange(classes, device=probs.device)
    rows = max(1, _CHUNK // classes)
    for p, y in zip(probs.split(rows), labels.split(rows), strict=True):
        places = _equal_width(p, bins) + starts
        chosen = places.gather(1, y[:, None]).flatten()
        ones = torch.ones(p.numel(), dtype=torch.float64, device=p.device)
        confidences.index_add_(0, places.flatten(), p.double().flatten())
        hits.index_add_(0, chosen, ones[: len(chosen)])
        counts.index_add_(0, places.flatten(), ones)
    return sums


def expected_calibration_error(sums: Tensor) -> float:
    """Return the mean of |accuracy - confidence| over the examples of `bin_sums` (3, bins); nan without examples.

    ECE = Σ_b n_b/n |acc_b - conf_b| (Guo et al. 2017, arXiv:1706.04599).
    """
    return float(_absolute_error(sums))


def classwise_ece(class_sums: Tensor) -> float:
    """Return the mean over the classes of the error of `class_bin_sums` (C, 3, bins); nan without examples.

    SCE = 1/C Σ_k Σ_b n_bk/n |acc_bk - conf_bk|, the static calibration error (Nixon et al. 2019, arXiv:1904.01685).
    """
    return float(_absolute_error(class_sums).mean())


def adaptive_ece(confidence: Tensor, right: Tensor, bins: int = BINS) -> float:
    """Return the ECE over bins of equal mass (Nguyen & O'Connor 2015, Nixon et al. 2019); nan without examples.

    Sorted by confidence, every bin takes n // bins examples, and the first n % bins take one more. Equal confidences
    share the bin of the first of them, so that the order of the examples does not matter.
    """
    confidence, right = _probabilities(confidence).flatten(), _matching(right, confidence).flatten()
    confidence, order = confidence.sort()
    return expected_calibration_error(_sums(confidence, right[order], _equal_mass(confidence, bins), bins))


def debiased_classwise_error(probs: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Return the debiased root mean square of p_k - P(y = k | p_k) over examples and classes; nan without examples.

    For each class, over bins of equal mass as in `adaptive_ece`, with mean probability p_b and frequency y_b,
        E² = max(0, Σ_b n_b/n [(p_b - y_b)² - y_b(1 - y_b)/(n_b - 1)]);
    the result is the root of the mean over the classes (Kumar et al. 2019, arXiv:1909.10155). A bin with one example
    counts as 0, as in their code. The papers on SSVI and mBNN report this as "ECE".
    """
    probs, labels = _class_probabilities(probs, labels)
    count, classes = probs.shape
    if not count:
        return float("nan")
    squares = []
    numbers = torch.arange(classes, device=probs.device).split(max(1, _CHUNK // count))
    for k in numbers:
        p, order = probs[:, k].T.sort()
        hit = labels[order] == k[:, None]
        p_b, y_b, n_b = _sums(p, hit, _equal_mass(p, bins), bins).unbind(-2)
        p_b, y_b = p_b / n_b, y_b / n_b
        errors = (p_b - y_b).square() - y_b * (1 - y_b) / (n_b - 1)
        squares.append((n_b / count * errors).where(n_b > 1, 0).sum(-1).clamp_min(0))
    return float(torch.cat(squares).mean().sqrt())


def _sums(confidence: Tensor, right: Tensor, places: Tensor, bins: int) -> Tensor:
    """Sum confidence, right and 1 (..., n) over their bins: (..., 3, bins)."""
    values = torch.stack([confidence.double(), right.double(), torch.ones_like(confidence, dtype=torch.float64)], -2)
    zeros = torch.zeros(*values.shape[:-1], bins, dtype=torch.float64, device=values.device)
    return zeros.scatter_add_(-1, places.unsqueeze(-2).expand_as(values), values)


def _absolute_error(sums: Tensor) -> Tensor:
    confidence, right, count = sums.unbind(-2)
    return (confidence - right).abs().sum(-1) / count.sum(-1)


def _equal_width(confidence: Tensor, bins: int) -> Tensor:
    limits = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    return torch.bucketize(confidence.contiguous(), limits.to(confidence.dtype))


def _equal_mass(ordered: Tensor, bins: int) -> Tensor:
    """Assign ascending values (..., n) to bins, equal values to the bin of the first of them."""
    count = ordered.shape[-1]
    ranks = torch.arange(count, device=ordered.device)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    first = torch.where(new, ranks, 0).cummax(-1).values
    sizes = torch.full((bins,), count // bins, device=ordered.device)
    sizes[: count % bins] += 1
    return torch.arange(bins, device=ordered.device).repeat_interleave(sizes)[first]


def _probabilities(values: Tensor) -> Tensor:
    values = values.detach() if values.is_floating_point() else values.double()
    if values.numel():
        low, high = values.aminmax()
        if not (low >= -_SLACK and high <= 1 + _SLACK):  # written so that NaN is rejected too
            raise LeanBayesError(
                f"Probabilities must be between 0 and 1, but these range from {float(low):.4g} to {float(high):.4g}: "
                "pass probabilities, not logits or percentages."
            )
    return values


def _matching(right: Tensor, confidence: Tensor) -> Tensor:
    if right.shape != confidence.shape:
        raise LeanBayesError(
            f"Correctness of shape {tuple(right.shape)} does not match confidences of shape "
            f"{tuple(confidence.shape)}: pass one value per confidence."
        )
    return right.detach()


def _class_probabilities(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if probs.dim() != 2 or not probs.shape[1] or labels.shape != probs.shape[:1]:
        raise LeanBayesError(
            f"Probabilities of shape {tuple(probs.shape)} and labels of shape {tuple(labels.shape)} must be (examples, "
            "classes) and (examples,): reshape them."
        )
    classes = probs.shape[1]
    if len(labels) and (labels.is_floating_point() or labels.min() < 0 or labels.max() >= classes):
        raise LeanBayesError(f"Labels must be integers from 0 to {classes - 1}: fix them, or remove those examples.")
    return _probabilities(probs), labels.long()
