"""The rule `moments`: weights and activations are `Moments`, and one pass gives mean and variance of the outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from leanbayes import noise
from leanbayes.config import check_choices, configurable
from leanbayes.errors import LeanBayesError
from leanbayes.network import map_outputs, tensors_of
from leanbayes.posteriors import Posterior
from leanbayes.rules.base import Rule
from leanbayes.rules.moments.context import CHANNELS, TRAINING_PROBES, Activations, Correlation, Pass, make_signs
from leanbayes.rules.moments.value import Moments, variance_dtype


@configurable
@dataclass(frozen=True)
class MomentPropagation(Rule):
    """One pass by moments.

    correlation: "common" keeps the noise that positions share; "none" forgets it, as the paper does.
    activations: "exact" takes a Gaussian through an activation function, "taylor" only its slope at the mean.
    maps: whether the noise of convolutions differs from pixel to pixel. None means: if the network ends in one, so that
    its outputs have pixels; otherwise they are pooled, and it costs time for nothing.
    In training mode the signs of the probes are drawn anew for every pass, and fewer of them; else all use the same.
    """

    correlation: Correlation = "common"
    activations: Activations = "exact"
    maps: bool | None = None
    name: ClassVar[str] = "moments"
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choices(self, correlation=Correlation, activations=Activations)

    @property
    def shared_noise(self) -> bool:  # type: ignore[override]
        """Whether positions share their noise, as weight draws have it."""
        return self.correlation == "common"

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Give each layer the mean and variance of its weights."""
        layout, within = posterior.layout, Pass(self.correlation, self.activations)
        if self.correlation == "common" and posterior.training:
            within.signs = noise.signs(posterior.mean(), (TRAINING_PROBES, CHANNELS), key, stream=1)
        variance, kl = posterior.variance_and_kl(key) if with_kl else (posterior.variance(), None)
        means = layout.split(posterior.mean())
        variances = layout.split(variance.to(variance_dtype(variance.dtype)))
        slots = zip(means, variances, posterior.random_slots(), strict=True)
        return [Moments(m, v, within=within) if random else m for m, v, random in slots], kl

    def prepare(self, model: Any) -> None:
        """Give the model the signs of the probes, which every pass reads."""
        if self.correlation == "common" and model.probe_signs is None:
            model.probe_signs = make_signs().to(model.device)

    def begin(self, model: Any, values: Sequence[Any], inputs: Any) -> None:
        """Tell the values of this pass what they need to know of the model and of the batch."""
        if not values:
            raise LeanBayesError(
                f"{type(model.method).__name__} has no Bayesian weights, so there are no moments to pass on: "
                'use bnn.using("sample").'
            )
        within = next((value.within for value in values if isinstance(value, Moments)), None)
        if within is None:  # all weights are points
            return
        if not model.posterior.training:
            within.signs = model.probe_signs
        within.taken, within.batch_first = 0, model.batch_first
        for value in values:
            if isinstance(value, Moments):
                value.copies = False  # every element is there once
        first = next(tensors_of(inputs), None)
        within.rows = None if first is None or first.dim() == 0 else first.shape[0]
        within.maps = model.ends_in_convolution if self.maps is None else self.maps

    def finish(self, model: Any, output: Any) -> Any:
        """Correct the outputs by what `calibrate_moments` has found, for the settings that it was found with."""
        if not any(model.posterior.random_slots()):
            return map_outputs(_without_noise, output)
        mean, std = model.moment_scale
        fitted = model.method.make_rule(self.name)
        same = (self.correlation, self.activations) == (fitted.correlation, fitted.activations)
        if model.training or not same or mean == std == 1:
            return output
        return map_outputs(lambda value: _scaled(value, mean, std) if isinstance(value, Moments) else value, output)


def _without_noise(value: Any) -> Any:
    """A value of a network whose weights are all points."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return Moments(value, value.new_zeros(()).to(variance_dtype(value.dtype)).expand(value.shape))


def _scaled(value: Moments, mean: float, std: float) -> Moments:
    return value.like_total(
        value.loc * mean, value.variance * std**2, None if value.common is None else value.common * std, value.grid
    )
