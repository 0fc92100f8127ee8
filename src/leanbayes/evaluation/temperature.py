"""The plain network with temperature: its confidence rescaled by one number that held-out data determine.

Classes:     p_T(k) ∝ p(k)^(1/T), where T minimizes the held-out NLL (Guo et al. 2017, arXiv:1706.04599).
Regression:  std_T = √T·std, where T minimizes it, too.

One made-up example counts as much as each of the n held-out ones: of classes one with a random label (as in Platt
1999), and of a regression one with an error of one std. Otherwise few examples that are all right would ask for T = 0.
This is the reference that a method should beat: it costs one number, and no time.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.evaluation.outcomes import ClassOutcome, RegressionOutcome

LOWEST, HIGHEST = 0.05, 20.0  # of the temperature
_STEPS = 60  # of the bisection
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Temperature:
    """A temperature, which rescales the uncertainty of outcomes when called with some. No answer changes."""

    value: float

    def __call__(self, found: Any) -> Any:
        """Return outcomes of classes or of a regression with rescaled uncertainty."""
        if isinstance(found, RegressionOutcome):
            factor = self.value**0.5
            return dataclasses.replace(found, std=factor * found.std, epistemic_std=factor * found.epistemic_std)
        probs = (_logs(found.probs) / self.value).softmax(-1)
        entropy = torch.special.entr(probs).sum(-1).to(found.entropy.dtype)
        return dataclasses.replace(
            found,
            probs=probs.to(found.probs.dtype),
            entropy=entropy,
            mutual_information=torch.zeros_like(entropy),  # of one pass
        )


def fit_temperature(held_out: Any) -> Temperature | None:
    """Return the temperature with the lowest NLL of held-out outcomes and one made-up one, or None if there is none."""
    if isinstance(held_out, ClassOutcome) and len(held_out):
        return Temperature(_of_classes(held_out.probs, held_out.labels))
    if isinstance(held_out, RegressionOutcome) and len(held_out) and (held_out.std > 0).all():
        squares = (held_out.error / held_out.std).double().square()
        return Temperature(min(max((squares.sum().item() + 1) / (squares.numel() + 1), LOWEST), HIGHEST))
    return None


def _of_classes(probs: Tensor, labels: Tensor) -> float:
    """Find the root of the derivative of the NLL by β = 1/T, which rises with β: E_β[log p] - E_labels[log p]."""
    logs, smoothing = _logs(probs), 1 / (len(probs) + 1)
    chosen = (1 - smoothing) * logs.gather(-1, labels[:, None]).mean() + smoothing * logs.mean()
    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        slope = ((middle * logs).softmax(-1) * logs).sum(-1).mean() - chosen
        low, high = (low, middle) if slope > 0 else (middle, high)
    return 1 / (low * high) ** 0.5


def _logs(probs: Tensor) -> Tensor:
    return probs.double().clamp_min(_TINY).log()
