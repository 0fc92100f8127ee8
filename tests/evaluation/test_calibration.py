"""Calibration errors agree with plain loops, torchmetrics and known values, in any order of the examples."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional import classification as tm
from training_cases import expect

from leanbayes.evaluation import calibration_error as calibration
from leanbayes.evaluation.calibration_error import (
    BINS,
    adaptive_ece,
    bin_sums,
    class_bin_sums,
    classwise_ece,
    debiased_classwise_error,
    expected_calibration_error,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def examples(count: int = 400, classes: int = 5, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    """Probabilities, and labels of which three in four follow them."""
    probs = (sharp * torch.randn(count, classes, dtype=torch.float64)).softmax(1)
    labels = torch.multinomial(probs, 1)[:, 0]
    return probs, torch.where(torch.rand(count) < 0.75, labels, torch.randint(classes, (count,)))


def top(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    confidence, answer = probs.max(1)
    return confidence, answer == labels


def plain_sums(confidence: list[float], right: list[bool], bins: int) -> np.ndarray:
    sums = np.zeros((3, bins))
    for c, r in zip(confidence, right, strict=True):
        inside = [b for b in range(bins) if b / bins < c <= (b + 1) / bins or (b == 0 and c == 0)]
        assert len(inside) == 1
        sums[:, inside[0]] += c, r, 1
    return sums


def equal_mass_bins(p: np.ndarray, bins: int) -> list[np.ndarray]:
    """Sorted values split into parts; equal values on both sides of a split belong to the left part."""
    parts = np.array_split(np.sort(p), min(bins, len(p)))
    cuts = sorted({(left[-1] + right[0]) / 2 for left, right in pairwise(parts)})
    return [np.flatnonzero(np.searchsorted(cuts, p) == b) for b in range(len(cuts) + 1)]


def plain_adaptive_ece(p: np.ndarray, right: np.ndarray, bins: int) -> float:
    inside = [i for i in equal_mass_bins(p, bins) if len(i)]
    return sum(len(i) / len(p) * abs(p[i].mean() - right[i].mean()) for i in inside)


def plain_debiased_error(probs: np.ndarray, labels: np.ndarray, bins: int) -> float:
    squares = []
    for k in range(probs.shape[1]):
        p, y, total = probs[:, k], labels == k, 0.0
        for i in equal_mass_bins(p, bins):
            if len(i) > 1:
                m = y[i].mean()
                total += len(i) / len(p) * ((p[i].mean() - m) ** 2 - m * (1 - m) / (len(i) - 1))
        squares.append(max(total, 0.0))
    return math.sqrt(np.mean(squares))


# -- bins of equal width ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 4, BINS])
def test_sums_are_those_of_a_plain_loop(bins: int) -> None:
    confidence = torch.cat([torch.rand(300, dtype=torch.float64), torch.tensor([0.0, 1.0, 0.25, 0.5, 0.2])])
    right = torch.rand(305) < confidence
    found = bin_sums(confidence, right, bins)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), plain_sums(confidence.tolist(), right.tolist(), bins), atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_limit_belongs_to_the_bin_below_in_every_dtype(dtype: torch.dtype) -> None:
    limits = (torch.arange(BINS + 1, dtype=torch.float64) / BINS).to(dtype)
    counts = bin_sums(limits, torch.ones(BINS + 1, dtype=torch.bool))[2]
    assert counts.tolist() == [2] + [1] * (BINS - 1)  # the first bin includes 0
    above = limits[1:-1] * (1 + torch.finfo(dtype).eps)
    assert bin_sums(above, torch.ones(BINS - 1, dtype=torch.bool))[2].tolist() == [0] + [1] * (BINS - 1)


def test_batches_add_up() -> None:
    probs, labels = examples()
    confidence, right = top(probs, labels)
    parts = zip(confidence.split(151), right.split(151), strict=True)
    added = torch.stack([bin_sums(c, r) for c, r in parts]).sum(0)
    torch.testing.assert_close(added, bin_sums(confidence, right))
    classes = torch.stack([class_bin_sums(p, y) for p, y in zip(probs.split(151), labels.split(151), strict=True)])
    torch.testing.assert_close(classes.sum(0), class_bin_sums(probs, labels))


@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_class_sums_are_the_sums_of_each_class(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_CHUNK", chunk)
    probs, labels = examples(60)
    labels[labels == 3] = 4  # one class has no example
    found = class_bin_sums(probs, labels)
    assert found.shape == (5, 3, BINS)
    for k in range(5):
        torch.testing.assert_close(found[k], bin_sums(probs[:, k], labels == k))


def test_errors_agree_with_torchmetrics() -> None:
    probs, labels = examples()
    sums = bin_sums(*top(probs, labels))
    ece = tm.multiclass_calibration_error(probs, labels, 5, BINS, "l1")
    assert expected_calibration_error(sums) == pytest.approx(float(ece), rel=1e-6)
    assert ece > 0.01
    classes = [
        tm.binary_calibration_error(p, (labels == k).long(), BINS, "l1") for k, p in enumerate(probs.T.contiguous())
    ]
    assert classwise_ece(class_bin_sums(probs, labels)) == pytest.approx(np.mean(classes), rel=1e-6)


def test_torchmetrics_puts_full_confidence_into_a_separate_bin() -> None:
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.96, 0.04], [0.96, 0.04]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 0])
    sums = bin_sums(*top(probs, labels))
    assert sums[2, -1] == 4
    assert expected_calibration_error(sums) == pytest.approx(0.98 - 0.75)
    theirs = tm.multiclass_calibration_error(probs, labels, 2, BINS, "l1")
    assert float(theirs) == pytest.approx((1 - 0.5) / 2 + (1 - 0.96) / 2)


def test_known_errors_of_the_bins() -> None:
    confidence = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.3], dtype=torch.float64)
    sums = bin_sums(confidence, torch.tensor([True, True, True, False, True]))
    assert expected_calibration_error(sums) == pytest.approx((4 * 0.15 + 0.7) / 5)


def test_certain_predictions_have_no_error_if_right_and_the_largest_if_wrong() -> None:
    one, zero = torch.ones(6), torch.zeros(6)
    for confidence, right, wanted in ((one, one, 0.0), (zero, zero, 0.0), (one, zero, 1.0), (zero, one, 1.0)):
        assert expected_calibration_error(bin_sums(confidence, right)) == wanted
        assert adaptive_ece(confidence, right) == wanted
    certain = torch.eye(4)[[0, 1, 1, 2, 2, 2]]  # the last class is missing
    for labels, error in (([0, 1, 1, 2, 2, 2], 0.0), ([1, 0, 0, 3, 3, 3], 1.0)):
        y = torch.tensor(labels)
        assert classwise_ece(class_bin_sums(certain, y)) == pytest.approx(error * 12 / 24)
        expected = plain_debiased_error(certain.double().numpy(), y.numpy(), BINS)
        assert debiased_classwise_error(certain, y) == pytest.approx(expected)
        assert (expected > 0.5) == (error == 1)


# -- bins of equal mass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 14, 15, 16, 100, 607])
def test_equal_mass_errors_are_those_of_a_plain_loop(count: int) -> None:
    probs, labels = examples(count)
    confidence, right = top(probs, labels)
    expected = plain_adaptive_ece(confidence.numpy(), right.numpy(), BINS)
    assert adaptive_ece(confidence, right) == pytest.approx(expected, abs=1e-12)
    expected = plain_debiased_error(probs.numpy(), labels.numpy(), BINS)
    assert debiased_classwise_error(probs, labels) == pytest.approx(expected, abs=1e-9)
    assert (expected > 0) == (count > BINS)  # else every bin has at most one example


def test_without_ties_the_bins_differ_by_one_example_at_most() -> None:
    ordered = torch.arange(97, dtype=torch.float64) / 97
    sizes = torch.bincount(calibration._equal_mass(ordered, 10)).tolist()
    assert sizes == [10] * 7 + [9] * 3


def test_ties_share_a_bin() -> None:
    confidence = torch.tensor([0.125, 0.25, 0.5, 0.5, 0.5, 0.5, 0.75, 1.0])
    assert calibration._equal_mass(confidence, 4).tolist() == [0, 0, 1, 1, 1, 1, 3, 3]
    right = torch.tensor([False, False, True, False, True, False, True, True])
    assert adaptive_ece(confidence, right, 4) == pytest.approx((0.375 + 0 + 0.25) / 8)
    assert adaptive_ece(torch.full((9,), 0.5), torch.arange(9) < 6) == pytest.approx(6 / 9 - 0.5)


tied = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=40)


@given(tied, st.integers(1, 20), st.randoms(use_true_random=False))
def test_the_order_of_the_examples_does_not_matter(pairs: list[tuple[int, int]], bins: int, random: Random) -> None:
    p = torch.tensor([p for p, _ in pairs]) / 8  # exact in binary, with many ties
    probs, labels = torch.stack([p / 2, p / 2, 1 - p], 1), torch.tensor([y for _, y in pairs])
    order = torch.tensor(random.sample(range(len(p)), len(p)))
    adaptive = adaptive_ece(p, labels == 0, bins)
    assert 0 <= adaptive <= 1
    assert adaptive == adaptive_ece(p[order], (labels == 0)[order], bins)
    assert adaptive == pytest.approx(plain_adaptive_ece(p.numpy(), labels.numpy() == 0, bins), abs=1e-6)
    debiased = debiased_classwise_error(probs, labels, bins)
    assert 0 <= debiased <= 1
    assert debiased == debiased_classwise_error(probs[order], labels[order], bins)
    expected = plain_debiased_error(probs.double().numpy(), labels.numpy(), bins)
    assert debiased**2 == pytest.approx(expected**2, abs=1e-12)
    sums = bin_sums(p, labels == 0, bins)
    assert torch.equal(sums, bin_sums(p[order], (labels == 0)[order], bins))
    ece = expected_calibration_error(sums)
    assert 0 <= ece <= 1 + 1e-12


def test_the_debiased_error_of_few_labels_has_no_bias() -> None:
    """With ten labels per bin and a frequency 0.25 above the probability, the mean of E² is 0.25²."""
    said = (torch.arange(BINS, dtype=torch.float64) / 20).repeat_interleave(10)
    found, biased = [], []
    for _ in range(400):
        y = torch.bernoulli(said + 0.25)
        probs = torch.stack([1 - said, said], 1)
        found.append(debiased_classwise_error(probs, y.long()) ** 2)
        biased.append(float((said.view(BINS, 10).mean(1) - y.view(BINS, 10).mean(1)).square().mean()))
    slack = 4 * float(np.std(found)) / math.sqrt(400)
    assert np.mean(found) == pytest.approx(0.25**2, abs=slack)
    assert np.mean(biased) > 0.25**2 + 2 * slack


def test_a_calibrated_model_has_almost_no_debiased_error() -> None:
    probs = torch.randn(20_000, 4, dtype=torch.float64).softmax(1)
    calibrated, other = torch.multinomial(probs, 1)[:, 0], torch.multinomial(probs.square(), 1)[:, 0]
    assert debiased_classwise_error(probs, calibrated) < 0.015
    assert adaptive_ece(*top(probs, calibrated)) < 0.02
    assert debiased_classwise_error(probs, other) > 0.05
    assert adaptive_ece(*top(probs, other)) > 0.05


@pytest.mark.parametrize("chunk", [1, 100, 250])
def test_classes_may_be_processed_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    probs, labels = examples(100)
    whole = debiased_classwise_error(probs, labels)
    assert whole > 0
    monkeypatch.setattr(calibration, "_CHUNK", chunk)
    assert debiased_classwise_error(probs, labels) == pytest.approx(whole, rel=1e-12)


# -- kinds of input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_float_types_are_summed_in_double_precision(dtype: torch.dtype) -> None:
    probs, labels = examples()
    probs = probs.to(dtype).requires_grad_()
    confidence, right = top(probs, labels)
    assert adaptive_ece(confidence, right) == adaptive_ece(confidence.double(), right)
    assert debiased_classwise_error(probs, labels) == debiased_classwise_error(probs.double(), labels)
    sums = bin_sums(confidence, right)
    assert sums.dtype == class_bin_sums(probs, labels).dtype == torch.float64
    assert float(sums[0].sum()) == pytest.approx(float(confidence.detach().double().sum()), rel=1e-12)
    assert not sums.requires_grad


def test_integers_and_booleans_are_accepted() -> None:
    for kind in (torch.bool, torch.int64, torch.uint8, torch.float32):
        certain, right = torch.tensor([1, 1, 0, 1]).to(kind), torch.tensor([1, 0, 0, 1]).to(kind)
        assert expected_calibration_error(bin_sums(certain, right)) == 0.25
        assert adaptive_ece(certain, right) == 0.25
        probs = torch.stack([1 - certain.long(), certain.long()], 1).to(kind)
        hits = class_bin_sums(probs, right.to(torch.uint8))[:, 1]
        assert hits[:, 0].tolist() == [1, 0]
        assert hits[:, -1].tolist() == [1, 2]
    labels = torch.tensor([True, False, True])
    probs = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.0, 1.0]])
    assert torch.equal(class_bin_sums(probs, labels), class_bin_sums(probs, labels.long()))


def test_strided_views_are_accepted_without_a_warning() -> None:
    probs, labels = examples(60)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        found = class_bin_sums(probs.T.contiguous().T, labels)
        for k in range(5):
            torch.testing.assert_close(found[k], bin_sums(probs[:, k], labels == k))
    finally:
        torch.set_warn_always(always)


def test_pixels_count_as_examples() -> None:
    confidence, right = torch.rand(2, 3, 4), torch.rand(2, 3, 4) < 0.5
    assert torch.equal(bin_sums(confidence, right), bin_sums(confidence.flatten(), right.flatten()))


def test_probabilities_rounded_above_1_are_in_the_last_bin() -> None:
    assert bin_sums(torch.tensor([1.0078, -0.001]), torch.ones(2))[2].tolist() == [1] + [0] * (BINS - 2) + [1]


def test_the_error_without_examples_is_nan() -> None:
    nothing, classes, labels = torch.zeros(0), torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)
    assert bin_sums(nothing, nothing).tolist() == torch.zeros(3, BINS).tolist()
    assert math.isnan(expected_calibration_error(bin_sums(nothing, nothing)))
    assert math.isnan(classwise_ece(class_bin_sums(classes, labels)))
    assert math.isnan(adaptive_ece(nothing, nothing))
    assert math.isnan(debiased_classwise_error(classes, labels))


def test_invalid_probabilities_raise_errors() -> None:
    probs, labels = examples(10)
    for bad in (probs * 100, probs.log(), probs.clone().fill_(math.nan)):
        expect(partial(bin_sums, bad[:, 0], labels == 0), "between 0 and 1")
        expect(partial(adaptive_ece, bad[:, 0], labels == 0), "between 0 and 1")
        expect(partial(class_bin_sums, bad, labels), "between 0 and 1")
        expect(partial(debiased_classwise_error, bad, labels), "between 0 and 1")


def test_mismatched_shapes_and_labels_raise_errors() -> None:
    probs, labels = examples(10)
    expect(lambda: bin_sums(probs[:, 0], labels[:, None] == 0), "(10, 1)", "(10,)")
    expect(lambda: adaptive_ece(probs[:, 0], labels[:9] == 0), "(9,)", "(10,)")
    calls: tuple[Callable[[Tensor, Tensor], object], ...] = class_bin_sums, debiased_classwise_error
    for call in calls:
        expect(partial(call, probs, labels[:9]), "(10, 5)", "(9,)")
        expect(partial(call, probs[:, 0], labels), "reshape")
        expect(partial(call, probs[:, :0], labels), "(10, 0)")
        expect(partial(call, probs, labels.float()), "integers from 0 to 4")
        expect(partial(call, probs, labels + 5), "integers from 0 to 4")
        expect(partial(call, probs, labels - 5), "integers from 0 to 4")
