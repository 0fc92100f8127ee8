"""Scores of predictions against what was true, batch by batch; under `torch.distributed`, of all processes together."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.metrics import METRICS, Metric, Sum, Whole
from leanbayes.evaluation.outcomes import Outcome, joined, outcome_of
from leanbayes.prediction import Prediction


class Scores:
    """Takes predictions in, and gives a dict of scores: those of `metrics.METRICS` and of `metrics`.

    details: also those that cost more or need all examples at once, whose outcomes are then kept (not those of dense
    predictions). Without it all that is kept are sums, so that memory does not grow. Figures of a regression are in
    the unit of the targets times `target_scale`. A score is nan where nothing counts.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        target_scale: Sequence[float] = (),
        *,
        details: bool = False,
        metrics: Sequence[Metric] = (),
    ) -> None:
        self.ignore_index, self.target_scale, self.details, self._own = ignore_index, target_scale, details, metrics
        self._kind: type[Outcome] | None = None
        self._sums: dict[str, Tensor] = {}
        self._kept: list[Outcome] = []

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Take in one batch."""
        self.take(outcome_of(prediction, y, self.ignore_index, self.target_scale))

    def take(self, outcome: Outcome) -> None:
        """Take in what was predicted beside what was true."""
        if not len(outcome):
            return
        self._kind = type(outcome)
        metrics = self._metrics(self._kind)
        for metric in metrics:
            values = metric.of(outcome) if isinstance(metric, Sum) else None
            if values is not None:
                self._sums[metric.name] = self._sums[metric.name] + values if metric.name in self._sums else values
        if any(isinstance(metric, Whole) for metric in metrics) and not getattr(outcome, "dense", False):
            self._kept.append(outcome.to("cpu"))

    def compute(self) -> dict[str, float]:
        """Return the scores of everything taken in, by all processes."""
        kind, sums, whole = self._of_all_processes()
        if kind is None:
            raise LeanBayesError("There is nothing to score: take in at least one labelled batch.")
        scores = {}
        for metric in self._metrics(kind):
            if isinstance(metric, Sum) and metric.name in sums:
                scores[metric.name] = metric.finish(sums[metric.name])
            elif isinstance(metric, Whole) and whole is not None:
                scores[metric.name] = metric.finish(whole)
        return scores

    def sums(self, name: str) -> Tensor | None:
        """Return what a score has added up, such as the bins of `ece`; None where it does not apply."""
        return self._of_all_processes()[1].get(name)

    def outcome(self) -> Any:
        """Return all examples taken in, or None where they were not kept."""
        return self._of_all_processes()[2]

    def _metrics(self, kind: type[Outcome]) -> list[Metric]:
        usual = [m for m in METRICS[kind] if self.details or (isinstance(m, Sum) and m.basic)]
        return [*usual, *self._own]

    def _of_all_processes(self) -> tuple[type[Outcome] | None, dict[str, Tensor], Any]:
        """Bring together what all processes have, some of which may have taken in nothing."""
        mine = self._kind, {name: values.cpu() for name, values in self._sums.items()}, self._kept
        every = [mine]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            every = [mine] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(every, mine)
        kind = next((kind for kind, _, _ in every if kind is not None), None)
        names = dict.fromkeys(name for _, sums, _ in every for name in sums)
        totals = {name: torch.stack([sums[name] for _, sums, _ in every if name in sums]).sum(0) for name in names}
        kept = [outcome for _, _, outcomes in every for outcome in outcomes]
        return kind, totals, joined(kept) if kept else None


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
    is in the unit to report, such as the std that the targets were divided by. metrics: more scores, of your own.
    """
    scores = Scores(ignored(bnn), target_scale, details=details, metrics=metrics)
    return take_in(scores, bnn, batches, samples=samples, rule=rule, seed=seed).compute()


def ignored(bnn: BayesianModel) -> int:
    """Return the label that does not count."""
    return getattr(bnn.likelihood, "ignore_index", -100)


def take_in(
    scores: Scores,
    bnn: BayesianModel,
    batches: Iterable[tuple[Any, Tensor]],
    *,
    samples: int | None = None,
    rule: str | None = None,
    seed: int = 0,
) -> Scores:
    """Predict every batch (x, y) and let the scores take it in."""
    for number, (x, y) in enumerate(batches):
        # The same draws for every batch, as one large batch would have, or noise of its own for each example.
        generator = torch.Generator().manual_seed(seed + (number << 20 if bnn.noise_per_example else 0))
        scores.update(bnn.predict(x, samples, rule=rule, generator=generator), y)
    return scores
