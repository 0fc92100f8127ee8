"""A trained model seen from all sides: how good, how calibrated, under shift, on what it has never seen, at what cost.

`assess` gives plain values, which a run's folder keeps and the report draws.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from leanbayes.bayesian import BayesianModel
from leanbayes.config import configurable
from leanbayes.data import Batches, Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.cost import costs_of
from leanbayes.evaluation.curves import curves_of, entropy_edges, histogram
from leanbayes.evaluation.detection import detection_scores
from leanbayes.evaluation.levels import FAMILIES, Level, levels
from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.evaluation.scores import Scores, ignored, take_in
from leanbayes.evaluation.shift import label_shift
from leanbayes.noise import mix

BATCH, PIXELS = 500, 500 * 64 * 64  # examples, and pixels, of a batch at most
_EXTREMES = 12  # examples of a kind to be looked at
_CONCENTRATIONS = (10.0, 1.0, 0.1)  # of the shifts of the labels, from mild to strong

Tell = Callable[[str, int, int], None]


@configurable
@dataclass(frozen=True)
class Look:
    """How to look at a model.

    Attributes:
        samples: draws of a prediction. None means what the method says.
        rule: how weights meet activations. None means as in training.
        shifts: which kinds of shift to look at: corruptions, rotation, noise, labels.
        shift_examples: test examples that each level of a shift is tried on, at most.
        ood_examples: examples of each data set of another kind, at most.
        seed: number that the draws and the shifts follow from.
    """

    samples: int | None = None
    rule: str | None = None
    shifts: tuple[str, ...] = FAMILIES
    shift_examples: int = 1000
    ood_examples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.shifts:
            if name not in FAMILIES:
                raise LeanBayesError(f"There is no shift {name!r}: choose from {', '.join(FAMILIES)}.")
        for name in ("shift_examples", "ood_examples"):
            if getattr(self, name) < 1:
                raise LeanBayesError(f"{name}={getattr(self, name)} must be 1 or more.")


def assess(
    bnn: BayesianModel,
    data: Data,
    look: Look | None = None,
    *,
    ood: Mapping[str, Dataset[Any]] | None = None,
    workers: int = 0,
    tell: Tell = lambda what, done, of: None,
) -> dict[str, Any]:
    """Look at a model on the test data of its task; the result is plain values, fit for JSON.

    ood: data sets that the model has never seen the like of, by name. tell: is called with what comes next, and
    how much of all is done.
    """
    return _Assessment(bnn, data, look or Look(), ood or {}, workers, tell).run()


class _Assessment:
    """One call of `assess`."""

    def __init__(
        self,
        bnn: BayesianModel,
        data: Data,
        look: Look,
        ood: Mapping[str, Dataset[Any]],
        workers: int,
        tell: Tell,
    ) -> None:
        if data.test is None:
            raise LeanBayesError(f"{data.name} has no test data: add some.")
        self.bnn, self.data, self.look, self.workers = bnn, data, look, workers
        self.test: Dataset[Any] = data.test
        self.levels = levels(look.shifts, data)
        self.ood = dict(ood)
        self._tell, self._done = tell, 0

    def _next(self, what: str) -> None:
        self._tell(what, self._done, 2 + len(self.levels) + len(self.ood))
        self._done += 1

    def run(self) -> dict[str, Any]:
        self._next("test data")
        scores = self._scores(self._batches(self.test), details=True)
        found = scores.outcome()
        return {
            "look": asdict(self.look),
            "scores": {**scores.compute(), "examples": _count(self.test)},
            "curves": curves_of(scores),
            "extremes": _extremes(found) if isinstance(found, ClassOutcome) else {},
            "shift_examples": min(self.look.shift_examples, _count(self.test)),
            "shifts": [*self._shifts(), *self._label_shifts(found)],
            "ood": self._ood(found) if isinstance(found, ClassOutcome) else {},
            "costs": self._costs(),
        }

    def _costs(self) -> dict[str, Any]:
        self._next("cost")
        x, _ = next(self._batches(self.test))
        found = costs_of(self.bnn, x, samples=self.look.samples, rule=self.look.rule)
        return {**asdict(found), "ratios": found.ratios()}

    def _batches(self, dataset: Dataset[Any], limit: int | None = None, normalise: bool = True) -> Iterator[Any]:
        """Give batches in a fixed order, of at most some examples that are chosen at random, the same every time."""
        total = _count(dataset)
        if limit is not None and limit < total:
            generator = torch.Generator().manual_seed(mix(self.look.seed))
            chosen = torch.randperm(total, generator=generator, device="cpu")[:limit]
            dataset = Subset(dataset, sorted(chosen.tolist()))
        return Batches(
            dataset,
            batch_size(self.data.input_shape),
            device=self.bnn.device,
            shuffle=False,
            normalise=self.data.normalise if normalise else None,
            workers=self.workers,
        ).epoch()

    def _scores(self, batches: Iterable[Any], details: bool) -> Scores:
        scores = Scores(ignored(self.bnn), self.data.target_std, details=details)
        look = self.look
        return take_in(scores, self.bnn, batches, samples=look.samples, rule=look.rule, seed=look.seed)

    # -- shift --------------------------------------------------------------------------------------------------------

    def _shifts(self) -> Iterator[dict[str, Any]]:
        for level in self.levels:
            self._next(f"{level.name.replace('_', ' ')} {level.level:g}")
            scores = self._scores(self._shifted(level), details=False).compute()
            yield {"family": level.family, "name": level.name, "level": level.level, "scores": scores}

    def _shifted(self, level: Level) -> Iterator[tuple[Tensor, Tensor]]:
        """Change the images before they are normalised, or else the inputs as they are."""
        for number, (x, y) in enumerate(self._batches(self.test, self.look.shift_examples, normalise=False)):
            generator = torch.Generator().manual_seed(mix(self.look.seed, number))
            if x.dtype == torch.uint8:
                x = x.float().div_(255)
            x = level.change(x, generator)
            yield (self.data.normalise(x) if self.data.normalise and x.dim() == 4 else x), y

    def _label_shifts(self, found: Any) -> Iterator[dict[str, Any]]:
        """Score again as if the classes came in other proportions; the predictions stay as they are."""
        if "labels" not in self.look.shifts or not isinstance(found, ClassOutcome):
            return
        for concentration in _CONCENTRATIONS:
            generator = torch.Generator().manual_seed(mix(self.look.seed))
            scores = Scores()
            scores.take(found.rows(label_shift(found.labels, generator, concentration)))
            yield {"family": "labels", "name": "labels", "level": concentration, "scores": scores.compute()}

    # -- data of another kind -----------------------------------------------------------------------------------------

    def _ood(self, inside: ClassOutcome) -> dict[str, Any]:
        edges = entropy_edges(inside.probs.shape[-1])
        result = {}
        for name, dataset in self.ood.items():
            self._next(name)
            seen = _uncertainties(self._predictions(self._batches(dataset, self.look.ood_examples)))
            known = _of(inside)
            result[name] = {
                "examples": len(seen["entropy"]),
                "by": {key: detection_scores(known[key], seen[key]) for key in known},
                "entropy": histogram(seen["entropy"], edges),
            }
        return result

    def _predictions(self, batches: Iterable[Any]) -> Iterator[Any]:
        look = self.look
        for number, (x, _) in enumerate(batches):
            seed = look.seed + (number << 20 if self.bnn.noise_per_example else 0)
            generator = torch.Generator().manual_seed(seed)
            yield self.bnn.predict(x, look.samples, rule=look.rule, generator=generator)


def _of(one: Any) -> dict[str, Tensor]:
    """Return the three measures of doubt."""
    doubts = {
        "max_probability": -one.confidence,
        "entropy": one.entropy,
        "mutual_information": one.mutual_information,
    }
    return {name: values.flatten().cpu() for name, values in doubts.items()}


def _uncertainties(predictions: Iterable[Any]) -> dict[str, Tensor]:
    parts = [_of(prediction) for prediction in predictions]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _extremes(found: ClassOutcome) -> dict[str, list[dict[str, float]]]:
    """Name the mistakes that were most sure, and the examples that were least."""
    if found.dense:
        return {}
    wrong = torch.nonzero(~found.right)[:, 0]
    mistakes = wrong[found.confidence[wrong].argsort(descending=True, stable=True)[:_EXTREMES]]
    unsure = found.entropy.argsort(descending=True, stable=True)[:_EXTREMES]
    return {"mistakes": _told(found, mistakes), "unsure": _told(found, unsure)}


def _told(found: ClassOutcome, rows: Tensor) -> list[dict[str, float]]:
    return [
        {
            "index": row,
            "truth": int(found.labels[row]),
            "answer": int(found.answer[row]),
            "confidence": float(found.confidence[row]),
            "entropy": float(found.entropy[row]),
        }
        for row in rows.tolist()
    ]


def _count(dataset: Any) -> int:
    return len(dataset)


def batch_size(input_shape: Sequence[int]) -> int:
    """Return how many examples are predicted at once."""
    pixels = math.prod(input_shape[1:]) if len(input_shape) == 3 else 1
    return max(1, min(BATCH, PIXELS // pixels))
