"""Decisions instead of numbers: `lb.decide.fit` turns held-out data into a policy that answers or asks a person.

`lb.decide.acquire` chooses what to ask a person about, to train the model further.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.active_learning import acquire
from leanbayes.evaluation.outcomes import outcome_of
from leanbayes.evaluation.scores import ignored, predictions
from leanbayes.likelihoods import ClassPrediction, Prediction, RegressionPrediction
from leanbayes.likelihoods.decisions import Abstention, ConformalIntervals, ConformalSets, Decision, OODGate, Policy
from leanbayes.likelihoods.decisions.abstention import fit_abstention
from leanbayes.likelihoods.decisions.checked_values import class_probs, uncertainty
from leanbayes.likelihoods.decisions.conformal import SetKind, fit_intervals, fit_sets
from leanbayes.likelihoods.decisions.ood_gate import fit_gate
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Rule

__all__ = ["Abstention", "ConformalIntervals", "ConformalSets", "Decision", "OODGate", "Policy", "acquire", "fit"]
_LEAST_INFORMATION = 1e-4  # nats of median mutual information below which samples do not disagree


@checked()
def fit(
    bnn: BayesianModel,
    batches: Iterable[Any],
    *,
    risk: float | None = None,
    false_alarms: float | None = None,
    coverage: float | None = None,
    confidence: float = 0.95,
    score: str | None = None,
    ood_score: str | None = None,
    sets: SetKind = "adaptive",
    tolerance: float | None = None,
    samples: int | None = None,
    rule: str | Rule | None = None,
    seed: int = 0,
) -> Policy:
    """Fit a policy to held-out data, and store it as `bnn.policy`, which `lb.save` keeps.

    The guarantees hold for inputs from the distribution of the held-out data, if the model was neither trained nor
    selected on these, and if predictions are made as here: with the same rule and number of samples.

    Args:
        bnn: The trained model. Nothing but `bnn.policy` changes.
        batches: Held-out (input, label) pairs.
        risk: Abstain so that at most this share of the given answers is wrong. The bound holds with probability
            `confidence` over held-out sets, for the choice of the threshold too. None answers always.
        false_alarms: Ask a person about inputs unlike the training data, with at most this share of alarms among inputs
            like the held-out ones. None raises no alarm. Inputs with an alarm are not answered.
        coverage: The probability with which sets of classes, or intervals of a regression, contain the truth. None
            makes no sets and intervals.
        confidence: The probability that the risk is kept.
        score: The uncertainty that is compared to abstain: "confidence", "entropy" or "mutual_information", and "std"
            or "epistemic_std" for a regression. None means "confidence" or "std".
        ood_score: The same for alarms. None means "mutual_information" or "epistemic_std" if samples disagree, and
            otherwise "entropy" or "std".
        sets: "adaptive" or "threshold" sets of classes.
        tolerance: For the risk of a regression: the largest error of an answer that is not wrong.
        samples: Monte Carlo samples per prediction. None means the default of the method.
        rule: The rule of the predictions, a name or a rule with its own settings. None means the current one.
        seed: The seed of the samples.

    Returns:
        The policy: `policy(bnn.predict(x))` is a `Decision`.

    Raises:
        LeanBayesError: Nothing is asked for, a setting is invalid, the held-out examples are too few, or no threshold
            keeps the risk.

    Example:
        >>> policy = lb.decide.fit(bnn, validation_loader, risk=0.01, false_alarms=0.05, coverage=0.9)
        >>> decision = policy(bnn.predict(x))
        >>> decision.accepted, decision.verdict, decision.sets
    """
    if risk is None and false_alarms is None and coverage is None:
        raise LeanBayesError("There is nothing to decide: give at least one of risk, false_alarms and coverage.")
    held_out, y = _joined(predictions(bnn, batches, samples=samples, rule=rule, seed=seed), ignored(bnn))
    regression = isinstance(held_out, RegressionPrediction)
    if regression and risk is not None and tolerance is None:
        raise LeanBayesError("The risk of a regression needs a tolerance: give the largest error that is not wrong.")
    if not regression and tolerance is not None:
        raise LeanBayesError("A tolerance is for regressions: leave it out for classes.")
    gate = abstention = None
    if false_alarms is not None:
        name = ood_score or _ood_score(held_out)
        gate = fit_gate(uncertainty(held_out, name), false_alarms, name)
    if risk is not None:
        name = score or ("std" if regression else "confidence")
        values, wrong = uncertainty(held_out, name), _wrong(held_out, y, tolerance)
        # Given the threshold of the gate, the examples below it are independent samples of the inputs below it.
        below = torch.ones_like(wrong) if gate is None else uncertainty(held_out, gate.score) < gate.threshold
        alarms = int((~below).sum())
        abstention = fit_abstention(values[below], wrong[below], risk, confidence, name, tolerance, not_answered=alarms)
    conformal: dict[str, Any] = {}
    if coverage is not None and isinstance(held_out, RegressionPrediction):
        conformal["intervals"] = fit_intervals(y - held_out.mean, held_out.std, coverage)
    elif coverage is not None:
        conformal["sets"] = fit_sets(class_probs(held_out), y.flatten(), coverage, sets)
    assert held_out.rule is not None
    bnn.policy = Policy(held_out.rule, held_out.samples, abstention, gate, **conformal)
    return bnn.policy


def _joined(pairs: Iterable[tuple[Prediction, Tensor]], ignore_index: int) -> tuple[Prediction, Tensor]:
    """Return one prediction of all labeled examples, and their labels, on the CPU."""
    parts: list[dict[str, Any]] = []
    labels: list[Tensor] = []
    for prediction, y in pairs:
        outcome_of(prediction, y, ignore_index)  # checks the labels
        if not isinstance(prediction, RegressionPrediction):
            class_probs(prediction)  # refuses several answers per example
        counted = y != ignore_index if isinstance(prediction, ClassPrediction) else torch.ones_like(y, dtype=torch.bool)
        counted = counted.flatten(1).all(1) if counted.dim() > 1 else counted
        values = {one.name: getattr(prediction, one.name) for one in fields(prediction)}
        parts.append({name: v[counted].cpu() if isinstance(v, Tensor) else v for name, v in values.items()})
        labels.append(y[counted].cpu())
    if not labels:
        raise LeanBayesError("There are no held-out batches: pass (input, label) pairs.")
    joined: dict[str, Any] = {
        name: torch.cat([part[name] for part in parts]) if isinstance(value, Tensor) else value
        for name, value in parts[0].items()
    }
    return type(prediction)(**joined), torch.cat(labels)


def _ood_score(held_out: Prediction) -> str:
    """Return the epistemic uncertainty if the samples disagree, and otherwise the total one."""
    if isinstance(held_out, RegressionPrediction):
        return "epistemic_std" if (held_out.epistemic_variance > 0).any() else "std"
    disagreement = uncertainty(held_out, "mutual_information")
    return "mutual_information" if disagreement.numel() and disagreement.median() > _LEAST_INFORMATION else "entropy"


def _wrong(held_out: Prediction, y: Tensor, tolerance: float | None) -> Tensor:
    """Return whether the answer to each example is wrong."""
    if isinstance(held_out, RegressionPrediction):
        far = (y - held_out.mean).abs() > float(tolerance or 0)
        return far.flatten(1).any(1) if far.dim() > 1 else far
    return class_probs(held_out).argmax(-1) != y.flatten()
