"""Scores of predictions against what was true, batch by batch; under `torch.distributed`, of all processes together."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.metrics import METRICS, Metric, Sum, Whole
from leanbayes.evaluation.outcomes import ClassOutcome, Outcome, joined, outcome_of
from leanbayes.prediction import Prediction


class _Taken(NamedTuple):
    """What one process has taken in: of which kind, sums by the name of their score, and examples."""

    kind: type[Outcome] | None
    sums: dict[str, Tensor]
    kept: list[Outcome]


class Scores:
    """Takes predictions in, and gives a dict of scores: those of `metrics.METRICS` and of `metrics`.

    details: also those that cost more or need all examples at once, whose outcomes are then kept (not those of dense
    predictions). Without it all that is kept are sums, so that memory does not grow. Figures of a regression are in
    the unit of the targets times `target_scale`. A score is nan where nothing counts. metrics: your own, each with a
    name that no other has. alone: count what this process has taken in, and not what others have.
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
        self._taken = _Taken(None, {}, [])

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Take in one batch."""
        self.take(outcome_of(prediction, y, self.ignore_index, self.target_scale))

    def take(self, outcome: Outcome) -> None:
        """Take in what was predicted beside what was true."""
        kind, sums, kept = self._taken
        if not len(outcome):
            return
        if kind is not None and kind is not type(outcome):
            raise LeanBayesError(f"One Scores cannot take in {kind.__name__} and {type(outcome).__name__}: use two.")
        metrics = self._metrics(type(outcome))
        for metric in metrics:
            values = metric.of(outcome) if isinstance(metric, Sum) else None
            if values is not None:
                sums[metric.name] = sums[metric.name] + values if metric.name in sums else values
        dense = isinstance(outcome, ClassOutcome) and outcome.dense
        if not dense and any(isinstance(metric, Whole) for metric in metrics):
            kept.append(outcome.to("cpu"))
        self._taken = _Taken(type(outcome), sums, kept)

    def compute(self) -> dict[str, float]:
        """Return the scores of everything taken in, by all processes."""
        every = self._of_all_processes()
        kind = next((one.kind for one in every if one.kind is not None), None)
        if kind is None:
            raise LeanBayesError("There is nothing to score: take in at least one labelled batch.")
        whole, scores = _whole(every), {}
        for metric in self._metrics(kind):
            if isinstance(metric, Sum):
                total = _total(every, metric.name)
                if total is not None:
                    scores[metric.name] = metric.finish(total)
            elif isinstance(metric, Whole) and whole is not None:
                scores[metric.name] = metric.finish(whole)
        return scores

    def sums(self, name: str) -> Tensor | None:
        """Return what a score has added up, such as the bins of `ece`; None where it does not apply."""
        return _total(self._of_all_processes(), name)

    def outcome(self) -> Any:
        """Return all examples taken in, or None where they were not kept."""
        return _whole(self._of_all_processes())

    def _metrics(self, kind: type[Outcome]) -> list[Metric]:
        names = Counter(metric.name for metric in (*METRICS[kind], *self._own))
        twice = [name for name, times in names.items() if times > 1]
        if twice:  # a score of a known name has to mean the same everywhere
            raise LeanBayesError(f"There are two scores named {twice[0]!r}: give your own another name.")
        usual = [m for m in METRICS[kind] if self.details or (isinstance(m, Sum) and m.basic)]
        return [*usual, *self._own]

    def _of_all_processes(self) -> list[_Taken]:
        """Bring together what all processes have, some of which may have taken in nothing."""
        mine = self._taken._replace(sums={name: values.cpu() for name, values in self._taken.sums.items()})
        every = [mine]
        if not self.alone and torch.distributed.is_available() and torch.distributed.is_initialized():
            every = [mine] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(every, mine)
        return every


def _total(every: Sequence[_Taken], name: str) -> Tensor | None:
    parts = [one.sums[name] for one in every if name in one.sums]
    return torch.stack(parts).sum(0) if parts else None


def _whole(every: Sequence[_Taken]) -> Any:
    kept = [outcome for one in every for outcome in one.kept]
    return joined(kept) if kept else None


def evaluate(
    bnn: BayesianModel,
    batches: Iterable[tuple[Any, Tensor]],
    *,
    samples: int | None = None,
    rule: str | None = None,
    seed: int = 0,
    target_scale: Sequence[float] = (),
    details: bool = True,
    metrics: Sequence[Metric] = (),
) -> dict[str, float]:
    """Predict every batch (x, y) and score it.

    seed: of the draws; the model's own stream of noise is left as it is. target_scale: what one unit of each target
    is in the unit to report, such as the std that the targets were divided by. metrics: more scores, of your own;
    their names must be new.
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
    batches: Iterable[tuple[Any, Tensor]],
    *,
    samples: int | None = None,
    rule: str | None = None,
    seed: int = 0,
) -> Iterator[tuple[Any, Tensor]]:
    """Predict every batch (x, y), and give the prediction and y: as if all examples were one large batch.

    That has the same draws for all of them, or noise of its own for each example.
    """
    with bnn.using(rule or bnn.current_rule):
        apart = bnn.noise_per_example
    for number, (x, y) in enumerate(batches):
        generator = torch.Generator().manual_seed(seed + (number << 20 if apart else 0))
        yield bnn.predict(x, samples, rule=rule, generator=generator), y
