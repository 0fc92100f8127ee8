"""Type checkers know what `predict` returns: mypy checks these assertions, and they hold at run time too."""

from typing import Any, assert_type

import torch
from torch import nn

import leanbayes as lb

X = torch.randn(2, 3)


def test_the_default_likelihood_predicts_classes() -> None:
    prediction = lb.bayesianize(nn.Linear(3, 2), lb.MeanField()).predict(X)
    assert_type(prediction, lb.ClassPrediction)
    assert isinstance(prediction, lb.ClassPrediction)


def test_a_likelihood_decides_the_kind_of_prediction() -> None:
    real = lb.bayesianize(nn.Linear(3, 2), lb.MeanField(), likelihood=lb.Gaussian()).predict(X)
    assert_type(real, lb.RegressionPrediction)
    assert isinstance(real, lb.RegressionPrediction)
    tags = lb.bayesianize(nn.Linear(3, 2), lb.MeanField(), likelihood=lb.Bernoulli()).predict(X)
    assert_type(tags, lb.BinaryPrediction)
    assert isinstance(tags, lb.BinaryPrediction)


def test_a_bayesian_model_passes_its_kind_of_prediction_on() -> None:
    first = lb.bayesianize(nn.Linear(3, 2), lb.MeanField(), likelihood=lb.Gaussian())
    second = lb.bayesianize(first, lb.SSVI(0.5))
    assert_type(second, lb.BayesianModel[lb.RegressionPrediction])
    assert isinstance(second.predict(X), lb.RegressionPrediction)


def test_a_model_of_any_likelihood_needs_no_parameter() -> None:
    def predict(bnn: lb.BayesianModel) -> Any:
        return bnn.predict(X)

    assert isinstance(predict(lb.bayesianize(nn.Linear(3, 2), lb.MeanField())), lb.ClassPrediction)
