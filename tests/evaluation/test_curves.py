"""Curves behind the scores agree with numpy and plain loops."""

import math

import numpy as np
import pytest
import torch
from evaluation_cases import class_prediction, random_probs, scored, some_labels
from hypothesis import given
from hypothesis import strategies as st

import leanbayes as lb
from leanbayes.evaluation import Scores
from leanbayes.evaluation.calibration_error import bin_sums
from leanbayes.evaluation.curves import curves_of, entropy_edges, histogram, mistakes_of


def scores_of(examples: int, classes: int = 5) -> tuple[Scores, lb.ClassPrediction, torch.Tensor]:
    prediction = class_prediction(random_probs(examples, classes))
    y = some_labels(prediction.probs)
    scores = Scores(details=True)
    scored(scores, prediction, y, [examples // 2, examples - examples // 2])
    return scores, prediction, y


def test_reliability_has_the_bins_of_predictions_and_of_each_class() -> None:
    scores, prediction, y = scores_of(300)
    curves = curves_of(scores)
    p = prediction.probs.double().numpy()
    for bins, confidence, hit in [
        (curves["reliability"], p.max(1), (prediction.label == y).numpy()),
        *((curves["class_reliability"][k], p[:, k], (y == k).numpy()) for k in range(5)),
    ]:
        places = np.clip(np.ceil(confidence * 15).astype(int) - 1, 0, 14)
        for row, values in enumerate((confidence, hit, np.ones(300))):
            assert bins[row] == pytest.approx(np.bincount(places, values, 15), abs=1e-6)


@pytest.mark.parametrize("examples", [2, 60, 400])
def test_risk_over_coverage_has_both_ends_and_at_most_101_points_of_the_true_curve(examples: int) -> None:
    scores, prediction, y = scores_of(examples)
    coverage, risk = curves_of(scores)["risk_coverage"]
    assert len(coverage) == len(risk) == min(examples, 101)
    order = np.argsort(-prediction.confidence.numpy())
    wrong = (prediction.label != y).numpy()[order]
    for share, found in zip(coverage, risk, strict=True):
        answered = round(share * examples)
        assert share == pytest.approx(answered / examples)
        assert found == pytest.approx(wrong[:answered].mean())
    assert (coverage[0], coverage[-1]) == (1 / examples, 1)
    assert np.diff(coverage).max() <= 1 / min(examples, 100) + 1 / examples
    assert np.diff(coverage).min() > 0


def test_entropies_of_correct_and_wrong_predictions_are_counted_separately() -> None:
    scores, prediction, y = scores_of(200)
    curves = curves_of(scores)
    edges = np.linspace(0, math.log(5), 31)
    assert curves["entropy_edges"] == pytest.approx(edges)
    right, entropy = (prediction.label == y).numpy(), prediction.entropy.double().numpy()
    for name, chosen in (("right", right), ("wrong", ~right)):
        assert curves[f"entropy_{name}"] == np.histogram(entropy[chosen], edges)[0].tolist()
    assert sum(curves["entropy_right"]) + sum(curves["entropy_wrong"]) == 200


@given(st.lists(st.floats(-0.5, 3), max_size=40), st.integers(2, 12))
def test_every_value_is_in_one_bin_of_a_histogram(values: list[float], classes: int) -> None:
    edges = entropy_edges(classes)
    found = histogram(torch.tensor(values, dtype=torch.float64), edges)
    inside = np.clip(values, 0, edges[-1].item())
    assert found == np.histogram(inside, edges.numpy())[0].tolist()


def test_a_value_on_an_edge_is_in_the_bin_above_it() -> None:
    edges = entropy_edges(10)
    assert histogram(edges[:-1], edges) == [1] * 30
    assert histogram(edges[-2:], edges) == [*[0] * 29, 2]  # the last has no bin above it


def test_uniform_predictions_are_in_the_last_bin_and_certain_ones_in_the_first() -> None:
    for classes in (2, 10, 1000):
        guess = torch.full((1, classes), 1 / classes)
        certain = torch.zeros(1, classes)
        certain[0, 0] = 1
        entropy = lb.ClassPrediction(1, None, torch.cat([guess, certain]), torch.zeros(2), 1).entropy
        assert histogram(entropy, entropy_edges(classes)) == [1, *[0] * 28, 1]


def test_without_details_there_are_only_the_bins_of_predictions() -> None:
    prediction = class_prediction(random_probs(20, 3))
    scores = Scores()
    scored(scores, prediction, some_labels(prediction.probs))
    assert curves_of(scores).keys() == {"reliability"}


def test_binary_outputs_have_the_reliability_of_the_positive_class() -> None:
    probs = torch.rand(20, 2)
    scores = Scores(details=True)
    scored(scores, lb.BinaryPrediction(1, None, probs, torch.zeros(20, 2)), probs.round())
    assert curves_of(scores) == {"reliability": bin_sums(probs, probs.round()).tolist()}


def test_equal_examples_keep_their_order() -> None:
    probs = torch.tensor([[0.9, 0.1]]).repeat(30, 1)
    y = torch.tensor([0, 1] * 15)
    scores = Scores(details=True)
    scored(scores, lb.ClassPrediction(1, None, probs, torch.zeros(30), 1), y)
    labeled = torch.ones(31, dtype=torch.bool)
    labeled[0] = False
    found = mistakes_of(scores.outcome(), labeled)
    assert found["index"] == [*range(2, 31, 2)]
    assert {*zip(found["truth"], found["answer"], strict=True)} == {(1, 0)}


def test_a_perfect_model_has_no_mistakes() -> None:
    probs = torch.eye(4)
    scores = Scores(details=True)
    scored(scores, lb.ClassPrediction(1, None, probs, torch.zeros(4), 1), torch.arange(4))
    found = mistakes_of(scores.outcome(), torch.ones(4, dtype=torch.bool))
    assert found == {"index": [], "truth": [], "answer": [], "confidence": []}
    assert sum(curves_of(scores)["entropy_wrong"]) == 0
