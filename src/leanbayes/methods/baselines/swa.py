"""Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights along the last part of a training."""

from dataclasses import dataclass, field
from typing import Any

from leanbayes.errors import LeanBayesError
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.methods.gaussian_settings import EngineName
from leanbayes.model.method import Stage, register_method


def averaging_stage(share: float, lr_fraction: float, cycles: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe settings of the training before averaging, and of the part whose weights are averaged.

    Args:
        share: The share of the epochs of the second part.
        lr_fraction: The fraction of the learning rate at which the first part ends and the second one continues.
        cycles: The number of cosines of the second part. 0 for a constant rate.

    Raises:
        LeanBayesError: The share or the fraction is out of range.
    """
    if not 0 < share <= 1:
        raise LeanBayesError(f"share={share} must be a fraction of the epochs, above 0 and at most 1.")
    if not 0 < lr_fraction <= 1:
        raise LeanBayesError(f"lr_fraction={lr_fraction} must be a fraction of the learning rate, above 0.")
    low = 0.0 if cycles else lr_fraction
    return {"lr_low": lr_fraction}, {"warmup": 0.0, "lr_high": lr_fraction, "lr_low": low, "cycles": max(cycles, 1)}


@register_method("swa")
@dataclass(frozen=True)
class SWA(Deterministic):
    """Stochastic weight averaging: the mean of a plain network's weights over the last part of its training.

    That part has a constant learning rate, and the weights after every step of it count equally. The result is one
    network without weight uncertainty; `SWAG` adds it. BatchNorm's statistics are computed again for the mean.

    Paper: Izmailov et al. (2018), "Averaging Weights Leads to Wider Optima and Better Generalization".

    Attributes:
        share: share of the epochs whose weights are averaged.
        lr_fraction: learning rate of that part, as a fraction of the highest one.
        engine: as in `Deterministic`.

    Example:
        >>> bnn = lb.fit(network, lb.SWA(), train_set, epochs=30, optimizer="sgd")
    """

    share: float = 0.25
    lr_fraction: float = 0.2
    engine: EngineName = field(default="backprop")

    def __post_init__(self) -> None:
        super().__post_init__()
        averaging_stage(self.share, self.lr_fraction)

    def stages(self) -> tuple[Stage, ...]:
        """Train as usual, then with a constant rate and an average."""
        before, during = averaging_stage(self.share, self.lr_fraction)
        last = Stage(self, self.share, {**during, "average": "equal"})
        first = Stage(Deterministic(engine=self.engine), 1 - self.share, before)
        return (first, last) if self.share < 1 else (last,)
