"""Scores of predictions, accumulated over batches and, under `torch.distributed`, over all processes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.data.base import as_pair
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.metrics import METRICS, Metric, Sum, Whole
from leanbayes.evaluation.outcomes import ClassOutcome, Outcome, joined, outcome_of
from leanbayes.likelihoods import Prediction
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Rule


class _State(NamedTuple):
    """What one process has accumulated: kind and number of outcomes, sums by the name of their metric, and outcomes."""

    kind: type[Outcome] | None
    rows: int
    sums: dict[str, Tensor]
    outcomes: list[Outcome]


class Scores:
    """Accumulate predictions batch by batch, and compute their scores.

    The metrics are those of `METRICS` for the kind of prediction (classes, binary outputs or regression), and your
    own. `evaluate` does all of this for a model; use this class if you make the predictions yourself.

    Args:
        ignore_index: Label of examples or pixels that do not count.
        target_scale: Factor from the unit of the targets to the unit of the scores, one for all targets or one per
            target, such as the std by which the targets were divided. For regression only.
        details: Also compute the metrics that cost more or need all examples at once. The outcomes are then kept in
            memory (except for dense predictions); without details, memory does not grow with the data.
        metrics: Additional metrics. Their names must be new.
        alone: Score only the predictions of this process, not of all processes.

    Example:
        >>> scores = Scores(details=True)
        >>> for x, y in test_loader:
        ...     scores.update(bnn.predict(x), y)
        >>> scores.compute()["nll"]
    """

    def __init__(
        self,
        ignore_index: int = -100,
        target_scale: Sequence[float] = (),
        *,
        details: bool = False,
        metrics: Sequence[Metric] = (),
        alone: bool = False,
    ) -> None:
        self.ignore_index, self.target_scale, self.details, self.alone = ignore_index, target_scale, details, alone
        self._own = tuple(metrics)
        self._state = _State(None, 0, {}, [])

    def __repr__(self) -> str:
        kind, rows, *_ = self._state
        if kind is None:
            return "Scores(empty)"
        what = {"ClassOutcome": "classification", "BinaryOutcome": "binary", "RegressionOutcome": "regression"}
        names = ", ".join(metric.name for metric in self._metrics(kind))
        return f"Scores({what.get(kind.__name__, kind.__name__)}, {rows:,} rows: {names})"

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Add the prediction of one batch and its true labels or targets.

        Args:
            prediction: What `BayesianModel.predict` returned.
            y: The true labels or targets.

        Raises:
            LeanBayesError: If the shapes do not match, labels are invalid, or an earlier batch was of another kind.
        """
        self.take(outcome_of(prediction, y, self.ignore_index, self.target_scale))

    def take(self, outcome: Outcome) -> None:
        """Add an outcome: predictions together with the true values."""
        kind, rows, sums, outcomes = self._state
        if not len(outcome):
            return
        if kind is not None and kind is not type(outcome):
            raise LeanBayesError(
                f"One Scores object cannot score both {kind.__name__} and {type(outcome).__name__}: use two."
            )
        metrics = self._metrics(type(outcome))
        for metric in metrics:
            values = metric.of(outcome) if isinstance(metric, Sum) else None
            if values is not None:
                sums[metric.name] = sums[metric.name] + values if metric.name in sums else values
        dense = isinstance(outcome, ClassOutcome) and outcome.dense
        if not dense and any(isinstance(metric, Whole) for metric in metrics):
            outcomes.append(outcome.to("cpu"))
        self._state = _State(type(outcome), rows + len(outcome), sums, outcomes)

    def compute(self) -> dict[str, float]:
        """Return the scores of all predictions so far, of all processes.

        Returns:
            The scores by the names of their metrics. Metrics that do not apply are missing; a score without any
            example, such as the entropy of wrong predictions if none is wrong, is nan.

        Raises:
            LeanBayesError: If no labeled example was added.
        """
        states = self._of_all_processes()
        kind = next((state.kind for state in states if state.kind is not None), None)
        if kind is None:
            raise LeanBayesError("There is nothing to score: add at least one labeled batch.")
        whole, scores = _joined_outcomes(states), {}
        for metric in self._metrics(kind):
            if isinstance(metric, Sum):
                total = _total(states, metric.name)
                if total is not None:
                    scores[metric.name] = metric.finish(total)
            elif isinstance(metric, Whole) and whole is not None:
                scores[metric.name] = metric.finish(whole)
        return scores

    def sums(self, name: str) -> Tensor | None:
        """Return the accumulated sums of a metric, such as the bins of "ece"; None if it does not apply."""
        return _total(self._of_all_processes(), name)

    def outcome(self) -> Any:
        """Return all outcomes as one, or None if they were not kept."""
        return _joined_outcomes(self._of_all_processes())

    def _metrics(self, kind: type[Outcome]) -> list[Metric]:
        names = Counter(metric.name for metric in (*METRICS[kind], *self._own))
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:  # a built-in name must mean the same everywhere
            raise LeanBayesError(f"There are two metrics named {repeated[0]!r}: rename yours.")
        usual = [m for m in METRICS[kind] if self.details or (isinstance(m, Sum) and m.basic)]
        return [*usual, *self._own]

    def _of_all_processes(self) -> list[_State]:
        """Gather the states of all processes, some of which may be empty."""
        mine = self._state._replace(sums={name: values.cpu() for name, values in self._state.sums.items()})
        states = [mine]
        if not self.alone and torch.distributed.is_available() and torch.distributed.is_initialized():
            states = [mine] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(states, mine)
        return states


