"""Estimators for tables: the checks of scikit-learn, and their predictions compared with exact and other answers."""

import sys
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator

import leanbayes as lb

# Not run without further packages: check_array_api_input, and the checks that need pandas.
SKIPPED = {"check_array_api_input", "check_regressor_data_not_an_array", "check_classifier_data_not_an_array"}


@pytest.mark.filterwarnings("ignore")  # scikit-learn's own checks warn
@pytest.mark.parametrize("kind", ["BayesianRegressor", "BayesianClassifier"])
def test_the_checks_of_scikit_learn_pass(kind: str) -> None:
    results = check_estimator(getattr(lb.sklearn, kind)(steps=60, samples=10), on_fail="raise")
    assert {one["check_name"] for one in results if one["status"] != "passed"} <= SKIPPED
    assert sum(one["status"] == "passed" for one in results) > 45


def linear(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(3, 5, (count, 3))
    return x, 100 + x @ [20.0, -10, 0] + random.normal(0, 30, count)


def test_a_regression_predicts_mean_and_std_in_the_unit_of_the_target() -> None:
    x, y = linear()
    model = lb.sklearn.BayesianRegressor(hidden=(), steps=1000).fit(x, y)  # a linear model
    exact = BayesianRidge().fit(x, y)
    (mean, std), (wanted, noise) = (one.predict(x, return_std=True) for one in (model, exact))
    assert np.abs(mean - wanted).max() < 15
    assert np.abs(mean - wanted).mean() < 5
    np.testing.assert_allclose(std, noise, rtol=0.05)
    np.testing.assert_allclose(model.predict(x), mean)
    found = model.predict_distribution(x)
    np.testing.assert_allclose(found.std[:, 0], std)
    low, high = found.interval(0.9)
    inside = ((low[:, 0].numpy() <= y) & (y <= high[:, 0].numpy())).mean()
    assert 0.82 < inside < 0.97
    both = lb.sklearn.BayesianRegressor(steps=50).fit(x, np.stack([y, -y], 1)).predict(x, return_std=True)
    assert [part.shape for part in both] == [(200, 2), (200, 2)]


def test_classes_have_their_names_and_good_probabilities() -> None:
    data = load_breast_cancer()
    x, y = data.data, data.target_names[data.target]
    model = lb.sklearn.BayesianClassifier(steps=400).fit(x[:400], y[:400])
    assert model.classes_.tolist() == ["benign", "malignant"]
    probs = model.predict_proba(x[400:])
    np.testing.assert_allclose(probs.sum(1), 1)
    assert (model.classes_[probs.argmax(1)] == model.predict(x[400:])).all()
    assert model.score(x[400:], y[400:]) > 0.95
    assert model.predict_distribution(x[400:]).mutual_information.mean() > 0


def test_they_work_in_searches_and_pipelines() -> None:
    x, y = linear(80)
    estimator = lb.sklearn.BayesianRegressor(steps=150, samples=10)
    assert clone(estimator).get_params() == estimator.get_params()
    scores = cross_val_score(make_pipeline(PolynomialFeatures(2), estimator), x, y, cv=3)
    assert scores.mean() > 0.7
    search = GridSearchCV(estimator, {"hidden": [(), (20,)], "method": [None, lb.MeanField(engine="ivon")]}, cv=2)
    assert search.fit(x, y).best_score_ > 0.7
    same = [clone(estimator).fit(x, y).predict(x) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    other = clone(estimator).set_params(random_state=1).fit(x, y).predict(x)
    assert not np.allclose(other, same[0])
    for state in (None, np.random.RandomState(0), np.random.default_rng(0)):
        clone(estimator).set_params(random_state=state, steps=2).fit(x, y)


@pytest.mark.parametrize("settings", [{"method": "mean-field"}, {"random_state": "a"}], ids=str)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(lb.LeanBayesError, match=next(iter(settings))):
        lb.sklearn.BayesianRegressor(**settings).fit(*linear(20))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "leanbayes.training.sklearn", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(lb.MissingPackageError, match=r"pip install '\.\[sklearn\]'"):
        _ = lb.sklearn
