"""The full evaluation of a trained model: scores, calibration, shift, out-of-distribution (OOD) data, and cost.

`evaluate_fully` returns plain values, which are stored in the folder of a run and plotted in the report.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from leanbayes.core.arguments import checked
from leanbayes.core.config import configurable
from leanbayes.core.network import input_dtype, tensors_of
from leanbayes.core.noise import mix
from leanbayes.data import Batches, Data
from leanbayes.data.base import check_map_style
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.asking import asking_of
from leanbayes.evaluation.cost import costs_of, count_flops
from leanbayes.evaluation.curves import curves_of, entropy_edges, histogram, mistakes_of
from leanbayes.evaluation.detection import detection_scores
from leanbayes.evaluation.explanation import explanation_scores
from leanbayes.evaluation.levels import FAMILIES, Level, levels
from leanbayes.evaluation.outcomes import ClassOutcome, joined, outcome_of
from leanbayes.evaluation.pruning import CRITERIA, SHARES, prune
from leanbayes.evaluation.scores import Scores, ignored, predictions
from leanbayes.evaluation.shift import label_shift
from leanbayes.evaluation.temperature import fit_temperature
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import get_rule

BATCH, PIXELS = 500, 500 * 64 * 64  # largest number of examples and of pixels per batch
_CACHED_BYTES = 2**30  # examples that need more memory are read again for each level of a shift
UNCERTAINTIES: dict[str, Callable[[ClassOutcome], Tensor]] = {  # by which OOD data are detected
    "max_probability": lambda outcome: -outcome.confidence,
    "entropy": lambda outcome: outcome.entropy,
    "mutual_information": lambda outcome: outcome.mutual_information,
}
_CONCENTRATIONS = (10.0, 1.0, 0.1)  # of label shift, from mild to strong

OnProgress = Callable[[str, int, int], None]  # gets the name of the next step, steps done, and steps in total


@configurable
@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of `evaluate_fully`.

    Attributes:
        samples: Monte Carlo samples per prediction. None means the default of the method.
        rule: how random weights are combined with activations. None means the rule used in training.
        shifts: kinds of shift to evaluate: corruptions, rotation, noise, labels.
        shift_examples: largest number of test examples per level of a shift.
        ood_examples: largest number of examples per out-of-distribution data set.
        pruning: set more and more weights to zero, the least important first, and score the remaining network.
        explained: number of test examples for metrics of saliency maps. This needs captum and is slow.
        seed: seed of the Monte Carlo samples and of the shifts.

    Raises:
        LeanBayesError: If a kind of shift or a rule is unknown, or a number is too small.

    Example:
        >>> settings = EvaluationSettings(samples=30, shifts=("noise", "labels"), pruning=False)
        >>> evaluate_fully(bnn, data, settings)["scores"]["nll"]
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


@checked("data")
def evaluate_fully(
    bnn: BayesianModel,
    data: Data,
    settings: EvaluationSettings | None = None,
    *,
    ood: Mapping[str, Dataset[Any]] | None = None,
    workers: int = 0,
    on_progress: OnProgress = lambda what, done, of: None,
) -> dict[str, Any]:
    """Evaluate a model on the test data of its task: scores, shifts, OOD detection, pruning and cost.

    Under `torch.distributed`, every process that calls this function does the whole evaluation.

    Args:
        bnn: The trained model. It is not changed.
        data: The data set, with a test split.
        settings: What to evaluate and how. Defaults to `EvaluationSettings()`.
        ood: Out-of-distribution data sets by name, for classifiers.
        workers: Worker processes that read data.
        on_progress: Called before each step with its name, the number of steps done, and the total number of steps.

    Returns:
        A dict that can be written as JSON:

        - "settings": the settings.
        - "scores": all metrics on the test data, and the number of "examples".
        - "curves": reliability bins, risk over coverage, histograms of the entropy, IoU per class, interval coverage.
        - "mistakes": index, truth, answer and confidence of all wrong answers, the most confident first.
        - "asking": a threshold below which a person is asked, chosen on the held-out split, and its effect on the test
          data.
        - "shifts": the scores at each level of each shift, on "shift_examples" examples.
        - "ood": detection metrics for each out-of-distribution data set, by three measures of uncertainty.
        - "pruning": the scores for each share of pruned weights, by criterion.
        - "explanation": metrics of saliency maps.
        - "scaled": for a plain network, the same (without pruning, explanation and costs) with its confidence rescaled
          by a "temperature" that the held-out split determines.
        - "costs": the costs of the model ("ours") and of the deterministic network ("plain"), and their "ratios".

    Raises:
        LeanBayesError: If data is not a `Data` or has no test split, or if ood is given for a model that does not
            predict classes.

    Example:
        >>> from leanbayes.data import from_datasets
        >>> data = from_datasets(train_set, test=test_set)
        >>> result = evaluate_fully(bnn, data, EvaluationSettings(samples=30))
        >>> result["scores"]["ece"], result["costs"]["ratios"]["predict_ms_per_1000"]
    """
    if not isinstance(data, Data):
        raise LeanBayesError(
            f"data must be a leanbayes.data.Data, not {type(data).__name__}: use from_datasets(train, test=test)."
        )
    return _FullEvaluation(bnn, data, settings or EvaluationSettings(), ood or {}, workers, on_progress).run()


class _FullEvaluation:
    """One call of `evaluate_fully`."""

    def __init__(
        self,
        bnn: BayesianModel,
        data: Data,
        settings: EvaluationSettings,
        ood: Mapping[str, Dataset[Any]],
        workers: int,
        on_progress: OnProgress,
    ) -> None:
        if data.test is None:
            raise LeanBayesError(f"{data.name} has no test data: pass data with a test split.")
        if ood and data.task != "classification":
            raise LeanBayesError(
                f"{data.name} is a {data.task} task, and only classifiers can detect OOD data: remove ood=."
            )
        self.bnn, self.data, self.settings, self.workers = bnn, data, settings, workers
        self.test: Dataset[Any] = data.test
        self.ood = dict(ood)
        self.criteria = [by for by in CRITERIA if settings.pruning and _can_be_pruned(bnn, by)]
        self.cached: list[Any] | None = self._read_once() if {*settings.shifts} - {"labels"} else []
        self.levels = levels(settings.shifts, self._to_shift())
        self.views: list[Callable[[Any], Any]] = [lambda outcome: outcome]
        self._on_progress, self._done = on_progress, 0

    def _next(self, what: str) -> None:
        total = 2 + len(self.levels) + len(self.ood) + len(self.criteria) + bool(self.settings.explained)
        self._on_progress(what, self._done, total)
        self._done += 1

    def run(self) -> dict[str, Any]:
        held_out = self._held_out()
        temperature = fit_temperature(held_out) if isinstance(self.bnn.method, Deterministic) else None
        # The predictions as they are, and for a plain network also with temperature.
        self.views = [lambda outcome: outcome, *([temperature] if temperature else [])]
        views = self._evaluated_views(held_out)
        result = {
            "settings": asdict(self.settings),
            **views[0],
            "scaled": {"temperature": temperature.value, **views[1]} if temperature else {},
            "shift_examples": min(self.settings.shift_examples, check_map_style(self.test)),
            "pruning": {by: self._pruned(by) for by in self.criteria},
            "explanation": self._explained() if self.settings.explained else {},
            "costs": self._costs(),
        }
        self._next("done")
        return result

    def _held_out(self) -> Any:
        """Return the outcome of the held-out split, which chooses thresholds and temperatures; None for none."""
        if self.data.task == "segmentation" or not check_map_style(self.data.validation):
            return None
        return self._outcome(self._batches(self.data.validation), [])

    def _evaluated_views(self, held_out: Any) -> list[dict[str, Any]]:
        """Return the results of each view on the test data, under shift, and on OOD data."""
        self._next("test data")
        labeled: list[Tensor] = []
        outcomes: list[Any]
        if self.data.task == "segmentation":  # pixels are too many to be kept
            scores, outcomes = self._scored(self._batches(self.test), details=True), [None]
        else:
            whole = self._outcome(self._batches(self.test), labeled)
            outcomes, scores = [view(whole) for view in self.views], [self._scores(details=True) for _ in self.views]
            for one, found in zip(scores, outcomes, strict=True):
                one.take(found)
        shifts, ood = self._shifts(), self._ood(outcomes)
        return [
            {
                "scores": {**one.compute(), "examples": check_map_style(self.test)},
                "curves": curves_of(one),
                "mistakes": mistakes_of(found, torch.cat(labeled)) if isinstance(found, ClassOutcome) else {},
                "asking": asking_of(None if held_out is None else view(held_out), found),
                "shifts": [*shifted, *self._label_shifts(found)],
                "ood": detected,
            }
            for view, one, found, shifted, detected in zip(self.views, scores, outcomes, shifts, ood, strict=True)
        ]

    def _outcome(self, batches: Iterable[Any], labeled: list[Tensor]) -> Any:
        """Return one outcome of all examples, on the CPU; labeled gets which examples of each batch have a label."""
        found = []
        for prediction, y in self._predictions(batches):
            found.append(outcome_of(prediction, y, ignored(self.bnn), self.data.target_std).to("cpu"))
            if y.dim() == 1:
                labeled.append((y != ignored(self.bnn)).cpu())
        return joined(found)

    def _scored(self, batches: Iterable[Any], details: bool = False) -> list[Scores]:
        """Predict batches and score them in each view, without keeping the predictions."""
        found = [self._scores(details) for _ in self.views]
        for prediction, y in self._predictions(batches):
            outcome = outcome_of(prediction, y, ignored(self.bnn), self.data.target_std)
            for scores, view in zip(found, self.views, strict=True):
                scores.take(view(outcome))
        return found

    def _costs(self) -> dict[str, Any]:
        self._next("cost")
        x, _ = next(self._batches(self.test))
        found = costs_of(self.bnn, x, samples=self.settings.samples, rule=self.settings.rule)
        samples = None if self.bnn.joint else 1
        one_pass = count_flops(self.bnn, x, samples, self.bnn.trained_rule)  # a training pass, whatever rule predicts
        work = one_pass.effective * self.bnn.loss_passes / found.examples
        return {**asdict(found), "ratios": found.ratios(), "train_flops": work}

    def _batches(self, dataset: Dataset[Any], limit: int | None = None, normalize: bool = True) -> Iterator[Any]:
        """Yield batches in a fixed order, of at most `limit` examples chosen by the seed."""
        return Batches(
            some(dataset, limit, self.settings.seed),
            batch_size(self.data.input_shape),
            device=self.bnn.device,
            shuffle=False,
            normalize=self.data.normalize if normalize else None,
            workers=self.workers,
            dtype=input_dtype(self.bnn),
        ).epoch()

    def _predictions(self, batches: Iterable[Any], bnn: BayesianModel | None = None) -> Iterator[tuple[Any, Tensor]]:
        settings = self.settings
        return predictions(bnn or self.bnn, batches, samples=settings.samples, rule=settings.rule, seed=settings.seed)

    def _scores(self, details: bool = False) -> Scores:
        return Scores(ignored(self.bnn), self.data.target_std, details=details, alone=True)

    # -- shift --------------------------------------------------------------------------------------------------------

    def _read_once(self) -> list[Any] | None:
        """Read the examples to shift, or return None if they are too large to keep in memory."""
        cached, size = [], 0
        for batch in self._batches(self.test, self.settings.shift_examples, normalize=False):
            cached.append(batch)
            size += sum(tensor.nbytes for tensor in tensors_of(batch))
            if size > _CACHED_BYTES:
                return None
        return cached

    def _to_shift(self) -> Iterable[tuple[Any, Tensor]]:
        if self.cached is not None:
            return self.cached
        return self._batches(self.test, self.settings.shift_examples, normalize=False)

    def _shifts(self) -> list[list[dict[str, Any]]]:
        """Return the scores at each level, for each view."""
        found: list[list[dict[str, Any]]] = [[] for _ in self.views]
        for level in self.levels:
            self._next(f"{level.name.replace('_', ' ')} {level.level:g}")
            about = {"family": level.family, "name": level.name, "level": level.level}
            for own, scores in zip(found, self._scored(self._shifted(level)), strict=True):
                own.append({**about, "scores": scores.compute()})
        return found

    def _shifted(self, level: Level) -> Iterator[tuple[Tensor, Tensor]]:
        """Shift images before normalization, and other inputs as they are."""
        for number, (x, y) in enumerate(self._to_shift()):
            generator = torch.Generator().manual_seed(mix(self.settings.seed, number))
            if x.dtype == torch.uint8:
                x = x / 255
            x = level.change(x, generator)
            x = self.data.normalize(x) if self.data.normalize and x.dim() == 4 else x
            yield x.to(dtype=input_dtype(self.bnn)), y

    def _label_shifts(self, found: Any) -> Iterator[dict[str, Any]]:
        """Score the same predictions under other class proportions."""
        if "labels" not in self.settings.shifts or not isinstance(found, ClassOutcome):
            return
        for concentration in _CONCENTRATIONS:
            generator = torch.Generator().manual_seed(mix(self.settings.seed))
            scores = self._scores()
            scores.take(found.rows(label_shift(found.labels, generator, concentration)))
            yield {"family": "labels", "name": "labels", "level": concentration, "scores": scores.compute()}

    # -- pruning and explanations -------------------------------------------------------------------------------------

    def _pruned(self, by: str) -> list[dict[str, float]]:
        """Score the model on unshifted examples, with more and more weights set to zero."""
        self._next(f"pruning by {by}")
        points = []
        for share in SHARES:
            scores, batches = self._scores(), self._batches(self.test, self.settings.shift_examples)
            for prediction, y in self._predictions(batches, prune(self.bnn, share, by)):
                scores.update(prediction, y)
            points.append({"share": share, **scores.compute()})
        return points

    def _explained(self) -> dict[str, float]:
        self._next("explanations")
        settings, batches = self.settings, self._batches(self.test, self.settings.explained)
        target = 0 if self.data.task == "regression" else None  # the first output, or the predicted class
        return explanation_scores(
            self.bnn, batches, target=target, samples=settings.samples, rule=settings.rule, seed=settings.seed
        )

    # -- out-of-distribution data -------------------------------------------------------------------------------------

    def _ood(self, inside: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the detection of each OOD data set, for each view."""
        if self.ood and not isinstance(inside[0], ClassOutcome):
            raise LeanBayesError("Only a model that predicts classes can detect OOD data: remove ood=.")
        result: list[dict[str, Any]] = [{} for _ in self.views]
        for name, dataset in self.ood.items():
            self._next(name)
            predicted = self._predictions(self._batches(dataset, self.settings.ood_examples))
            outside = joined([_without_labels(prediction) for prediction, _ in predicted])
            for own, view, known in zip(result, self.views, inside, strict=True):
                unknown = view(outside)
                scores = {measure: detection_scores(of(known), of(unknown)) for measure, of in UNCERTAINTIES.items()}
                edges = entropy_edges(known.probs.shape[-1])
                own[name] = {"examples": len(unknown), "by": scores, "entropy": histogram(unknown.entropy, edges)}
        return result


def _can_be_pruned(bnn: BayesianModel, by: str) -> bool:
    try:
        prune(bnn, 0.0, by)
    except LeanBayesError:  # there are no weights, or they have no std
        return False
    return True


def _without_labels(prediction: Any) -> ClassOutcome:
    """Return an outcome of which only the uncertainty has a meaning."""
    nothing = torch.zeros(len(prediction.probs), dtype=torch.long)
    found = ClassOutcome(prediction.probs, nothing, prediction.entropy, prediction.mutual_information)
    return found.to("cpu")


def some(dataset: Dataset[Any], limit: int | None, seed: int) -> Dataset[Any]:
    """Return at most `limit` examples, chosen at random, in their original order."""
    total = check_map_style(dataset)
    if limit is None or limit >= total:
        return dataset
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(mix(seed)), device="cpu")[:limit]
    return Subset(dataset, sorted(chosen.tolist()))


def batch_size(input_shape: Sequence[int]) -> int:
    """Return the number of examples to predict at once."""
    pixels = math.prod(input_shape[1:]) if len(input_shape) == 3 else 1
    return max(1, min(BATCH, PIXELS // pixels))
