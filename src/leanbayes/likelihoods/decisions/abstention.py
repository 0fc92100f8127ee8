"""Abstain: answer only if the uncertainty is below a threshold, so that few answers are wrong, with a guarantee.

The threshold is chosen on n held-out examples, among at most 20 that accept fixed numbers of them: the t with exactly m
examples below it (fewer if scores are equal). Given t, the examples below it are independent samples of all inputs that
the threshold accepts, so the number of wrong ones is binomial, and

    p = P(Binomial(examples below t, risk) ≤ wrong ones)

is a p-value of the hypothesis that the error of accepted answers exceeds the risk (Clopper & Pearson 1934). A union
bound over the thresholds makes the choice of the one that accepts most valid (Learn then Test, Angelopoulos et al.
2021, arXiv:2110.01052).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.decisions.checked_values import SCORES, check_finite, check_fraction, check_scores

MOST_THRESHOLDS = 20


@configurable
@dataclass(frozen=True)
class Abstention:
    """Answer if the uncertainty is below a threshold. `lb.decide.fit` chooses it.

    Attributes:
        risk: The largest allowed share of wrong answers among those that are given.
        confidence: The probability, over held-out sets, that the risk is kept.
        score: The uncertainty that is compared: "confidence" is 1 minus the highest probability.
        threshold: The threshold; None if every input is answered.
        examples: The number of held-out examples.
        answered: The share of them that is answered.
        wrong: The share of these answers that is wrong.
        tolerance: The error of a regression that still counts as right; None for classes.

    Example:
        >>> lb.decide.fit(bnn, validation_loader, risk=0.01).abstention.answered
        0.912
    """

    risk: float
    confidence: float
    score: str
    threshold: float | None
    examples: int
    answered: float
    wrong: float
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_fraction(risk=self.risk, confidence=self.confidence)
        check_finite(answered=self.answered, wrong=self.wrong, examples=self.examples)
        for name in ("threshold", "tolerance"):
            if getattr(self, name) is not None:
                check_finite(**{name: getattr(self, name)})
        if self.score not in SCORES:
            raise LeanBayesError(f"score={self.score!r} is unknown: use one of {', '.join(SCORES)}.")

    def accepts(self, scores: Tensor) -> Tensor:
        """Return whether each example is answered, given its uncertainty."""
        return torch.ones_like(scores, dtype=torch.bool) if self.threshold is None else scores < self.threshold

    def __str__(self) -> str:
        right = "" if self.tolerance is None else f" by more than {self.tolerance:.4g}"
        return (
            f"answers {self.answered:.1%} of {self.examples:,} held-out examples, of which {self.wrong:.2%} are wrong"
            f"{right}; with {self.confidence:.0%} confidence at most {self.risk:.2%} of all answers will be (by "
            f"{self.score.replace('_', ' ')})"
        )


def fit_abstention(
    scores: Tensor,
    wrong: Tensor,
    risk: float,
    confidence: float,
    score: str,
    tolerance: float | None = None,
    *,
    not_answered: int = 0,
) -> Abstention:
    """Choose the threshold that answers most examples with an error of at most `risk`.

    Args:
        scores: The uncertainty of each held-out example, (n,).
        wrong: Whether its answer is wrong, (n,).
        risk: The largest allowed share of wrong answers.
        confidence: The probability that it is kept.
        score: The name of the uncertainty.
        tolerance: What counts as wrong, for a regression.
        not_answered: The number of other held-out examples, which are not answered for another reason.

    Raises:
        LeanBayesError: No threshold keeps the risk with this confidence.
    """
    check_fraction(risk=risk, confidence=confidence)
    scores, order = check_scores(scores, score).sort()
    errors = torch.cat([torch.zeros(1), wrong.detach().cpu()[order].double().cumsum(0)]).long()
    count = _accepted(scores, errors, risk, 1 - confidence)
    if count is None:
        raise LeanBayesError(_refusal(scores, errors, risk, confidence, not_answered))
    threshold = None if count == len(scores) else scores[count].item()
    wrong_share, examples = int(errors[count]) / count, len(scores) + not_answered
    return Abstention(risk, confidence, score, threshold, examples, count / examples, wrong_share, tolerance)


def _accepted(scores: Tensor, errors: Tensor, risk: float, level: float) -> int | None:
    """Return how many examples are below the highest threshold that keeps the risk, or None if there is none.

    Args:
        scores: Sorted scores, (n,).
        errors: The number of errors among the first 0, 1, ... n examples.
        risk: The largest allowed share of errors.
        level: The probability that the result is wrong.
    """
    counts = candidate_counts(len(scores), risk, level)
    for count in reversed(counts):
        below = count if count == len(scores) else int(torch.searchsorted(scores, scores[count]))
        if below and binomial_tail(int(errors[below]), below, risk) <= level / len(counts):
            return below
    return None


def candidate_counts(examples: int, risk: float, level: float) -> list[int]:
    """Return the numbers of accepted examples to test, evenly spaced from the lowest that can pass without an error."""
    for number in range(MOST_THRESHOLDS, 0, -1):
        least = least_examples(risk, level / number)
        if least <= examples:
            return (
                torch.linspace(least, examples, number).round().long().unique().tolist() if number > 1 else [examples]
            )
    return []


def least_examples(risk: float, level: float) -> int:
    """Return how many examples without an error show that the risk is kept: the lowest n with (1 - risk)^n ≤ level."""
    return math.ceil(math.log(level) / math.log1p(-risk) - 1e-9)


def binomial_tail(errors: int, count: int, rate: float) -> float:
    """Return P(Binomial(count, rate) ≤ errors)."""
    i = torch.arange(errors + 1, dtype=torch.float64)
    total = torch.tensor(float(count), dtype=torch.float64)
    choices = (total + 1).lgamma() - (i + 1).lgamma() - (total - i + 1).lgamma()
    logs = choices + i * math.log(rate) + (total - i) * math.log1p(-rate)
    return min(1.0, logs.logsumexp(0).exp().item())


def _refusal(scores: Tensor, errors: Tensor, risk: float, confidence: float, alarms: int) -> str:
    examples, level = len(scores), 1 - confidence
    least = least_examples(risk, level)
    without = " without an alarm" if alarms else ""
    if least > examples:
        return (
            f"{examples:,} held-out examples{without} are too few for a risk of {risk:.3g}: with {confidence:.0%} "
            f"confidence, even {least - 1:,} right answers do not show it. Hold out at least {least:,}, or allow a "
            "higher risk."
        )
    possible = sorted(
        {round(risk * 1.1**place, 3) for place in range(1, 100) if risk < round(risk * 1.1**place, 3) < 1}
    )
    lowest = next((higher for higher in possible if _accepted(scores, errors, higher, level) is not None), None)
    remedy = "train a better model" if lowest is None else f"allow a risk of {lowest:.1%}, which can be kept"
    return (
        f"No threshold keeps the error of accepted answers below {risk:.3g} with {confidence:.0%} confidence: "
        f"{remedy}, or hold out more than {examples:,} examples."
    )
