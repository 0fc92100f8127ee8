"""Split conformal prediction: sets of classes and intervals that contain the truth with a chosen probability.

For n held-out scores and a new one from the same distribution, the new one is at most the ⌈(n + 1)·coverage⌉-th lowest
with at least that probability, whatever the model (Vovk et al. 2005). The scores are

    threshold sets: 1 - p(y)                               (Sadinle et al. 2019, arXiv:1609.00451)
    adaptive sets:  Σ p(k) over the classes k with p(k) > p(y)   (Romano et al. 2020, arXiv:2006.02544, not randomized)
    intervals:      |y - mean| / std, the highest of several targets

and a set has all classes, an interval all targets, whose score is at most that quantile.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leanbayes.core.config import check_choices, configurable
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.decisions.checked_values import check_finite, check_fraction, check_scores

SetKind = Literal["adaptive", "threshold"]


@configurable
@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes that contain the true one with a chosen probability. `lb.decide.fit` fits them.

    Attributes:
        coverage: The least probability that the true class is in the set.
        kind: "adaptive" sets are never empty and larger for difficult inputs; "threshold" sets are the smallest on
            average, but can be empty.
        quantile: The highest score of a class in the set.
        examples: The number of held-out examples.

    Example:
        >>> sets = lb.decide.fit(bnn, validation_loader, coverage=0.9).sets
        >>> sets(bnn.predict(x).probs)  # (examples, classes), bool
    """

    coverage: float
    kind: SetKind
    quantile: float
    examples: int

    def __post_init__(self) -> None:
        check_fraction(coverage=self.coverage)
        check_finite(quantile=self.quantile, examples=self.examples)
        check_choices(self, kind=SetKind)

    def __call__(self, probs: Tensor) -> Tensor:
        """Return whether each class is in the set, (examples, classes), given their probabilities."""
        return class_scores(probs.double(), self.kind) <= self.quantile

    def __str__(self) -> str:
        return f"{self.kind} sets contain the true class for at least {self.coverage:.1%} of inputs"


@configurable
@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals mean ± quantile · std that contain the target with a chosen probability. `lb.decide.fit` fits them.

    Attributes:
        coverage: The least probability that the target (all targets of an example) is inside.
        quantile: The half width of the intervals, in stds.
        examples: The number of held-out examples.

    Example:
        >>> low, high = lb.decide.fit(bnn, validation_loader, coverage=0.9)(bnn.predict(x)).interval
    """

    coverage: float
    quantile: float
    examples: int

    def __post_init__(self) -> None:
        check_fraction(coverage=self.coverage)
        check_finite(quantile=self.quantile, examples=self.examples)

    def __call__(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends of the intervals."""
        return mean - self.quantile * std, mean + self.quantile * std

    def __str__(self) -> str:
        return f"intervals of ±{self.quantile:.3g} stds contain the target for at least {self.coverage:.1%} of inputs"


def class_scores(probs: Tensor, kind: SetKind) -> Tensor:
    """Return the score of each class, (examples, classes): the lower, the sooner it is in the set."""
    if kind == "threshold":
        return 1 - probs
    ordered, places = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    first = torch.searchsorted(-ordered, -ordered)  # equal probabilities have the score of the first
    return torch.empty_like(probs).scatter_(-1, places, before.gather(-1, first))


def fit_sets(probs: Tensor, labels: Tensor, coverage: float, kind: SetKind) -> ConformalSets:
    """Fit sets to the probabilities (n, classes) and true labels (n,) of held-out examples.

    Raises:
        LeanBayesError: There are too few examples, or the kind is unknown.
    """
    check_fraction(coverage=coverage)
    scores = class_scores(probs.double(), kind).gather(-1, labels.long()[:, None])[:, 0]
    return ConformalSets(coverage, kind, conformal_quantile(scores, coverage), len(scores))


def fit_intervals(error: Tensor, std: Tensor, coverage: float) -> ConformalIntervals:
    """Fit intervals to the errors and stds of held-out examples, (n, ...) each.

    Raises:
        LeanBayesError: There are too few examples, or too many have a std of 0.
    """
    check_fraction(coverage=coverage)
    error, std = error.double().abs(), std.double()
    scores = torch.where(error == 0, 0.0, error / std)  # infinite for an error with a std of 0
    quantile = conformal_quantile(scores.flatten(1).amax(1) if scores.dim() > 1 else scores, coverage)
    if math.isinf(quantile):
        raise LeanBayesError("Too many predictions have a std of 0, so no interval reaches the coverage: train a std.")
    return ConformalIntervals(coverage, quantile, len(scores))


def conformal_quantile(scores: Tensor, coverage: float) -> float:
    """Return the ⌈(n + 1)·coverage⌉-th lowest of n scores."""
    scores = check_scores(scores, "score").sort().values
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)
    if rank > len(scores):
        least = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise LeanBayesError(
            f"{len(scores):,} held-out examples are too few for a coverage of {coverage:.3g}: hold out at least "
            f"{least:,}, or ask for a lower coverage."
        )
    return scores[rank - 1].item()
