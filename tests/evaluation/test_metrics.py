"""Every metric of METRICS agrees with scikit-learn, scipy, torchmetrics or plain loops."""

import math

import numpy as np
import pytest
import torch
from evaluation_cases import class_prediction, random_probs, scored, some_labels
from scipy import integrate, stats
from sklearn import metrics
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_accuracy,
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_jaccard_index,
)
from training_cases import expect

import leanbayes as lb
from leanbayes.evaluation import METRICS, Scores, mean
from leanbayes.evaluation.curves import curves_of
from leanbayes.evaluation.outcomes import BinaryOutcome, ClassOutcome, Outcome, RegressionOutcome

BINS = 15
TINY = float(np.finfo(np.float32).tiny)


def names(kind: type[Outcome], details: bool) -> set[str]:
    return {m.name for m in METRICS[kind] if details or getattr(m, "basic", False)}


def plain_ece(confidence: np.ndarray, right: np.ndarray) -> float:
    """Guo et al. 2017: |accuracy - confidence| of 15 bins of equal width, weighted by their share of the examples."""
    total = 0.0
    for number in range(BINS):
        low, high = number / BINS, (number + 1) / BINS
        inside = [i for i, c in enumerate(confidence) if low < c <= high or (c == 0 and number == 0)]
        if inside:
            total += len(inside) / len(right) * abs(right[inside].mean() - confidence[inside].mean())
    return total


def plain_aurc(order: np.ndarray, wrong: np.ndarray) -> float:
    ordered = wrong[np.argsort(order)]
    return float(np.mean([ordered[: k + 1].mean() for k in range(len(ordered))]))


def plain_debiased(p: np.ndarray, y: np.ndarray) -> float:
    squares = []
    for k in range(p.shape[1]):
        total = 0.0
        for part in np.array_split(np.argsort(p[:, k]), BINS):
            rate = (y[part] == k).mean()
            bias = rate * (1 - rate) / (len(part) - 1)
            total += len(part) / len(y) * ((p[part, k].mean() - rate) ** 2 - bias)
        squares.append(max(total, 0.0))
    return math.sqrt(np.mean(squares))


# -- classes ----------------------------------------------------------------------------------------------------------


def test_every_score_of_classes() -> None:
    prediction = class_prediction(random_probs(301, 7, sharp=2.0))
    y = some_labels(prediction.probs)
    found = scored(Scores(details=True), prediction, y)
    p, labels = prediction.probs.double().numpy(), y.numpy()
    p /= p.sum(1, keepdims=True)  # scikit-learn checks the sum
    confidence, right = p.max(1), p.argmax(1) == labels
    wrong, entropy = (~right).astype(float), stats.entropy(p, axis=1)
    gaps = [abs(right[b].mean() - confidence[b].mean()) * len(b) for b in np.array_split(np.argsort(confidence), BINS)]
    risks = np.cumsum(wrong[np.argsort(-confidence)]) / np.arange(1, 302)
    expected = {
        "accuracy": multiclass_accuracy(prediction.probs, y, 7, average="micro").item(),
        "top5": metrics.top_k_accuracy_score(labels, p, k=5, labels=range(7)),
        "nll": metrics.log_loss(labels, p, labels=range(7)),
        "brier": np.mean([sum((p[i, c] - (c == labels[i])) ** 2 for c in range(7)) for i in range(301)]),
        "ece": multiclass_calibration_error(prediction.probs, y, 7, n_bins=BINS, norm="l1").item(),
        "classwise_ece": np.mean([plain_ece(p[:, k], labels == k) for k in range(7)]),
        "adaptive_ece": sum(gaps) / 301,
        "debiased_classwise_error": plain_debiased(p, labels),
        "aurc": plain_aurc(-confidence, wrong),
        "excess_aurc": plain_aurc(-confidence, wrong) - plain_aurc(wrong, wrong),
        "coverage_at_1_percent": max([k + 1 for k in range(301) if risks[k] <= 0.01], default=0) / 301,
        "error_at_90": wrong[np.argsort(-confidence)][:271].mean(),  # ⌈0.9·301⌉
        "entropy": entropy.mean(),
        "entropy_right": entropy[right].mean(),
        "entropy_wrong": entropy[~right].mean(),
        "mutual_information": (entropy - prediction.expected_entropy.numpy()).mean(),
    }
    assert expected.keys() | {"miou"} == names(ClassOutcome, details=True)
    assert expected["coverage_at_1_percent"] > 0
    assert 0.2 < expected["accuracy"] < expected["top5"] < 1
    assert found == pytest.approx(expected, rel=1e-4)
    basic = scored(Scores(), prediction, y)
    assert basic == {name: found[name] for name in expected if name in names(ClassOutcome, details=False)}


