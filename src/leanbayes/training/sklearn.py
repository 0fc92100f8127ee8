"""Estimators in the style of scikit-learn, for tables: they work in pipelines, cross-validation and grid searches."""

import math
import numbers
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from leanbayes.data import ArrayDataset, Data, from_datasets
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import ClassPrediction, RegressionPrediction
from leanbayes.methods import MeanField
from leanbayes.model.method import Method
from leanbayes.networks import build
from leanbayes.training.fit import fit

__all__ = ["BayesianClassifier", "BayesianRegressor"]


class _Estimator(BaseEstimator):
    """What both estimators have in common: the settings, the scales of inputs, and the training."""

    def __init__(
        self,
        hidden: tuple[int, ...] = (50,),
        method: Method | None = None,
        steps: int = 1500,
        batch_size: int = 32,
        lr: float | None = None,
        temperature: float | None = None,
        samples: int = 50,
        random_state: Any = 0,
    ) -> None:
        self.hidden = hidden
        self.method = method
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.temperature = temperature
        self.samples = samples
        self.random_state = random_state

    def _train(self, x: np.ndarray, y: torch.Tensor, outputs: int) -> None:
        """Standardize the inputs, and train a perceptron."""
        self._input_mean = x.mean(0)
        self._input_std = _positive(x.std(0))
        self._seed = _seed_of(self.random_state)
        inputs = self._inputs(x).float()
        size = min(self.batch_size, len(inputs))
        # All examples are trained on, so the scores of the held-out split are not used.
        known: dict[str, Any] = {"outputs": outputs} if not y.is_floating_point() else {}
        data: Data = from_datasets(ArrayDataset(inputs, y), ArrayDataset(inputs[:1], y[:1]), **known)
        network = build("mlp", (inputs.shape[1],), outputs, hidden=tuple(self.hidden), seed=self._seed)
        method = self.method or MeanField()
        if not isinstance(method, Method):
            raise LeanBayesError(f"method must be an instance such as lb.MeanField(), not {method!r}.")
        self.model_ = fit(
            network,
            method,
            data,
            epochs=max(1, round(self.steps / math.ceil(len(inputs) / size))),
            batch_size=size,
            lr=self.lr or (0.1 if method.engine == "ivon" else 1e-2),
            scale_lr=3e-2,  # few steps must find the noise of the targets
            temperature=self.temperature,
            evaluate_every=0,
            log_every=1_000_000,
            seed=self._seed,
            progress=False,
        ).double()  # so that rounding does not depend on which examples are predicted together

    def _inputs(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy((x - self._input_mean) / self._input_std)

    def _predict(self, x: Any) -> Any:
        check_is_fitted(self, "model_")
        x = validate_data(self, x, reset=False, dtype=np.float64)
        model: Any = self.model_
        samples = None if model.members is not None or not model.current_rule.random else self.samples
        inputs = self._inputs(x).to(model.device)
        return model.predict(inputs, samples, generator=torch.Generator().manual_seed(self._seed))


class BayesianRegressor(RegressorMixin, _Estimator):
    """A Bayesian network for regression on tables, as a scikit-learn estimator.

    Inputs and targets are standardized inside, and the noise of the targets is learned.

    Args:
        hidden: Widths of the hidden layers of the network.
        method: The method, such as `lb.MeanField(engine="ivon")`. None means `lb.MeanField()`.
        steps: Number of optimizer steps.
        batch_size: Number of examples per step.
        lr: Learning rate. None means 0.01, and 0.1 for the engine ivon.
        temperature: Weight of the KL. 1 is the Bayesian posterior, which is too wide for networks with more weights
            than examples. None means the default of `lb.fit`: 0.1 for a regression and 0.003 for classes, and 1 for the
            engine ivon.
        samples: Monte Carlo samples of a prediction.
        random_state: The seed of initial weights, order and noise. None means another one in each call of `fit`.

    Attributes:
        model_: The trained `BayesianModel`, of standardized inputs and targets.

    Example:
        >>> model = lb.sklearn.BayesianRegressor().fit(x_train, y_train)
        >>> mean, std = model.predict(x_test, return_std=True)
        >>> cross_val_score(make_pipeline(PolynomialFeatures(), lb.sklearn.BayesianRegressor()), x, y)
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on a table (examples, features) and its targets, (examples,) or (examples, targets)."""
        x, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self._is_vector = y.ndim == 1
        targets = np.asarray(y, dtype=np.float64).reshape(len(x), -1)
        self._target_mean = targets.mean(0)
        self._target_std = _positive(targets.std(0))
        scaled = torch.from_numpy((targets - self._target_mean) / self._target_std).float()
        self._train(x, scaled, scaled.shape[1])
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each target and, if asked for, the std of noise and model together."""
        found = self.predict_distribution(X)
        mean, std = (part.cpu().numpy() for part in (found.mean, found.std))
        if self._is_vector:
            mean, std = mean[:, 0], std[:, 0]
        return (mean, std) if return_std else mean

    def predict_distribution(self, X: Any) -> RegressionPrediction:
        """Return the whole prediction in the unit of the targets: mean, both variances and intervals."""
        found: RegressionPrediction = self._predict(X)
        mean, std = (torch.from_numpy(values).to(found.mean.device) for values in (self._target_mean, self._target_std))
        return replace(
            found,
            mean=found.mean * std + mean,
            aleatoric_variance=found.aleatoric_variance * std**2,
            epistemic_variance=found.epistemic_variance * std**2,
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags


class BayesianClassifier(ClassifierMixin, _Estimator):
    """A Bayesian network for classes from tables, as a scikit-learn estimator.

    Inputs are standardized inside; labels can be numbers or strings.

    Args:
        hidden: Widths of the hidden layers of the network.
        method: The method, such as `lb.MeanField(engine="ivon")`. None means `lb.MeanField()`.
        steps: Number of optimizer steps.
        batch_size: Number of examples per step.
        lr: Learning rate. None means 0.01, and 0.1 for the engine ivon.
        temperature: Weight of the KL. 1 is the Bayesian posterior, which is too wide for networks with more weights
            than examples. None means the default of `lb.fit`: 0.1 for a regression and 0.003 for classes, and 1 for the
            engine ivon.
        samples: Monte Carlo samples of a prediction.
        random_state: The seed of initial weights, order and noise. None means another one in each call of `fit`.

    Attributes:
        model_: The trained `BayesianModel`, of standardized inputs.
        classes_: The labels, in the order of the probabilities.

    Example:
        >>> model = lb.sklearn.BayesianClassifier().fit(x_train, y_train)
        >>> model.predict_proba(x_test)
        >>> model.predict_distribution(x_test).mutual_information  # what more data could remove
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train on a table (examples, features) and its labels (examples,)."""
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, places = np.unique(y, return_inverse=True)
        self._train(x, torch.from_numpy(places).long(), len(self.classes_))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each example."""
        places = self.predict_proba(X).argmax(1)
        return self.classes_[places]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (examples, classes)."""
        return self._predict(X).probs.double().cpu().numpy()

    def predict_distribution(self, X: Any) -> ClassPrediction:
        """Return the whole prediction: probabilities, entropy and mutual information."""
        found: ClassPrediction = self._predict(X)
        return found


def _positive(std: np.ndarray) -> np.ndarray:
    """Replace the std of constant columns by 1."""
    return np.where(std > 1e-12, std, 1.0)


def _seed_of(random_state: Any) -> int:
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0] >> 1)
    if isinstance(random_state, (np.random.RandomState, np.random.Generator)):
        draw = random_state.integers if isinstance(random_state, np.random.Generator) else random_state.randint
        return int(draw(2**31 - 1))
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    raise LeanBayesError(f"random_state={random_state!r} must be a whole number, None or a NumPy generator.")
