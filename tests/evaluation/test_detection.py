"""Detection scores agree with scikit-learn, plain loops, a closed form and, mostly, torchmetrics."""

import math
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor
from torchmetrics.functional import classification as tm
from training_cases import expect

from leanbayes.evaluation.detection import auroc, average_precision, detection_scores, false_positive_rate

Sides = tuple[list[int], list[int]]
side = st.lists(st.integers(-4, 4), min_size=1, max_size=25)
KEYS = {"auroc", "aupr_in", "aupr_out", "fpr95", "fpr85"}


def tensors(sides: Sides) -> tuple[Tensor, Tensor]:
    return torch.tensor(sides[0]).double(), torch.tensor(sides[1]).double()


def joined(scores_in: Tensor, scores_out: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Whether each example is OOD, and its score."""
    outside = np.r_[np.zeros(len(scores_in)), np.ones(len(scores_out))]
    return outside, np.r_[scores_in.double().numpy(), scores_out.double().numpy()]


def rate_of_sklearn(scores_in: Tensor, scores_out: Tensor, rate: float) -> float:
    outside, scores = joined(scores_in, scores_out)
    false, true, _ = metrics.roc_curve(1 - outside, -scores, drop_intermediate=False)
    return float(false[true >= rate].min())


def scores_of_sklearn(scores_in: Tensor, scores_out: Tensor) -> dict[str, float]:
    outside, scores = joined(scores_in, scores_out)
    return {
        "auroc": metrics.roc_auc_score(outside, scores),
        "aupr_in": metrics.average_precision_score(1 - outside, -scores),
        "aupr_out": metrics.average_precision_score(outside, scores),
        "fpr95": rate_of_sklearn(scores_in, scores_out, 0.95),
        "fpr85": rate_of_sklearn(scores_in, scores_out, 0.85),
    }


def test_scores_are_those_of_sklearn() -> None:
    scores_in, scores_out = torch.randn(300), torch.randn(170) + 1
    expected = scores_of_sklearn(scores_in, scores_out)
    assert detection_scores(scores_in, scores_out) == pytest.approx(expected, rel=1e-12)
    assert expected.keys() == KEYS
    assert len({round(value, 3) for value in expected.values()}) == len(KEYS)


@given(st.tuples(side, side))
def test_scores_with_ties_are_those_of_sklearn(sides: Sides) -> None:
    assert detection_scores(*tensors(sides)) == pytest.approx(scores_of_sklearn(*tensors(sides)), rel=1e-9, abs=1e-12)


@given(st.tuples(side, side), st.randoms(use_true_random=False))
def test_scores_are_bounded_and_do_not_depend_on_the_order(sides: Sides, random: Random) -> None:
    found = detection_scores(*tensors(sides))
    assert all(0 <= value <= 1 + 1e-12 for value in found.values())
    assert found["fpr85"] <= found["fpr95"]
    assert auroc(*tensors(sides)[::-1]) == pytest.approx(1 - found["auroc"], abs=1e-15)
    for numbers in sides:
        random.shuffle(numbers)
    assert detection_scores(*tensors(sides)) == found
    higher = [torch.exp(t) * 1e6 for t in tensors(sides)]  # only the order counts
    assert detection_scores(*higher) == found


@given(st.tuples(side, side))
def test_the_area_is_a_probability(sides: Sides) -> None:
    wins = [(o > i) + 0.5 * (o == i) for i in sides[0] for o in sides[1]]
    assert auroc(*tensors(sides)) == pytest.approx(sum(wins) / len(wins), rel=1e-15)


def test_the_area_of_two_gaussians() -> None:
    inside, outside = torch.randn(100_000), torch.randn(100_000) + 1.5
    expected = 0.5 * (1 + math.erf(1.5 / 2))  # Φ(d/√2)
    assert auroc(inside, outside) == pytest.approx(expected, abs=0.005)
    accepted = 0.5 * (1 + math.erf((1.6449 - 1.5) / math.sqrt(2)))
    assert false_positive_rate(inside, outside) == pytest.approx(accepted, abs=0.01)


@pytest.mark.parametrize(
    ("scores_in", "scores_out", "expected"),
    [
        ([0.1, 0.2], [0.3, 0.4], (1, 1, 1, 0, 0)),  # separable
        ([0.3, 0.4], [0.1, 0.2], (0, (1 / 3 + 2 / 4) / 2, (1 / 3 + 2 / 4) / 2, 1, 1)),  # separable, but reversed
        ([0.5, 0.5, 0.5], [0.5], (0.5, 0.75, 0.25, 1, 1)),  # all tied
        ([0.5], [0.5], (0.5, 0.5, 0.5, 1, 1)),
        ([-math.inf, 0.0], [math.inf, -0.0], (7 / 8, (1 + 2 / 3) / 2, (1 + 2 / 3) / 2, 0.5, 0.5)),
    ],
)
def test_known_scores(scores_in: list[float], scores_out: list[float], expected: tuple[float, ...]) -> None:
    found = detection_scores(torch.tensor(scores_in), torch.tensor(scores_out))
    assert list(found.values()) == pytest.approx(expected)


# -- torchmetrics -----------------------------------------------------------------------------------------------------


def test_torchmetrics_agrees_on_scores_from_0_to_1() -> None:
    scores_in, scores_out = torch.rand(80, dtype=torch.float64), torch.rand(50, dtype=torch.float64).sqrt()
    scores, outside = torch.cat([scores_in, scores_out]), torch.arange(130) >= 80
    assert auroc(scores_in, scores_out) == pytest.approx(float(tm.binary_auroc(scores, outside.long())), rel=1e-6)
    precision = tm.binary_average_precision(scores, outside.long())
    assert average_precision(scores_out, scores_in) == pytest.approx(float(precision), rel=1e-6)


def test_torchmetrics_ties_large_scores() -> None:
    """torchmetrics applies a sigmoid to scores outside of [0, 1], which is 1 for all of these."""
    for dtype, start in ((torch.float32, 20.0), (torch.float64, 40.0)):
        scores, outside = torch.arange(4, dtype=dtype) + start, torch.tensor([0, 1, 0, 1])
        assert float(tm.binary_auroc(scores, outside)) == 0.5
        assert auroc(scores[::2], scores[1::2]) == metrics.roc_auc_score(outside, scores) == 0.75


# -- the false positive rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 19, 20, 21, 100, 1000])
def test_the_threshold_accepts_exactly_the_requested_share(count: int) -> None:
    """An OOD example at k + ½ passes if k + 1 others do, so the rate shows how many pass."""
    inside = torch.arange(count)
    for rate in (1 / count, 0.55, 0.57, 0.85, 0.95, 0.99, 1.0):
        accepted = round(false_positive_rate(inside, inside - 0.5, rate) * count)
        assert accepted / count >= rate
        assert accepted == 1 or (accepted - 1) / count < rate


@given(st.tuples(side, side), st.floats(0.01, 1))
def test_the_rate_is_that_of_sklearn_at_any_threshold(sides: Sides, rate: float) -> None:
    assert false_positive_rate(*tensors(sides), rate) == rate_of_sklearn(*tensors(sides), rate)


def test_an_invalid_rate_raises_an_error() -> None:
    for rate in (0.0, -0.1, 1.1, 95, math.nan):
        expect(partial(false_positive_rate, torch.rand(3), torch.rand(3), rate), f"{rate}", "at most 1")


# -- kinds of input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_float_types_are_accepted(dtype: torch.dtype) -> None:
    scores_in, scores_out = torch.randn(200).to(dtype).requires_grad_(), (torch.randn(150) + 1).to(dtype)
    expected = scores_of_sklearn(scores_in.detach(), scores_out)
    assert detection_scores(scores_in, scores_out) == pytest.approx(expected, rel=1e-12)


def test_integers_booleans_and_pixels_are_accepted() -> None:
    bits = torch.tensor([[True, False], [False, False]]), torch.tensor([[True, True], [False, True]])
    expected = scores_of_sklearn(bits[0].flatten(), bits[1].flatten())
    for kind in (torch.bool, torch.uint8, torch.int64):
        assert detection_scores(bits[0].to(kind), bits[1].to(kind)) == pytest.approx(expected)


def test_strided_views_are_accepted_without_a_warning() -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        scores = torch.rand(40, 2, dtype=torch.float64)
        assert auroc(scores[:, 0], scores[:, 1]) == auroc(scores[:, 0].clone(), scores[:, 1].clone())
    finally:
        torch.set_warn_always(always)


@pytest.mark.parametrize("call", [auroc, average_precision, false_positive_rate, detection_scores])
def test_empty_scores_and_nan_raise_errors(call: Callable[[Tensor, Tensor], object]) -> None:
    good, bad = torch.rand(3), torch.tensor([0.1, math.nan])
    expect(lambda: call(good, bad), "NaN")
    expect(lambda: call(bad, good), "NaN")
    expect(lambda: call(good, good[:0]), "empty")
    expect(lambda: call(good[:0], good), "empty")
