"""What a prediction prints in a notebook: the first rows, not whole tensors."""

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.likelihoods import Likelihood


def predicted(likelihood: Likelihood, examples: int, outputs: int = 3) -> str:
    bnn = lb.bayesianize(nn.Linear(4, outputs), lb.MeanField(init_std=0.5), likelihood=likelihood)
    return repr(bnn.predict(torch.randn(examples, 4), samples=7))


def test_a_class_prediction_prints_labels_probabilities_and_uncertainty() -> None:
    bnn = lb.bayesianize(nn.Linear(4, 3), lb.MeanField(init_std=0.5))
    prediction = bnn.predict(torch.randn(8, 4), samples=7)
    title, header, *rows = repr(prediction).splitlines()
    assert title == "ClassPrediction: 8 examples, 3 classes, 7 samples"
    assert header.split() == ["label", "probability", "entropy", "epistemic"]
    assert rows[-1] == "... and 3 more"
    for row, shown in enumerate(rows[:-1]):
        label, probability, entropy, epistemic = map(float, shown.split())
        assert label == prediction.label[row]
        assert probability == pytest.approx(prediction.confidence[row].item(), rel=1e-3)
        assert entropy == pytest.approx(prediction.entropy[row].item(), rel=1e-3)
        assert epistemic == pytest.approx(prediction.mutual_information[row].item(), rel=1e-3, abs=1e-6)


def test_few_examples_are_all_printed() -> None:
    lines = predicted(lb.Gaussian(0.5), 2, outputs=1).splitlines()
    assert lines[0] == "RegressionPrediction: 2 examples, real outputs, 7 samples"
    assert lines[1].split() == ["mean", "std", "aleatoric", "std", "epistemic", "std"]
    assert len(lines) == 4
    assert all(float(line.split()[2]) == 0.5 for line in lines[2:])


def test_several_outputs_per_example_are_averaged() -> None:
    lines = predicted(lb.Bernoulli(), 6).splitlines()
    assert "(3,) outputs per example (means below)" in lines[0]
    assert lines[1].split() == ["probability", "entropy", "epistemic"]


def test_dense_and_one_pass_predictions_print_a_few_lines() -> None:
    bnn = lb.bayesianize(nn.Conv2d(1, 4, 3), lb.MeanField())
    x = torch.randn(3, 1, 9, 9)
    for rule, passes in (("sample", "30 samples"), ("moments", "one pass")):
        lines = repr(bnn.predict(x, rule=rule)).splitlines()
        assert lines[0].startswith("ClassPrediction: 3 examples, 4 classes")
        assert passes in lines[0]
        assert "label" not in lines[1]
        assert len(lines) == 5
