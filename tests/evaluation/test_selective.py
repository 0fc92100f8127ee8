"""Selective prediction agrees with plain loops, all orders of a few examples, and closed forms."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise, permutations
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training_cases import expect

from leanbayes.evaluation.selective import (
    area_under_risk_coverage,
    coverage_at_risk,
    excess_aurc,
    risk_at_coverage,
    risk_coverage,
)

Pairs = list[tuple[int, int]]
pairs = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=30)


def tensors(drawn: Pairs) -> tuple[Tensor, Tensor]:
    return torch.tensor([u for u, _ in drawn]).double(), torch.tensor([loss for _, loss in drawn]).double()


def plain_curve(uncertainty: Tensor, loss: Tensor) -> tuple[list[float], list[float]]:
    """Accept all examples that are at most as uncertain as each threshold."""
    answered = [loss[uncertainty <= t].tolist() for t in sorted(set(uncertainty.tolist()))]
    return [len(a) / len(loss) for a in answered], [sum(a) / len(a) for a in answered]


def area_in_order(losses: list[float]) -> float:
    return float(np.mean([np.mean(losses[: k + 1]) for k in range(len(losses))]))


# -- the curve --------------------------------------------------------------------------------------------------------


@given(pairs, st.randoms(use_true_random=False))
def test_the_curve_is_that_of_thresholds_in_any_order_of_the_examples(drawn: Pairs, random: Random) -> None:
    uncertainty, loss = tensors(drawn)
    coverage, risk = risk_coverage(uncertainty, loss)
    expected = plain_curve(uncertainty, loss)
    assert coverage.tolist() == pytest.approx(expected[0], rel=1e-15)
    assert risk.tolist() == pytest.approx(expected[1], rel=1e-15)
    assert coverage[-1] == 1
    random.shuffle(drawn)
    again = risk_coverage(*tensors(drawn))
    assert torch.equal(again[0], coverage)
    assert torch.equal(again[1], risk)


@given(pairs)
def test_only_the_order_of_the_uncertainties_counts(drawn: Pairs) -> None:
    uncertainty, loss = tensors(drawn)
    found = torch.stack(risk_coverage(uncertainty, loss))
    assert torch.equal(found, torch.stack(risk_coverage(uncertainty.exp() * 7 - 100, loss)))


def test_a_known_curve() -> None:
    coverage, risk = risk_coverage(torch.tensor([0.1, 0.9, 0.4, 0.4]), torch.tensor([0, 1, 1, 0]))
    assert coverage.tolist() == [0.25, 0.75, 1]
    assert risk.tolist() == [0, 1 / 3, 0.5]
    assert coverage.dtype == risk.dtype == torch.float64


def test_infinite_uncertainty_is_accepted_last_and_zero_has_no_sign() -> None:
    coverage, risk = risk_coverage(torch.tensor([math.inf, -0.0, 0.0, -math.inf]), torch.tensor([4.0, 1.0, 2.0, 3.0]))
    assert coverage.tolist() == [0.25, 0.75, 1]
    assert risk.tolist() == [3, 2, 2.5]


# -- the area ---------------------------------------------------------------------------------------------------------


def test_without_ties_the_area_is_that_of_the_one_order() -> None:
    uncertainty, loss = torch.randn(200, dtype=torch.float64), torch.rand(200, dtype=torch.float64)
    ordered = loss[uncertainty.argsort()].tolist()
    assert area_under_risk_coverage(uncertainty, loss) == pytest.approx(area_in_order(ordered), rel=1e-12)


@pytest.mark.parametrize("uncertainty", [[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3], [1, 0, 1, 0, 1, 0]])
def test_with_ties_the_area_is_the_mean_over_all_orders(uncertainty: list[int]) -> None:
    loss = [0.5, 0.0, 1.0, 0.25, 2.0, 0.0]
    orders = [o for o in permutations(range(6)) if all(uncertainty[a] <= uncertainty[b] for a, b in pairwise(o))]
    expected = np.mean([area_in_order([loss[i] for i in order]) for order in orders])
    assert len(orders) > 1
    found = area_under_risk_coverage(torch.tensor(uncertainty), torch.tensor(loss))
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_excess_is_over_the_best_of_all_orders() -> None:
    uncertainty, loss = [0.3, 0.1, 0.2, 0.5, 0.4], [0.5, 0.0, 1.0, 0.25, 2.0]
    best = min(area_in_order(list(order)) for order in permutations(loss))
    area = area_in_order([loss[i] for i in np.argsort(uncertainty)])
    found = excess_aurc(torch.tensor(uncertainty), torch.tensor(loss))
    assert found == pytest.approx(area - best, rel=1e-12)
    assert found > 0.1
    equal = torch.full((6,), 0.7, dtype=torch.float64)  # the mean of a tie is rounded differently from its members
    assert excess_aurc(torch.arange(6), equal) == 0


@given(pairs, st.randoms(use_true_random=False))
def test_areas_are_bounded_and_do_not_depend_on_the_order(drawn: Pairs, random: Random) -> None:
    uncertainty, loss = tensors(drawn)
    area, excess = area_under_risk_coverage(uncertainty, loss), excess_aurc(uncertainty, loss)
    assert float(loss.min()) - 1e-12 <= area <= float(loss.max()) + 1e-12
    assert 0 <= excess <= excess_aurc(-loss, loss) + 1e-12  # the most certain examples are the worst
    assert excess_aurc(loss, loss) == 0
    random.shuffle(drawn)
    assert area_under_risk_coverage(*tensors(drawn)) == area
    assert excess_aurc(*tensors(drawn)) == excess


def test_areas_of_many_examples_are_their_closed_forms() -> None:
    wrong = (torch.rand(100_000) < 0.2).double()
    r = float(wrong.mean())
    perfect = r + (1 - r) * math.log(1 - r)  # Geifman et al. 2019
    assert area_under_risk_coverage(wrong, wrong) == pytest.approx(perfect, abs=1e-4)
    assert area_under_risk_coverage(torch.rand(100_000), wrong) == pytest.approx(r, abs=0.01)
    assert excess_aurc(torch.zeros(100_000), wrong) == pytest.approx(r - perfect, abs=1e-4)


# -- coverage at a risk -----------------------------------------------------------------------------------------------


@given(pairs, st.sampled_from([-1.0, 0.0, 0.5, 1.0, 4 / 3, 2.0, 5.0]))
def test_coverage_is_the_largest_with_that_risk(drawn: Pairs, risk: float) -> None:
    uncertainty, loss = tensors(drawn)
    coverage, risks = plain_curve(uncertainty, loss)
    allowed = [c for c, r in zip(coverage, risks, strict=True) if r <= risk]
    assert coverage_at_risk(uncertainty, loss, risk) == pytest.approx(max(allowed, default=0), rel=1e-15)


@pytest.mark.parametrize("coverage", [0.2, 0.5, 0.9, 1.0])
@given(drawn=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=6))
def test_risk_at_a_coverage_is_the_mean_over_all_orders_of_equal_examples(coverage: float, drawn: Pairs) -> None:
    uncertainty, loss = tensors(drawn)
    kept = math.ceil(round(coverage * len(drawn), 6))
    orders = [sorted(order, key=lambda pair: pair[0]) for order in permutations(drawn)]  # sorting keeps equal ones
    expected = np.mean([np.mean([one for _, one in order[:kept]]) for order in orders])
    assert risk_at_coverage(uncertainty, loss, coverage) == pytest.approx(expected, abs=1e-12)


def test_coverage_at_a_risk_that_rises_and_falls_again_is_the_last_one() -> None:
    uncertainty, loss = torch.arange(10), torch.tensor([0, 1, 0, 0, 0, 0, 0, 0, 0, 1])
    assert coverage_at_risk(uncertainty, loss, 0.12) == 0.9
    assert coverage_at_risk(uncertainty, loss, 0.1) == 0.1
    assert coverage_at_risk(uncertainty, loss, 0.2) == 1
    assert coverage_at_risk(uncertainty, 1 - loss, 0.0) == 0
    assert coverage_at_risk(torch.zeros(10), loss, 0.2) == 1
    assert coverage_at_risk(torch.zeros(10), loss, 0.19) == 0


# -- kinds of input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_float_types_are_computed_in_double_precision(dtype: torch.dtype) -> None:
    uncertainty, loss = torch.rand(3000).to(dtype).requires_grad_(), torch.rand(3000).to(dtype).requires_grad_()
    exact = uncertainty.detach().double(), loss.detach().double()
    assert area_under_risk_coverage(uncertainty, loss) == area_under_risk_coverage(*exact)
    assert excess_aurc(uncertainty, loss) == excess_aurc(*exact)
    assert coverage_at_risk(uncertainty, loss, 0.5) == coverage_at_risk(*exact, 0.5)
    assert not risk_coverage(uncertainty, loss)[1].requires_grad


def test_booleans_are_accepted_and_pixels_count_as_examples() -> None:
    wrong = torch.tensor([[True, False], [False, False]])
    assert area_under_risk_coverage(wrong, wrong) == pytest.approx(0.25 / 4)
    assert coverage_at_risk(wrong, wrong, 0) == 0.75


def test_one_example() -> None:
    uncertainty, loss = torch.tensor([0.3]), torch.tensor([0.75])
    assert [t.tolist() for t in risk_coverage(uncertainty, loss)] == [[1], [0.75]]
    assert area_under_risk_coverage(uncertainty, loss) == 0.75
    assert excess_aurc(uncertainty, loss) == 0


Call = Callable[[Tensor, Tensor], object]
CALLS: list[Call] = [risk_coverage, area_under_risk_coverage, excess_aurc, partial(coverage_at_risk, risk=0.1)]


@pytest.mark.parametrize("call", CALLS)
def test_nan_and_mismatched_shapes_raise_errors(call: Call) -> None:
    x, bad = torch.rand(3), torch.tensor([0.1, math.nan, 0.2])
    expect(lambda: call(bad, x), "NaN")
    expect(lambda: call(x, bad), "finite")
    expect(lambda: call(x, bad.nan_to_num(math.inf)), "finite")
    expect(lambda: call(x, x[:2]), "(3,)", "(2,)")
    expect(lambda: call(x, x[:, None]), "(3, 1)")
    expect(lambda: call(x[:0], x[:0]), "at least one example")
