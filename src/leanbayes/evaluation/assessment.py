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
from leanbayes.data.base import check_map_style
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.cost import costs_of, count_flops
from leanbayes.evaluation.curves import curves_of, entropy_edges, extremes_of, histogram
from leanbayes.evaluation.detection import detection_scores
from leanbayes.evaluation.explanation import explanation_scores
from leanbayes.evaluation.levels import FAMILIES, Level, levels
from leanbayes.evaluation.outcomes import ClassOutcome
from leanbayes.evaluation.pruning import CRITERIA, SHARES, prune
from leanbayes.evaluation.scores import Scores, ignored, predictions
from leanbayes.evaluation.shift import label_shift
from leanbayes.network import input_dtype, tensors_of
from leanbayes.noise import mix
from leanbayes.rules import get_rule

BATCH, PIXELS = 500, 500 * 64 * 64  # examples, and pixels, of a batch at most
_KEPT_BYTES = 2**30  # of examples to be shifted: what has more is read again for each level
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
        pruning: set more and more of the weights to zero, the least important first, and score what is left.
        explained: test examples whose saliency maps are judged. This needs captum, and takes its time.
        seed: number that the draws and the shifts follow from.
    """

    samples: int | None = None
    rule: str | None = None
    shifts: tuple[str, ...] = FAMILIES
    shift_examples: int = 1000
    ood_examples: int = 10_000
    pruning: bool = True
    explained: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.shifts:
            if name not in FAMILIES:
                raise LeanBayesError(f"There is no shift {name!r}: choose from {', '.join(FAMILIES)}.")
        for name in ("samples", "shift_examples", "ood_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LeanBayesError(f"{name}={value} must be 1 or more.")
        if self.explained < 0:
            raise LeanBayesError(f"explained={self.explained} must be 0 or more.")
        if self.rule is not None:
            get_rule(self.rule)


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

    ood: data sets that a classifier has never seen the like of, by name. tell: is called with what comes next, how much
    is done, and how much there is in all. Under `torch.distributed` every process that calls this does all of it.
    """
    if not isinstance(data, Data):
        raise LeanBayesError(
            f"data must be a leanbayes.data.Data, not {type(data).__name__}: from_datasets(train, test=test) makes one."
        )
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
        if ood and data.task != "classification":
            raise LeanBayesError(
                f"{data.name} is for {data.task}, and only classifiers tell other data: leave ood out."
            )
        self.bnn, self.data, self.look, self.workers = bnn, data, look, workers
        self.test: Dataset[Any] = data.test
        self.ood = dict(ood)
        self.criteria = [by for by in CRITERIA if look.pruning and _can_be_pruned(bnn, by)]
        self.kept: list[Any] | None = self._read_once() if {*look.shifts} - {"labels"} else []
        self.levels = levels(look.shifts, self._to_shift())
        self._tell, self._done = tell, 0

    def _next(self, what: str) -> None:
        total = 2 + len(self.levels) + len(self.ood) + len(self.criteria) + bool(self.look.explained)
        self._tell(what, self._done, total)
        self._done += 1

    def run(self) -> dict[str, Any]:
        self._next("test data")
        scores, labelled = self._scores(details=True), []
        for prediction, y in self._predictions(self._batches(self.test)):
            scores.update(prediction, y)
            if y.dim() == 1:
                labelled.append((y != ignored(self.bnn)).cpu())
        found = scores.outcome()
        result = {
            "look": asdict(self.look),
            "scores": {**scores.compute(), "examples": check_map_style(self.test)},
            "curves": curves_of(scores),
            "extremes": extremes_of(found, torch.cat(labelled)) if isinstance(found, ClassOutcome) else {},
            "shift_examples": min(self.look.shift_examples, check_map_style(self.test)),
            "shifts": [*self._shifts(), *self._label_shifts(found)],
            "ood": self._ood(found),
            "pruning": {by: self._pruned(by) for by in self.criteria},
            "explanation": self._explained() if self.look.explained else {},
            "costs": self._costs(),
        }
        self._next("done")
        return result

    def _costs(self) -> dict[str, Any]:
        self._next("cost")
        x, _ = next(self._batches(self.test))
        found = costs_of(self.bnn, x, samples=self.look.samples, rule=self.look.rule)
        one_pass = count_flops(self.bnn, x, 1, self.bnn.trained_rule)  # of the training, however it predicts
        work = one_pass.effective * (self.bnn.members or 1) / found.examples
        return {**asdict(found), "ratios": found.ratios(), "train_flops": work}

    def _batches(self, dataset: Dataset[Any], limit: int | None = None, normalise: bool = True) -> Iterator[Any]:
        """Give batches in a fixed order, of at most some examples that are chosen at random, the same every time."""
        return Batches(
            some(dataset, limit, self.look.seed),
            batch_size(self.data.input_shape),
            device=self.bnn.device,
            shuffle=False,
            normalise=self.data.normalise if normalise else None,
            workers=self.workers,
            dtype=input_dtype(self.bnn),
        ).epoch()

    def _predictions(self, batches: Iterable[Any], bnn: BayesianModel | None = None) -> Iterator[tuple[Any, Tensor]]:
        look = self.look
        return predictions(bnn or self.bnn, batches, samples=look.samples, rule=look.rule, seed=look.seed)

    def _scores(self, details: bool = False) -> Scores:
        return Scores(ignored(self.bnn), self.data.target_std, details=details, alone=True)

    # -- shift --------------------------------------------------------------------------------------------------------

    def _read_once(self) -> list[Any] | None:
        """Read the examples to be shifted, unless they are too large to keep."""
        kept, size = [], 0
        for batch in self._batches(self.test, self.look.shift_examples, normalise=False):
            kept.append(batch)
            size += sum(tensor.nbytes for tensor in tensors_of(batch))
            if size > _KEPT_BYTES:
                return None
        return kept

    def _to_shift(self) -> Iterable[tuple[Any, Tensor]]:
        if self.kept is not None:
            return self.kept
        return self._batches(self.test, self.look.shift_examples, normalise=False)

    def _shifts(self) -> Iterator[dict[str, Any]]:
        for level in self.levels:
            self._next(f"{level.name.replace('_', ' ')} {level.level:g}")
            scores = self._scores()
            for prediction, y in self._predictions(self._shifted(level)):
                scores.update(prediction, y)
            yield {"family": level.family, "name": level.name, "level": level.level, "scores": scores.compute()}

    def _shifted(self, level: Level) -> Iterator[tuple[Tensor, Tensor]]:
        """Change the images before they are normalised, or else the inputs as they are."""
        for number, (x, y) in enumerate(self._to_shift()):
            generator = torch.Generator().manual_seed(mix(self.look.seed, number))
            if x.dtype == torch.uint8:
                x = x / 255
            x = level.change(x, generator)
            x = self.data.normalise(x) if self.data.normalise and x.dim() == 4 else x
            yield x.to(dtype=input_dtype(self.bnn)), y

    def _label_shifts(self, found: Any) -> Iterator[dict[str, Any]]:
        """Score again as if the classes came in other proportions; the predictions stay as they are."""
        if "labels" not in self.look.shifts or not isinstance(found, ClassOutcome):
            return
        for concentration in _CONCENTRATIONS:
            generator = torch.Generator().manual_seed(mix(self.look.seed))
            scores = self._scores()
            scores.take(found.rows(label_shift(found.labels, generator, concentration)))
            yield {"family": "labels", "name": "labels", "level": concentration, "scores": scores.compute()}

    # -- inside the model ---------------------------------------------------------------------------------------------

    def _pruned(self, by: str) -> list[dict[str, float]]:
        """Score the model on some unchanged examples, with ever more of its weights set to zero."""
        self._next(f"pruning by {by}")
        points = []
        for share in SHARES:
            scores, batches = self._scores(), self._batches(self.test, self.look.shift_examples)
            for prediction, y in self._predictions(batches, prune(self.bnn, share, by)):
                scores.update(prediction, y)
            points.append({"share": share, **scores.compute()})
        return points

    def _explained(self) -> dict[str, float]:
        self._next("explanations")
        look, batches = self.look, self._batches(self.test, self.look.explained)
        target = 0 if self.data.task == "regression" else None  # the first one, or the answer
        settings: dict[str, Any] = {"samples": look.samples, "rule": look.rule, "seed": look.seed}
        return explanation_scores(self.bnn, batches, target=target, **settings)

    # -- data of another kind -----------------------------------------------------------------------------------------

    def _ood(self, inside: Any) -> dict[str, Any]:
        if self.ood and not isinstance(inside, ClassOutcome):
            raise LeanBayesError("Only a model that chooses among classes can tell other data: leave ood out.")
        result = {}
        for name, dataset in self.ood.items():
            self._next(name)
            batches = self._batches(dataset, self.look.ood_examples)
            known, seen = _doubts([inside]), _doubts(prediction for prediction, _ in self._predictions(batches))
            result[name] = {
                "examples": len(seen["entropy"]),
                "by": {measure: detection_scores(known[measure], seen[measure]) for measure in known},
                "entropy": histogram(seen["entropy"], entropy_edges(inside.probs.shape[-1])),
            }
        return result


def _can_be_pruned(bnn: BayesianModel, by: str) -> bool:
    try:
        prune(bnn, 0.0, by)
    except LeanBayesError:  # it has no weights, or these have no spread
        return False
    return True


def _doubts(predicted: Iterable[Any]) -> dict[str, Tensor]:
    """Return the three measures of doubt, each for all examples."""
    parts = [(-one.confidence, one.entropy, one.mutual_information) for one in predicted]
    names = ("max_probability", "entropy", "mutual_information")
    return {name: torch.cat(of).cpu() for name, of in zip(names, zip(*parts, strict=True), strict=True)}


def some(dataset: Dataset[Any], limit: int | None, seed: int) -> Dataset[Any]:
    """Return at most so many examples, chosen at random, in their order."""
    total = check_map_style(dataset)
    if limit is None or limit >= total:
        return dataset
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(mix(seed)), device="cpu")[:limit]
    return Subset(dataset, sorted(chosen.tolist()))


def batch_size(input_shape: Sequence[int]) -> int:
    """Return how many examples are predicted at once."""
    pixels = math.prod(input_shape[1:]) if len(input_shape) == 3 else 1
    return max(1, min(BATCH, PIXELS // pixels))
