"""A policy turns predictions into decisions: answer or ask a person, and sets or intervals."""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.likelihoods.decisions.abstention import Abstention
from leanbayes.likelihoods.decisions.checked_values import class_probs, epistemic_share, uncertainty
from leanbayes.likelihoods.decisions.conformal import ConformalIntervals, ConformalSets
from leanbayes.likelihoods.decisions.ood_gate import OODGate
from leanbayes.likelihoods.predictive import Prediction, RegressionPrediction

ANSWER = "answer"
AMBIGUOUS = "ask a person: the inputs are ambiguous"
UNKNOWN = "ask a person: the model knows too little about this input"
UNFAMILIAR = "ask a person: unlike the training data"
_MOSTLY = 0.5  # share of the uncertainty
_PARTS = {"abstention": Abstention, "gate": OODGate, "sets": ConformalSets, "intervals": ConformalIntervals}


@dataclass(frozen=True, repr=False)
class Decision:
    """What to do with each input of a batch.

    Attributes:
        accepted: Whether the prediction is given as an answer, (examples,).
        alarm: Whether the input is unlike the training data, (examples,).
        p_values: The conformal p-value that it is like them, (examples,). None without an OOD gate.
        sets: Whether each class is in the set, (examples, classes). None without conformal sets.
        interval: Lower and upper ends, each of the shape of the predicted mean. None without conformal intervals.
        epistemic: The share of the uncertainty that is lack of knowledge, which more training data would remove, and
            not noise in the data, (examples,).

    Example:
        >>> decision = policy(bnn.predict(x))
        >>> prediction.label[decision.accepted]
    """

    accepted: Tensor
    alarm: Tensor
    p_values: Tensor | None = None
    sets: Tensor | None = None
    interval: tuple[Tensor, Tensor] | None = None
    epistemic: Tensor | None = None

    @property
    def verdict(self) -> list[str]:
        """What to do with each input, in words: "answer", or "ask a person" and why.

        An input without an alarm that is not answered is ambiguous, unless most of its uncertainty is epistemic.
        """
        unknown = torch.zeros_like(self.accepted) if self.epistemic is None else self.epistemic > _MOSTLY
        rows = zip(self.accepted.tolist(), self.alarm.tolist(), unknown.tolist(), strict=True)
        return [ANSWER if yes else UNFAMILIAR if alarm else UNKNOWN if new else AMBIGUOUS for yes, alarm, new in rows]

    def __repr__(self) -> str:
        counts = {verdict: self.verdict.count(verdict) for verdict in (ANSWER, AMBIGUOUS, UNKNOWN, UNFAMILIAR)}
        parts = [f"{verdict}: {count:,}" for verdict, count in counts.items() if count]
        return f"Decision({len(self.accepted):,} examples; {'; '.join(parts)})"


@configurable
@dataclass(frozen=True)
class Policy:
    """When to answer, when to ask a person, and what to answer with. `lb.decide.fit` makes one.

    Attributes:
        rule: The rule of the predictions that it was fitted to, with its settings.
        samples: Their number of Monte Carlo samples.
        abstention: When to abstain.
        gate: When an input is unlike the training data.
        sets: Sets of classes.
        intervals: Intervals of a regression.

    Example:
        >>> policy = lb.decide.fit(bnn, validation_loader, risk=0.01, false_alarms=0.05, coverage=0.9)
        >>> decision = policy(bnn.predict(x))
        >>> decision.verdict[0]
        'ask a person: unlike the training data'
    """

    rule: str
    samples: int
    abstention: Abstention | None = None
    gate: OODGate | None = None
    sets: ConformalSets | None = None
    intervals: ConformalIntervals | None = None

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), (kind, type(None))):
                raise LeanBayesError(f"{name} must be a {kind.__name__} or None: fit the policy again.")

    def __call__(self, prediction: Prediction) -> Decision:
        """Decide about each input of a batch.

        Args:
            prediction: What `bnn.predict` returned, with the rule and the samples of the fit.

        Raises:
            LeanBayesError: The prediction is of another kind than those of the fit.
        """
        regression = isinstance(prediction, RegressionPrediction)
        if self.sets is not None if regression else self.intervals is not None:
            kind = "classes" if regression else "a regression"
            raise LeanBayesError(f"A policy for {kind} cannot decide about a {type(prediction).__name__}: fit another.")
        if prediction.samples != self.samples or (prediction.rule or self.rule) != self.rule:
            warnings.warn(
                f"The policy was fitted to predictions {self.way}, but this one is "
                f"{_way(prediction.samples, prediction.rule)}: its guarantees need predictions that are made in the "
                "same way.",
                RuleMismatchWarning,
                stacklevel=2,
            )
        rows = len(uncertainty(prediction, "std" if regression else "confidence"))
        accepted, alarm, p_values = _all(prediction, rows, True), _all(prediction, rows, False), None
        if self.gate is not None:
            unfamiliar = uncertainty(prediction, self.gate.score)
            alarm, p_values = self.gate.alarms(unfamiliar), self.gate.p_values(unfamiliar)
            accepted = ~alarm if self.abstention is None else unfamiliar < self.gate.threshold
        if self.abstention is not None:
            accepted = accepted & self.abstention.accepts(uncertainty(prediction, self.abstention.score))
        interval = None
        if self.intervals is not None and isinstance(prediction, RegressionPrediction):
            interval = self.intervals(prediction.mean, prediction.std)
        sets = None if self.sets is None else self.sets(class_probs(prediction))
        return Decision(accepted, alarm, p_values, sets, interval, epistemic_share(prediction))

    @property
    def way(self) -> str:
        """How the predictions of the fit were made."""
        return _way(self.samples, self.rule)

    def sentences(self, target_std: float = 1.0) -> list[str]:
        """Describe each part of the policy.

        Args:
            target_std: For a regression with standardized targets, their std: errors and stds have the unit of the
                target then, and not that of the standardized one.
        """
        gate, abstention = self.gate, self.abstention
        if gate is not None and gate.score.endswith("std"):
            gate = replace(gate, threshold=gate.threshold * target_std)
        if abstention is not None and abstention.tolerance is not None:
            abstention = replace(abstention, tolerance=abstention.tolerance * target_std)
        found = [abstention, gate, self.sets, self.intervals]
        return [f"{str(part)[0].upper()}{str(part)[1:]}." for part in found if part is not None]

    def __str__(self) -> str:
        return " ".join([f"Predictions {self.way}.", *self.sentences()])


def _all(prediction: Prediction, rows: int, value: bool) -> Tensor:
    like = prediction.mean if isinstance(prediction, RegressionPrediction) else class_probs(prediction)
    return torch.full((rows,), value, device=like.device)


def _way(samples: int, rule: str | None) -> str:
    how = "one pass" if samples == 1 else f"{samples} samples"
    return f"with {how}" if rule is None else f"with {how} (rule {rule})"
