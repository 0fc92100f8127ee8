"""Scores against numpy, scikit-learn, scipy and plain loops; batch by batch they are those of all batches at once."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from networks import CASES
from scipy import stats
from sklearn import metrics
from torch import Tensor, nn
from training_cases import expect

import leanbayes as lb
from leanbayes.evaluation import Scores, evaluate

BINS = 15


def class_prediction(probs: Tensor, class_dim: int = 1) -> lb.ClassPrediction:
    """The mean of two draws that lie around `probs`."""
    other = probs.roll(1, class_dim)
    draws = torch.stack([0.7 * probs + 0.3 * other, 0.9 * probs + 0.1 * other])
    expected = torch.special.entr(draws).sum(class_dim + 1).mean(0)
    return lb.ClassPrediction(2, None, draws.mean(0), expected, class_dim)


def random_probs(*shape: int, class_dim: int = 1, sharp: float = 3.0) -> Tensor:
    return (sharp * torch.randn(*shape)).softmax(class_dim)


def some_labels(probs: Tensor) -> Tensor:
    """Labels that are right about half of the time."""
    right = torch.rand(len(probs)) < 0.5
    return torch.where(right, probs.argmax(1), torch.randint(probs.shape[1], (len(probs),)))


def plain_ece(probs: np.ndarray, y: np.ndarray) -> float:
    """Guo et al. 2017: |accuracy - confidence| of 15 bins of equal width, weighted by their share of the examples."""
    confidence, right = probs.max(1), probs.argmax(1) == y
    total = 0.0
    for number in range(BINS):
        low, high = number / BINS, (number + 1) / BINS
        inside = [i for i, c in enumerate(confidence) if low < c <= high]
        if inside:
            total += len(inside) / len(y) * abs(right[inside].mean() - confidence[inside].mean())
    return total


def take_in(scores: Scores, prediction: lb.ClassPrediction, y: Tensor, sizes: list[int]) -> dict[str, float]:
    """Score batch by batch."""
    parts = zip(prediction.probs.split(sizes), prediction.expected_entropy.split(sizes), y.split(sizes), strict=True)
    for probs, expected, labels in parts:
        scores.update(lb.ClassPrediction(2, None, probs, expected, prediction.class_dim), labels)
    return scores.compute()


# -- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[200], [1, 120, 79]])
def test_scores_of_classes_are_those_of_other_libraries(sizes: list[int]) -> None:
    prediction = class_prediction(random_probs(200, 5))
    y = some_labels(prediction.probs)
    found = take_in(Scores(), prediction, y, sizes)
    p, labels = prediction.probs.double().numpy(), y.numpy()
    p /= p.sum(1, keepdims=True)  # scikit-learn minds the last digits
    right = p.argmax(1) == labels
    entropy = stats.entropy(p, axis=1)
    expected = {
        "accuracy": metrics.accuracy_score(labels, p.argmax(1)),
        "nll": metrics.log_loss(labels, p, labels=range(5)),
        "ece": plain_ece(p, labels),
        "brier": np.mean([sum((p[i, c] - (c == labels[i])) ** 2 for c in range(5)) for i in range(200)]),
        "entropy": entropy.mean(),
        "entropy_right": entropy[right].mean(),
        "entropy_wrong": entropy[~right].mean(),
        "mutual_information": (entropy - prediction.expected_entropy.numpy()).mean(),
    }
    assert 0.2 < expected["accuracy"] < 0.9
    assert found == pytest.approx(expected, rel=1e-4)


def test_dense_scores_leave_ignored_pixels_out() -> None:
    prediction = class_prediction(random_probs(6, 4, 5, 7))
    prediction.probs[:, 3] = 0  # a class that is neither predicted nor there does not count for the mean IoU
    y = torch.where(torch.rand(6, 5, 7) < 0.6, prediction.probs.argmax(1), torch.randint(3, (6, 5, 7)))
    y[:, 0] = 255
    y[2] = 255  # an image, and in one run a whole batch, without a label
    found = take_in(Scores(ignore_index=255), prediction, y, [2, 1, 3])
    counted = (y != 255).numpy()
    p, labels = prediction.probs.movedim(1, -1).double().numpy()[counted], y.numpy()[counted]
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, p.argmax(1)), rel=1e-5)
    assert found["miou"] == pytest.approx(metrics.jaccard_score(labels, p.argmax(1), average="macro"), rel=1e-5)
    chosen = np.maximum(p[np.arange(len(labels)), labels], np.finfo(np.float32).tiny)
    assert found["nll"] == pytest.approx(-np.log(chosen).mean(), rel=1e-4)
    assert found["ece"] == pytest.approx(plain_ece(p, labels), rel=1e-4)
    assert found["entropy"] == pytest.approx(prediction.entropy.numpy()[counted].mean(), rel=1e-5)
    # What is predicted where there is no label changes nothing.
    prediction.probs[(y == 255)[:, None].expand(-1, 4, -1, -1)] = 0.25
    assert take_in(Scores(ignore_index=255), prediction, y, [6]) == pytest.approx(found, rel=1e-5)


def test_the_classes_may_lie_in_the_last_dimension() -> None:
    probs = random_probs(8, 6, 4, class_dim=2)
    y = torch.randint(4, (8, 6))
    last = take_in(Scores(), class_prediction(probs, 2), y, [8])
    middle = take_in(Scores(), class_prediction(probs.movedim(2, 1)), y, [8])
    assert last == pytest.approx(middle)


def test_what_has_no_examples_is_nan() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    for y, there, missing in (([0, 1], "entropy_right", "entropy_wrong"), ([1, 0], "entropy_wrong", "entropy_right")):
        found = take_in(Scores(), class_prediction(probs), torch.tensor(y), [2])
        assert math.isnan(found[missing])
        assert found[there] == pytest.approx(found["entropy"])
        assert found["accuracy"] == (1 if there == "entropy_right" else 0)


def test_a_certain_wrong_answer_has_a_finite_nll() -> None:
    prediction = lb.ClassPrediction(1, None, torch.tensor([[1.0, 0.0]]), torch.zeros(1), 1)
    found = take_in(Scores(), prediction, torch.tensor([1]), [1])
    assert found["nll"] == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
    assert found["brier"] == pytest.approx(2)
    assert found["ece"] == pytest.approx(1)


def test_complete_confidence_shares_the_last_bin() -> None:
    confidence = torch.tensor([1.0, 1.0, 0.96, 0.96])
    probs = torch.stack([confidence, 1 - confidence], 1)
    y = torch.tensor([0, 1, 0, 0])
    prediction = lb.ClassPrediction(1, None, probs, torch.zeros(4), 1)
    assert take_in(Scores(), prediction, y, [4])["ece"] == pytest.approx(plain_ece(probs.numpy(), y.numpy()), abs=1e-6)


def test_nothing_to_score_is_said() -> None:
    expect(lambda: Scores().compute(), "nothing to score")
    scores = Scores()
    scores.update(class_prediction(random_probs(3, 2)), torch.full((3,), -100))
    expect(scores.compute, "nothing to score")


# -- yes or no --------------------------------------------------------------------------------------------------------


def test_scores_of_yes_and_no() -> None:
    probs = torch.rand(60, 3)
    y = (torch.rand(60, 3) < probs).float()
    prediction = lb.BinaryPrediction(1, None, probs, torch.zeros(60, 3))
    scores = Scores()
    for part in (slice(0, 7), slice(7, 60)):
        scores.update(lb.BinaryPrediction(1, None, probs[part], prediction.expected_entropy[part]), y[part])
    found = scores.compute()
    p, truth = probs.double().numpy().ravel(), y.numpy().ravel()
    entropy = stats.entropy(np.stack([p, 1 - p]), axis=0)
    expected = {
        "accuracy": metrics.accuracy_score(truth, p >= 0.5),
        "nll": metrics.log_loss(truth, p),
        "brier": metrics.brier_score_loss(truth, p),
        "entropy": entropy.mean(),
        "mutual_information": entropy.mean(),
    }
    assert found == pytest.approx(expected, rel=1e-4)


# -- regression -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [(), (2.5, 0.1)])
def test_scores_of_regression_are_in_the_unit_of_the_targets(scale: tuple[float, ...]) -> None:
    mean, y = torch.randn(50, 2), torch.randn(50, 2)
    noise, doubt = torch.rand(50, 2) + 0.1, torch.rand(50, 2)
    scores = Scores(target_scale=scale)
    for part in (slice(0, 1), slice(1, 50)):
        scores.update(lb.RegressionPrediction(2, None, mean[part], noise[part], doubt[part]), y[part])
    found = scores.compute()
    unit = np.array(scale or (1.0, 1.0))
    m, t = mean.double().numpy() * unit, y.double().numpy() * unit
    std = np.sqrt((noise + doubt).double().numpy()) * unit
    expected = {
        "rmse": np.sqrt(metrics.mean_squared_error(t, m)),
        "nll": -stats.norm.logpdf(t, m, std).mean(),
        "std": std.mean(),
        "epistemic_std": (doubt.double().sqrt().numpy() * unit).mean(),
    }
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("likelihood", [lb.Gaussian(), lb.Bernoulli()])
def test_targets_of_another_shape_are_refused(likelihood: lb.Gaussian | lb.Bernoulli) -> None:
    bnn = lb.bayesianize(nn.Linear(6, 1), lb.Deterministic(), likelihood=likelihood)
    expect(lambda: evaluate(bnn, [(torch.randn(5, 6), torch.rand(5))]), "shape")


# -- of a model -------------------------------------------------------------------------------------------------------


def batches(sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    yield from zip(x.split(sizes), y.split(sizes), strict=True)


@pytest.mark.parametrize("method", [lb.MeanField(), lb.Deterministic(), lb.Ensemble(3)])
def test_a_model_is_scored_the_same_in_any_cut_of_the_data(method: lb.Method) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    whole = evaluate(bnn, batches([40]))
    assert evaluate(bnn, batches([7, 1, 32])) == pytest.approx(whole, rel=1e-4)
    x, y = next(batches([40]))
    prediction = bnn.predict(x, generator=torch.Generator().manual_seed(0))
    assert whole["accuracy"] == pytest.approx((prediction.label == y).float().mean().item())


def test_samples_seed_and_rule_are_those_of_the_prediction() -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), lb.MeanField(init_std=1.0))
    first = evaluate(bnn, batches([40]), samples=2)
    assert evaluate(bnn, batches([40]), samples=2) == first
    assert evaluate(bnn, batches([40]), samples=2, seed=1) != first
    assert evaluate(bnn, batches([40]), samples=3) != first
    assert evaluate(bnn, batches([40]), rule="mean")["mutual_information"] == pytest.approx(0, abs=1e-6)


def test_scoring_leaves_the_noise_and_the_mode_of_a_model_alone() -> None:
    bnn = lb.bayesianize(CASES["cnn"].build(), lb.MeanField()).train()
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    evaluate(bnn, [(CASES["cnn"].example(), torch.zeros(4, dtype=torch.long))])
    assert bnn.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())


@pytest.mark.parametrize("method", [lb.MeanField(rule="flipout", init_std=1.0), lb.MCDropout(0.5)])
def test_every_batch_has_noise_of_its_own_where_every_example_has(method: lb.Method) -> None:
    bnn = lb.bayesianize(CASES["mlp"].build(), method)
    batch = next(batches([40]))
    assert evaluate(bnn, [batch, batch], samples=2)["nll"] != pytest.approx(
        evaluate(bnn, [batch], samples=2)["nll"], rel=1e-5
    )


def test_a_binary_model_and_a_regression_are_scored_by_their_likelihood() -> None:
    x, y = torch.randn(20, 6), torch.rand(20, 1).round()
    network = nn.Linear(6, 1)
    probs = network(x).sigmoid().detach().numpy()
    found = evaluate(lb.bayesianize(network, lb.Deterministic(), likelihood=lb.Bernoulli()), [(x, y)])
    assert found["nll"] == pytest.approx(metrics.log_loss(y.numpy(), probs), rel=1e-5)
    gaussian = lb.bayesianize(network, lb.Deterministic(), likelihood=lb.Gaussian(0.3))
    found = evaluate(gaussian, [(x, y)], target_scale=[2.0])
    error = 2 * (y - network(x)).detach().numpy()
    assert found["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert found["nll"] == pytest.approx(-stats.norm.logpdf(error, 0, 0.6).mean(), rel=1e-5)
