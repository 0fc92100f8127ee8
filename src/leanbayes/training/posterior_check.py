"""Whether a trained posterior has collapsed to a point, or has drowned the likelihood: one sentence with a remedy."""

import math
from collections.abc import Mapping, Sequence

from leanbayes.data import Data
from leanbayes.model.method import Method

# Below these, samples hardly disagree: nats, and the share of the total uncertainty.
_POINT_INFORMATION, _POINT_SHARE = 1e-3, 0.02
# Above both of these, predictions suffer: nats of disagreement, and of entropy beyond the NLL.
_LARGE_INFORMATION, _LARGE_GAP = 0.1, 0.1
_CONSTANT = 0.9  # share of the score of a constant prediction above which nothing was learned


def posterior_problem(scores: Mapping[str, float], method: Method, temperature: float, data: Data) -> str | None:
    """Return what is wrong with the posterior of a trained model, and what to change, or None.

    Args:
        scores: The scores on the held-out split.
        method: The method. Without random weights or a temperature there is nothing to change.
        temperature: The temperature of the training.
        data: The data, for the score of a constant prediction.
    """
    if not method.has_temperature or not scores:
        return None
    learned = _nothing_learned(scores, data.outputs, data.target_std)
    information, entropy, nll = (scores.get(name, math.nan) for name in ("mutual_information", "entropy", "nll"))
    if learned:
        return (
            f"The model has hardly learned anything (held-out {learned}). See if the plain network learns with the "
            "same settings (lb.Deterministic, or leanbayes fit deterministic). If it does not, train longer, or change "
            f"the learning rate. If it does, the KL drowns the likelihood: take a temperature below {temperature:g}."
        )
    if information > _LARGE_INFORMATION and entropy - nll > _LARGE_GAP:
        return (
            f"The held-out predictions are less certain than they should be (entropy {entropy:.2f} nats, of which "
            f"{information:.2f} are disagreement between samples, and NLL {nll:.2f}): the KL drowns the likelihood, so "
            f"train longer, or with a temperature below {temperature:g}."
        )
    if information < min(_POINT_INFORMATION, _POINT_SHARE * entropy) or _is_point(scores):
        disagreement = f" (mean mutual information {information:.1g} nats)" if information >= 0 else ""
        warmer = f"a temperature above {temperature:g}"
        if method.engine == "ivon":  # its stds hardly move from where they start
            warmer = f"a smaller hess_init, or {warmer},"
        return (
            f"Samples of the weights hardly disagree{disagreement}: the posterior is nearly a point and will not "
            f"notice unknown inputs, so train with {warmer} or with more Bayesian weights."
        )
    return None


def _nothing_learned(scores: Mapping[str, float], outputs: int, target_std: Sequence[float]) -> str:
    """Return the score that is as bad as that of a constant prediction, in words, or nothing."""
    if "mutual_information" in scores and outputs > 1 and scores["nll"] > _CONSTANT * math.log(outputs):
        return f"NLL {scores['nll']:.2f}, and {math.log(outputs):.2f} for equal probabilities"
    if "rmse" in scores and len(target_std) == 1 and scores["rmse"] > _CONSTANT * target_std[0]:
        return f"RMSE {scores['rmse']:.3g}, and {target_std[0]:.3g} for the mean target"
    return ""


def _is_point(scores: Mapping[str, float]) -> bool:
    """Whether the means of a regression hardly differ between samples."""
    return scores.get("epistemic_std", math.inf) < _POINT_SHARE * scores.get("rmse", 0.0)
