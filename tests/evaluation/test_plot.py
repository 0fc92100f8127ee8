"""Plots: what is drawn equals numbers that are computed here with NumPy and SciPy."""

import sys
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm
from torch import Tensor

import leanbayes as lb

matplotlib.use("Agg")
from matplotlib import pyplot

CLASSES, EXAMPLES = 4, 300


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def classes(seed: int) -> tuple[lb.ClassPrediction, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    samples = (2 * torch.randn(6, EXAMPLES, CLASSES, generator=generator, dtype=torch.float64)).softmax(-1)
    probs = samples.mean(0)
    entropy = -(samples * samples.log()).sum(-1).mean(0)
    return lb.ClassPrediction(6, None, probs, entropy, 1), torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def regression() -> tuple[lb.RegressionPrediction, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(EXAMPLES, 1, generator=generator, dtype=torch.float64)
    prediction = lb.RegressionPrediction(4, None, mean, torch.full_like(mean, 0.1), 0.2 + mean.square())
    return prediction, mean + 1.3 * prediction.std * torch.randn(EXAMPLES, 1, generator=generator, dtype=torch.float64)


def lines(ax: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The drawn lines by the first word of their label."""
    found = {str(line.get_label()).partition(" ")[0]: line for line in ax.get_lines()}
    return {name: (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for name, line in found.items()}


def test_reliability_has_accuracy_by_confidence() -> None:
    first, y = classes(0)
    second, _ = classes(1)
    ax: Any = lb.plot.reliability({"one": first, "two": second}, y, bins=10)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    for number, prediction in enumerate((first, second)):
        probs = prediction.probs.numpy()
        confidence, right = probs.max(1), probs.argmax(1) == y.numpy()
        places = np.ceil(confidence * 10).astype(int) - 1
        bins = [place for place in range(10) if (places == place).sum() >= 5]
        expected = [(confidence[places == place].mean(), right[places == place].mean()) for place in bins]
        drawn = ax.containers[number]
        np.testing.assert_allclose(np.stack(drawn[0].get_data(), 1), expected)
        segments = drawn[2][0].get_segments()
        for place, segment in zip(bins, segments, strict=True):
            chosen = right[places == place]
            interval = binomtest(int(chosen.sum()), len(chosen)).proportion_ci(0.95, method="wilson")
            np.testing.assert_allclose(np.sort(segment[:, 1]), [interval.low, interval.high], atol=1e-9)
        areas = ax.collections[2 * number + 1].get_sizes()
        counts = [(places == place).sum() for place in bins]
        assert np.argmax(areas) == np.argmax(counts)
        ece = sum((places == p).mean() * abs(confidence[places == p].mean() - right[places == p].mean()) for p in bins)
        small = 1 - sum(counts) / EXAMPLES
        assert abs(float(texts[1 + number].partition("ECE ")[2].rstrip("%)")) / 100 - ece) <= small + 6e-4


def test_reliability_of_a_regression_has_the_coverage_of_intervals() -> None:
    prediction, y = regression()
    ax = lb.plot.reliability({"model": prediction}, y)
    levels, shares = lines(ax)["model"]
    distance = ((y - prediction.mean) / prediction.std).abs().numpy()
    np.testing.assert_allclose(levels, np.arange(1, 20) / 20)
    np.testing.assert_allclose(shares, [(distance <= norm.ppf((1 + level) / 2)).mean() for level in levels])
    assert ax.get_ylabel() == "targets inside"


@pytest.mark.parametrize("score", [None, "entropy"])
def test_risk_coverage_has_the_error_of_the_most_certain(score: str | None) -> None:
    prediction, y = classes(2)
    ax = lb.plot.risk_coverage({"model": prediction}, y, score=score)
    coverage, risk = lines(ax)["model"]
    probs = prediction.probs.numpy()
    unsure = -(probs * np.log(probs)).sum(1) if score else -probs.max(1)
    order = np.argsort(unsure)
    wrong = (probs.argmax(1) != y.numpy())[order]
    np.testing.assert_allclose(coverage, np.arange(1, EXAMPLES + 1) / EXAMPLES)
    np.testing.assert_allclose(risk, wrong.cumsum() / np.arange(1, EXAMPLES + 1))


def test_risk_coverage_of_a_regression_is_an_rmse() -> None:
    prediction, y = regression()
    _, risk = lines(lb.plot.risk_coverage({"model": prediction}, y))["model"]
    squares = (y - prediction.mean).square()[prediction.std[:, 0].argsort(), 0].numpy()
    np.testing.assert_allclose(risk, np.sqrt(squares.cumsum() / np.arange(1, EXAMPLES + 1)))


def test_entropy_has_a_histogram_of_each_group() -> None:
    prediction, y = classes(3)
    probs = prediction.probs.numpy()
    values, edges = -(probs * np.log(probs)).sum(1), np.linspace(0, np.log(CLASSES), 31)
    right = probs.argmax(1) == y.numpy()
    figure, given = pyplot.subplots()
    assert lb.plot.entropy({"a": prediction, "b": classes(4)[0]}, ax=given) is given
    patch: Any = given.patches[0]
    drawn = patch.get_data()
    np.testing.assert_allclose(drawn.values, np.histogram(values, edges)[0] / EXAMPLES)
    np.testing.assert_allclose(drawn.edges, edges)
    split: Any = lb.plot.entropy(prediction, y)
    for patch, group in zip(split.patches[::2], (right, ~right), strict=True):
        np.testing.assert_allclose(patch.get_data().values, np.histogram(values[group], edges)[0] / group.sum())
    assert [text.get_text() for text in split.get_legend().get_texts()] == [
        f"right ({right.sum()})",
        f"wrong ({(~right).sum()})",
    ]
    assert given.figure is figure


def test_yes_or_no_outputs_are_drawn() -> None:
    probs = torch.tensor([[0.9], [0.2], [0.6], [0.8]] * 10, dtype=torch.float64)
    y = torch.tensor([[1.0], [0.0], [0.0], [1.0]] * 10)
    prediction = lb.BinaryPrediction(2, None, probs, torch.zeros_like(probs))
    drawn = lb.plot.reliability(prediction, y).containers[0][0].get_data()
    np.testing.assert_allclose(drawn[0], [0.6, 0.8, 0.9])
    np.testing.assert_allclose(drawn[1], [0, 1, 1])
    assert lines(lb.plot.risk_coverage({"model": prediction}, y))["model"][1][-1] == 0.25
    lb.plot.entropy(prediction, y)


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction, y = classes(0)
    with pytest.raises(lb.LeanBayesError, match=r"what bnn\.predict returns, not Tensor"):
        lb.plot.reliability(prediction.probs, y)  # type: ignore[arg-type]
    with pytest.raises(lb.LeanBayesError, match="do not match"):
        lb.plot.risk_coverage(prediction, y[:5])
    with pytest.raises(lb.LeanBayesError, match="no entropy"):
        lb.plot.entropy(regression()[0])
    with pytest.raises(lb.LeanBayesError, match="nothing to draw"):
        lb.plot.entropy({})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot")
    with pytest.raises(lb.MissingPackageError, match=r"pip install '\.\[plot\]'"):
        lb.plot.entropy(prediction)
