"""The OOD gate: an alarm for inputs that are more uncertain than nearly all held-out ones, with few false alarms.

The conformal p-value of an input is p = (1 + held-out examples that are at least as uncertain) / (n + 1). If the input
comes from the same distribution as the held-out ones, P(p ≤ α) ≤ α for every α (Vovk et al. 2005), so that an alarm at
p ≤ α has at most the false-alarm rate α.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.decisions.checked_values import SCORES, check_finite, check_fraction, check_scores

_MOST_STORED = 1000  # scores in the model file


@configurable
@dataclass(frozen=True)
class OODGate:
    """Raise an alarm if the uncertainty is above a threshold. `lb.decide.fit` chooses it.

    Attributes:
        false_alarms: The largest share of alarms among inputs like the held-out ones.
        score: The uncertainty that is compared.
        threshold: The threshold.
        examples: The number of held-out examples.
        scores: Their uncertainties in descending order; of more than 1000, evenly spaced ranks.

    Example:
        >>> gate = lb.decide.fit(bnn, validation_loader, false_alarms=0.05).gate
        >>> gate.p_values(bnn.predict(x).mutual_information)
    """

    false_alarms: float
    score: str
    threshold: float
    examples: int
    scores: tuple[float, ...]

    def __post_init__(self) -> None:
        check_fraction(false_alarms=self.false_alarms)
        check_finite(threshold=self.threshold, examples=self.examples)
        if self.score not in SCORES:
            raise LeanBayesError(f"score={self.score!r} is unknown: use one of {', '.join(SCORES)}.")
        if not isinstance(self.scores, tuple) or len(self.scores) != min(self.examples, _MOST_STORED):
            raise LeanBayesError("The scores of an OODGate must be those of its held-out examples: fit it again.")
        for value in self.scores:
            check_finite(scores=value)

    def alarms(self, scores: Tensor) -> Tensor:
        """Return whether each example raises an alarm, given its uncertainty."""
        return scores > self.threshold

    def p_values(self, scores: Tensor) -> Tensor:
        """Return the conformal p-value of each example: low if it is unlike the held-out ones.

        If not all held-out scores are stored, it is the highest value that fits those that are.
        """
        stored = torch.tensor(self.scores, dtype=torch.float64, device=scores.device).flip(0)
        known = len(stored) - torch.searchsorted(stored, scores.double().contiguous())  # at least as uncertain
        ranks = torch.tensor([*stored_ranks(self.examples), self.examples + 1], device=scores.device)
        return ranks[known].double() / (self.examples + 1)

    def __str__(self) -> str:
        return (
            f"raises an alarm if the {self.score.replace('_', ' ')} is above {self.threshold:.4g}: at most "
            f"{self.false_alarms:.1%} of inputs like the {self.examples:,} held-out ones"
        )


def stored_ranks(examples: int) -> list[int]:
    """Return the ranks, from 1 for the most uncertain, of the scores that are stored."""
    number = min(examples, _MOST_STORED)
    return [-(-place * examples // number) for place in range(1, number + 1)]


def fit_gate(scores: Tensor, false_alarms: float, score: str) -> OODGate:
    """Choose the threshold at a false-alarm rate.

    Args:
        scores: The uncertainty of each held-out example, (n,).
        false_alarms: The largest allowed share of false alarms.
        score: The name of the uncertainty.

    Raises:
        LeanBayesError: There are too few examples, or most have the same score.
    """
    check_fraction(false_alarms=false_alarms)
    ordered = check_scores(scores, score).sort(descending=True).values
    examples = len(ordered)
    alarms = int(false_alarms * (examples + 1) * (1 + 1e-12))  # 0.29 · 100 is less than 29 in floating point
    if not alarms:
        raise LeanBayesError(
            f"{examples:,} held-out examples are too few for a false-alarm rate of {false_alarms:.3g}: hold out at "
            f"least {math.ceil(1 / false_alarms - 1 - 1e-9):,}, or allow more false alarms."
        )
    threshold = ordered[alarms - 1].item()
    if 2 * int((ordered < threshold).sum()) < examples:
        raise LeanBayesError(
            f"Most held-out examples have the same {score.replace('_', ' ')}, so it cannot detect unfamiliar inputs: "
            "use another ood_score, such as 'entropy'."
        )
    stored = tuple(ordered[torch.tensor(stored_ranks(examples)) - 1].tolist())
    return OODGate(false_alarms, score, threshold, examples, stored)