def test_a_tie_with_the_true_class_counts_against_it_in_the_top_five() -> None:
    probs = torch.tensor([[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]]).repeat(3, 1)
    prediction = lb.ClassPrediction(1, None, probs, torch.zeros(3), 1)
    assert scored(Scores(), prediction, torch.tensor([0, 1, 2]))["top5"] == pytest.approx(2 / 3)
    probs = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2, 0.0]])
    prediction = lb.ClassPrediction(1, None, probs, torch.zeros(1), 1)
    for label in range(6):
        assert scored(Scores(), prediction, torch.tensor([label]))["top5"] == (label < 5)


@pytest.mark.parametrize(("classes", "there"), [(2, False), (5, False), (6, True)])
def test_top5_needs_more_than_five_classes(classes: int, there: bool) -> None:
    prediction = class_prediction(random_probs(20, classes))
    assert ("top5" in scored(Scores(), prediction, some_labels(prediction.probs))) == there


def test_a_class_may_be_missing() -> None:
    prediction = class_prediction(random_probs(60, 4))
    y = torch.randint(3, (60,))
    found = scored(Scores(details=True), prediction, y)
    p = prediction.probs.double().numpy()
    assert found["classwise_ece"] == pytest.approx(np.mean([plain_ece(p[:, k], y.numpy() == k) for k in range(4)]))
    assert found["debiased_classwise_error"] == pytest.approx(plain_debiased(p, y.numpy()), rel=1e-5)
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_probabilities_of_0_and_1_have_finite_scores(dtype: torch.dtype) -> None:
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype)
    prediction = lb.ClassPrediction(1, None, probs, torch.zeros(2, dtype=dtype), 1)
    found = scored(Scores(details=True), prediction, torch.tensor([1, 0]))
    assert found["nll"] == pytest.approx(-math.log(TINY) / 2, rel=1e-6)
    assert found["brier"] == pytest.approx(1)
    assert found["ece"] == found["adaptive_ece"] == pytest.approx(0.5)
    assert found["entropy"] == found["mutual_information"] == 0
    yes = lb.BinaryPrediction(1, None, probs, torch.zeros(2, 2, dtype=dtype))
    found = scored(Scores(details=True), yes, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert found["nll"] == pytest.approx(-math.log(TINY) / 2, rel=1e-6)
    assert found["brier"] == found["accuracy"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_scores_of_its_probabilities(dtype: torch.dtype) -> None:
    halves = class_prediction(random_probs(80, 6)).probs.to(dtype)
    y, epistemic = some_labels(halves.float()), torch.zeros(80)
    expected = scored(Scores(details=True), lb.ClassPrediction(1, None, halves.double(), epistemic, 1), y)
    found = scored(Scores(details=True), lb.ClassPrediction(1, None, halves, epistemic, 1), y)
    for name in ("accuracy", "top5", "nll", "brier", "aurc"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found == pytest.approx(expected, rel=2e-2, abs=1e-2)  # entropies are computed in half precision


def test_a_single_example_has_every_score() -> None:
    prediction = class_prediction(torch.tensor([[0.6, 0.3, 0.05, 0.03, 0.01, 0.01]]))
    confidence = prediction.confidence.item()
    found = scored(Scores(details=True), prediction, torch.tensor([0]))
    assert found.keys() == names(ClassOutcome, details=True) - {"miou"}
    assert math.isnan(found.pop("entropy_wrong"))
    assert found["accuracy"] == found["top5"] == found["coverage_at_1_percent"] == 1
    assert found["ece"] == found["adaptive_ece"] == pytest.approx(1 - confidence)
    assert found["aurc"] == found["excess_aurc"] == found["debiased_classwise_error"] == 0
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize("labels", [[0, 3], [0, -1], [0.0, 1.0], [0, 1.5]])
def test_invalid_labels_raise_errors(labels: list[float]) -> None:
    expect(lambda: Scores().update(class_prediction(random_probs(2, 3)), torch.tensor(labels)), "Labels", "0 to 2")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int16])
def test_labels_may_be_integers_of_any_size(dtype: torch.dtype) -> None:
    prediction = class_prediction(random_probs(200, 170))
    y = torch.randint(170 if dtype == torch.uint8 else 100, (200,))
    y[:5] = 156  # which is -100 in a signed byte
    assert scored(Scores(), prediction, y.to(dtype)) == scored(Scores(), prediction, y)


# -- dense ------------------------------------------------------------------------------------------------------------


def test_every_score_of_dense_classes() -> None:
    prediction = class_prediction(random_probs(6, 4, 5, 7))
    prediction.probs[:, 3] = 0  # neither predicted nor true
    y = torch.where(torch.rand(6, 5, 7) < 0.6, prediction.probs.argmax(1), torch.randint(3, (6, 5, 7)))
    y[:, 0] = 255
    y[2] = 255  # an image without a label
    scores = Scores(ignore_index=255, details=True)
    found = scored(scores, prediction, y, [2, 1, 3])
    counted = (y != 255).numpy()
    p, labels = prediction.probs.movedim(1, -1).double().numpy()[counted], y.numpy()[counted]
    answer, confidence = p.argmax(1), p.max(1)
    right = answer == labels
    chosen = np.maximum(p[np.arange(len(labels)), labels], TINY)
    entropy = prediction.entropy.double().numpy()[counted]
    expected = {
        "accuracy": metrics.accuracy_score(labels, answer),
        "miou": metrics.jaccard_score(labels, answer, average="macro"),
        "nll": -np.log(chosen).mean(),
        "brier": ((p - np.eye(4)[labels]) ** 2).sum(1).mean(),
        "ece": plain_ece(confidence, right),
        "classwise_ece": np.mean([plain_ece(p[:, k], labels == k) for k in range(4)]),
        "entropy": entropy.mean(),
        "entropy_right": entropy[right].mean(),
        "entropy_wrong": entropy[~right].mean(),
        "mutual_information": prediction.mutual_information.double().numpy()[counted].mean(),
    }
    assert found == pytest.approx(expected, rel=1e-4)
    by_class = metrics.jaccard_score(labels, answer, average=None)
    assert curves_of(scores)["iou"] == pytest.approx([*by_class, math.nan], nan_ok=True)
    other = multiclass_jaccard_index(prediction.probs, y, 4, average="none", ignore_index=255)
    assert other[:3].numpy() == pytest.approx(by_class, rel=1e-5)
    assert scored(Scores(ignore_index=255, details=True), prediction, y) == pytest.approx(found, rel=1e-6)
    # Predictions of pixels without a label do not matter.
    prediction.probs[(y == 255)[:, None].expand(-1, 4, -1, -1)] = 0.25
    assert scored(Scores(ignore_index=255, details=True), prediction, y) == pytest.approx(found, rel=1e-5)


def test_dense_predictions_keep_no_examples() -> None:
    prediction = class_prediction(random_probs(4, 3, 6, 6))
    scores = Scores(details=True)
    sizes = []
    for _ in range(3):
        scores.update(prediction, some_labels(prediction.probs))
        sizes.append(sum(sums.nbytes for sums in scores._state.sums.values()))
    assert scores.outcome() is None
    assert sizes[0] == sizes[1] == sizes[2]
    curves = curves_of(scores)
    assert curves.keys() == {"reliability", "class_reliability", "iou"}
    assert np.sum(curves["reliability"][2]) == 3 * 4 * 36


def test_a_mean_metric_of_a_scalar_raises_an_error() -> None:
    prediction = lb.ClassPrediction(1, None, torch.rand(8, 3).softmax(1), torch.zeros(8), 1)
    scores = Scores(metrics=[mean("m", lambda o: o.right.float().mean())])
    expect(lambda: scores.update(prediction, torch.zeros(8, dtype=torch.long)), "one value per example")


# -- binary -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("details", [False, True])
def test_every_score_of_binary_outputs(details: bool) -> None:
    probs, expected_entropy = torch.rand(60, 3), 0.1 * torch.rand(60, 3)
    y = (torch.rand(60, 3) < probs).float()
    found = scored(Scores(details=details), lb.BinaryPrediction(1, None, probs, expected_entropy), y, [7, 53])
    p, truth = probs.double().numpy().ravel(), y.numpy().ravel()
    entropy = stats.entropy(np.stack([p, 1 - p]), axis=0)
    cut = [
        np.array_split(np.argsort(p, kind="stable"), 15),
        [np.flatnonzero(np.ceil(p * 15) == b + 1) for b in range(15)],
    ]
    gaps = [sum(abs((truth[rows] - p[rows]).sum()) for rows in bins) / len(p) for bins in cut]
    wrong = ((p >= 0.5) != truth)[np.argsort(entropy)]
    expected = {
        "accuracy": binary_accuracy(probs, y).item(),
        "nll": metrics.log_loss(truth, p),
        "brier": metrics.brier_score_loss(truth, p),
        "ece": gaps[1],
        **({"adaptive_ece": gaps[0], "aurc": (wrong.cumsum() / np.arange(1, len(p) + 1)).mean()} if details else {}),
        "entropy": entropy.mean(),
        "mutual_information": np.maximum(entropy - expected_entropy.numpy().ravel(), 0).mean(),
    }
    assert expected.keys() == names(BinaryOutcome, details=details)
    assert found == pytest.approx(expected, rel=1e-4)


# -- regression -------------------------------------------------------------------------------------------------------


def numeric_crps(error: float, std: float) -> float:
    """∫ (F(t) - [t ≥ error])² dt, on both sides of the step."""
    low = integrate.quad(lambda t: stats.norm.cdf(t, 0, std) ** 2, -12 * std - abs(error), error)[0]
    return low + integrate.quad(lambda t: stats.norm.sf(t, 0, std) ** 2, error, 12 * std + abs(error))[0]


@pytest.mark.parametrize("scale", [(), (2.5,), (2.5, 0.1)])
def test_every_score_of_a_regression_in_the_unit_of_the_targets(scale: tuple[float, ...]) -> None:
    mean, y = torch.randn(25, 2), torch.randn(25, 2)
    noise, epistemic = torch.rand(25, 2) + 0.1, torch.rand(25, 2)
    prediction = lb.RegressionPrediction(2, None, mean, noise, epistemic)
    scores = Scores(target_scale=scale, details=True)
    found = scored(scores, prediction, y, [1, 24])
    unit = np.array(scale or (1.0,))
    m, t = mean.double().numpy() * unit, y.double().numpy() * unit
    std = np.sqrt((noise + epistemic).double().numpy()) * unit
    levels = [0.05 * k for k in range(1, 20)]
    bounds = [stats.norm.interval(level, m, std) for level in levels]
    shares = [((low <= t) & (t <= high)).mean() for low, high in bounds]
    low, high = stats.norm.interval(0.95, m, std)
    expected = {
        "rmse": np.sqrt(metrics.mean_squared_error(t, m)),
        "nll": -stats.norm.logpdf(t, m, std).mean(),
        "crps": np.mean([numeric_crps(e, s) for e, s in zip((t - m).ravel(), std.ravel(), strict=True)]),
        "coverage_95": ((low <= t) & (t <= high)).mean(),
        "width_95": (high - low).mean(),
        "interval_error": np.mean(np.abs(np.array(shares) - levels)),
        "std": std.mean(),
        "epistemic_std": (epistemic.double().sqrt().numpy() * unit).mean(),
    }
    assert expected.keys() == names(RegressionOutcome, details=True)
    assert found == pytest.approx(expected, rel=1e-4)
    assert curves_of(scores)["intervals"] == pytest.approx(shares)
    basic = scored(Scores(target_scale=scale), prediction, y)
    assert basic == pytest.approx({name: found[name] for name in names(RegressionOutcome, details=False)})
    assert "interval_error" not in basic


def test_a_regression_with_zero_std_has_finite_scores() -> None:
    zeros = torch.zeros(2, 1)
    prediction = lb.RegressionPrediction(1, None, torch.tensor([[1.0], [2.0]]), zeros, zeros)
    found = scored(Scores(details=True), prediction, torch.tensor([[1.0], [2.5]]))
    assert found["nll"] == pytest.approx(0.5 * math.log(2 * math.pi * TINY) + 0.25 * 0.5**2 / TINY)
    assert all(map(math.isfinite, found.values()))
    assert found["crps"] == pytest.approx(0.25)
    assert found["coverage_95"] == 0.5


@pytest.mark.parametrize(("shape", "scale"), [((5, 1), (1.0, 2.0)), ((5, 3), (1.0, 2.0)), ((5,), (1.0,) * 5)])
def test_a_wrong_number_of_target_scales_raises_an_error(shape: tuple[int, ...], scale: tuple[float, ...]) -> None:
    part = torch.rand(shape)
    prediction = lb.RegressionPrediction(1, None, part, part, part)
    expect(lambda: Scores(target_scale=scale).update(prediction, part), "target_scale", str(len(scale)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_regression_in_half_precision(dtype: torch.dtype) -> None:
    mean, noise, epistemic = (torch.rand(30, 2).to(dtype) + 0.1 for _ in range(3))
    y = torch.rand(30, 2)
    expected = scored(
        Scores(details=True), lb.RegressionPrediction(1, None, mean.double(), noise.double(), epistemic.double()), y
    )
    found = scored(Scores(details=True), lb.RegressionPrediction(1, None, mean, noise, epistemic), y)
    assert found["rmse"] == pytest.approx(expected["rmse"], rel=1e-5)
    assert found == pytest.approx(expected, rel=2e-2)


# -- bins -------------------------------------------------------------------------------------------------------------


def test_bins_of_batches_add_up() -> None:
    prediction = class_prediction(random_probs(50, 3))
    y = some_labels(prediction.probs)
    whole, cut = Scores(details=True), Scores(details=True)
    scored(whole, prediction, y)
    scored(cut, prediction, y, [5, 1, 44])
    for name in ("ece", "classwise_ece"):
        found, expected = cut.sums(name), whole.sums(name)
        assert isinstance(found, Tensor)
        assert isinstance(expected, Tensor)
        assert torch.equal(found[..., 2, :], expected[..., 2, :])
        torch.testing.assert_close(found, expected)
