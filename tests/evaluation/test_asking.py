"""When to ask a person: the threshold by a plain loop, and its effect on other data."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leanbayes.evaluation.asking import asking_of, confidence_threshold
from leanbayes.evaluation.outcomes import BinaryOutcome, ClassOutcome, RegressionOutcome


@given(
    st.lists(st.tuples(st.integers(5, 10), st.booleans()), min_size=1, max_size=25), st.sampled_from([0.0, 0.1, 0.3])
)
def test_the_threshold_answers_most_with_few_errors(drawn: list[tuple[int, bool]], risk: float) -> None:
    confidence = torch.tensor([value / 10 for value, _ in drawn])
    right = torch.tensor([is_right for _, is_right in drawn])
    threshold = confidence_threshold(confidence, right, risk)

    def errors(least: float) -> float:
        return (~right)[confidence.double() >= least].double().mean().item()

    allowed = [value for value in confidence.double().tolist() if errors(value) <= risk]
    if not allowed:
        assert threshold == math.inf
    elif min(allowed) == confidence.min():
        assert threshold == 0
    else:
        assert threshold == min(allowed)


def classes(confidence: list[float], right: list[bool]) -> ClassOutcome:
    first = torch.tensor(confidence)
    labels = torch.where(torch.tensor(right, dtype=torch.bool), 0, 1)
    return ClassOutcome(torch.stack([first, 1 - first], 1), labels, first, first)


def test_the_effect_is_that_on_the_test_data() -> None:
    held_out = classes([0.6, 0.7, 0.9, 0.95], [True, False, True, True])
    test = classes([0.55, 0.8, 0.9, 0.92, 0.99], [False, True, True, False, True])
    found = asking_of(held_out, test)
    assert found == pytest.approx({"threshold": 0.9, "asked": 0.4, "wrong": 1 / 3, "wrong_without": 0.4})
    assert asking_of(classes([0.9, 0.9], [False, True]), test) == pytest.approx({"asked": 1, "wrong_without": 0.4})
    assert asking_of(classes([0.9], [True]), test)["asked"] == 0


def test_of_a_regression_the_examples_with_the_largest_std_are_asked_for() -> None:
    std = torch.linspace(1, 2, 21)
    held_out = RegressionOutcome(torch.zeros(21), std, std)
    test = RegressionOutcome(torch.tensor([1.0, 3.0, 10.0]), torch.tensor([1.0, 1.89, 1.95]), torch.zeros(3))
    found = asking_of(held_out, test)
    assert found["threshold"] == pytest.approx(1.9)
    assert found["asked"] == pytest.approx(1 / 3)
    assert found["rmse"] == pytest.approx(math.sqrt(5))
    assert found["rmse_without"] == pytest.approx(math.sqrt(110 / 3))
    several = RegressionOutcome(torch.ones(2, 2), torch.tensor([[1.0, 1.95], [1.0, 1.0]]), torch.zeros(2, 2))
    assert asking_of(held_out, several)["asked"] == 0.5


def test_other_outcomes_have_no_threshold() -> None:
    assert asking_of(None, classes([0.9], [True])) == {}
    assert asking_of(classes([], []), classes([0.9], [True])) == {}
    assert asking_of(BinaryOutcome(*torch.rand(4, 3)), BinaryOutcome(*torch.rand(4, 3))) == {}