def _total(states: Sequence[_State], name: str) -> Tensor | None:
    parts = [state.sums[name] for state in states if name in state.sums]
    return torch.stack(parts).sum(0) if parts else None


def _joined_outcomes(states: Sequence[_State]) -> Any:
    outcomes = [outcome for state in states for outcome in state.outcomes]
    return joined(outcomes) if outcomes else None


@checked()
def evaluate(
    bnn: BayesianModel,
    batches: Iterable[Any],
    *,
    samples: int | None = None,
    rule: str | Rule | None = None,
    seed: int = 0,
    target_scale: Sequence[float] = (),
    details: bool = True,
    metrics: Sequence[Metric] = (),
) -> dict[str, float]:
    """Predict every batch and return the scores: accuracy, NLL, calibration, uncertainty and more.

    The scores are exact and do not depend on the batch size. Under `torch.distributed`, each process passes its own
    batches, and all processes get the scores of all of them. The model, its training mode and its random stream are
    not changed. docs/metrics.md explains each score.

    Args:
        bnn: The model.
        batches: Pairs (x, y) of inputs and true labels or targets, such as a `DataLoader`, or dicts with the targets
            under "labels". Inputs must be on the device of the model.
        samples: Monte Carlo samples per prediction. None means the default of the method.
        rule: How random weights are combined with activations, such as "sample", "mean" or "moments", or a rule with
            its own settings. None means the model's own rule.
        seed: Seed of the Monte Carlo samples.
        target_scale: For regression: factor from the unit of the targets to the unit of the scores, such as the std by
            which the targets were divided. One for all targets, or one per target.
        details: Also compute metrics that sort all examples or are expensive, such as "aurc" and "adaptive_ece". They
            keep all predictions in memory, except for dense predictions (segmentation), which do not have them.
        metrics: Additional metrics: `Sum`, `Whole` or the result of `mean`. Their names must be new.

    Returns:
        The scores as floats, by name:

        - Classification: "accuracy", "nll", "brier", "ece", "entropy", "mutual_information" and more; "top5" for more
          than 5 classes, and "miou" for segmentation.
        - Binary outputs (`Bernoulli`): "accuracy", "nll", "brier", "ece", "entropy", "mutual_information" and more.
        - Regression: "rmse", "nll", "crps", "coverage_95", "width_95", "std", "epistemic_std" and more.

        A score without any example, such as "entropy_wrong" if every prediction is right, is nan.

    Raises:
        LeanBayesError: If there is no labeled example, a shape does not match, a label is invalid, or two metrics have
            the same name.

    Example:
        >>> import leanbayes as lb
        >>> bnn = lb.bayesianize(model, lb.MeanField())
        >>> ...  # train
        >>> scores = lb.evaluate(bnn, test_loader, samples=30)
        >>> print(f"{scores['accuracy']:.1%}, NLL {scores['nll']:.3f}, ECE {scores['ece']:.3f}")
        93.2%, NLL 0.202, ECE 0.008

        A metric of your own, here the mean probability of the true class:

        >>> from leanbayes.evaluation import mean
        >>> lb.evaluate(bnn, test_loader, metrics=[mean("true_prob", lambda outcome: outcome.chosen)])["true_prob"]
        0.9071
    """
    scores = Scores(ignored(bnn), target_scale, details=details, metrics=metrics)
    for prediction, y in predictions(bnn, batches, samples=samples, rule=rule, seed=seed):
        scores.update(prediction, y)
    return scores.compute()


def ignored(bnn: BayesianModel) -> int:
    """Return the label that does not count."""
    return getattr(bnn.likelihood, "ignore_index", -100)


def predictions(
    bnn: BayesianModel,
    batches: Iterable[Any],
    *,
    samples: int | None = None,
    rule: str | Rule | None = None,
    seed: int = 0,
) -> Iterator[tuple[Any, Tensor]]:
    """Predict every batch (x, y), and yield the prediction and y, as if all examples were one large batch.

    All batches use the same weight samples, or separate noise if every example has its own.
    """
    with bnn.using(rule or bnn.current_rule):
        separate = bnn.noise_per_example
    for number, batch in enumerate(batches):
        x, y = as_pair(batch)
        generator = torch.Generator().manual_seed(seed + (number << 20 if separate else 0))
        yield bnn.predict(x, samples, rule=rule, generator=generator), y
