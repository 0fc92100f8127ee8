"""The rule `moments`: weights and activations are `Moments`, and one pass gives mean and variance of the outputs."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from leanbayes.core import noise
from leanbayes.core.config import check_choices, configurable, renamed
from leanbayes.core.network import map_outputs, tensors_of
from leanbayes.posteriors import Posterior
from leanbayes.posteriors.base import SlotMoments
from leanbayes.rules.base import PassContext, Rule, register_rule
from leanbayes.rules.moments.context import CHANNELS, TRAINING_PROBES, Activations, Correlation, Maps, Pass, make_signs
from leanbayes.rules.moments.correction import Correction
from leanbayes.rules.moments.value import Moments, variance_dtype

_SIGNS = "probe_signs"


@register_rule
@configurable
@dataclass(frozen=True)
class MomentPropagation(Rule):
    """The rule `moments`: mean and variance of the outputs in one pass (VDP++).

    In training mode each pass uses new signs for its probes, and fewer of them. In evaluation mode all passes use the
    same signs.

    Attributes:
        correlation: "common" keeps the noise that positions share. "none" drops it, as the paper does.
        activations: "exact" uses the moments of an activation function of a Gaussian, "taylor" its slope at the mean.
            "paper" is "taylor" with equations 9 and 14 of VDP++: the variance of a softmax has no bound, and
            the statistics of a layer norm count as constants.
        maps: The noise of pixels behind a convolution. "uniform" has one variance per channel, which is enough if
            the pixels are pooled. "independent" has one per pixel. Both count the pixels as independent, apart from
            what `correlation` keeps. "auto" is "uniform" if the outputs have no pixels, and otherwise "independent" or,
            in evaluation mode, if all Bayesian weights are those of convolutions: one variance per pixel, and noise
            that neighbors share.

    Example:
        >>> with bnn.using(leanbayes.rules.MomentPropagation(correlation="none")):
        ...     output = bnn(x)
        >>> output.loc, output.stddev
    """

    correlation: Correlation = "common"
    activations: Activations = "exact"
    maps: Maps = renamed("auto", values={None: "auto", True: "independent", False: "uniform"})  # noqa: RUF009
    name: ClassVar[str] = "moments"
    random: ClassVar[bool] = False
    needs_factorized: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choices(self, correlation=Correlation, activations=Activations, maps=Maps)

    @property
    def shared_noise(self) -> bool:  # type: ignore[override]
        """Whether positions share their noise, as in a weight sample."""
        return self.correlation == "common"

    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        """Return the mean and variance of each parameter."""
        self.check(posterior)
        within = Pass(self.correlation, self.activations)
        if self.correlation == "common" and posterior.training:
            within.signs = noise.signs(posterior.mean(), (TRAINING_PROBES, CHANNELS), key, stream=1)
        if with_kl:
            flat, kl = posterior.variance_and_kl(key)
            known = SlotMoments(posterior.layout.split(posterior.mean()), posterior.layout.split(flat), None)
        else:
            known, kl = posterior.slot_moments(), None
        values: list[Any] = []
        for number, (mean, variance) in enumerate(zip(known.means, known.variances, strict=True)):
            if not posterior.random_slots()[number]:
                values.append(mean)
                continue
            values.append(Moments(mean, variance.to(variance_dtype(variance.dtype)), within=within))
            values[-1].derived = None if known.derived is None else known.derived[number]
        return values, kl

    def buffers(self) -> Mapping[str, Callable[[], Tensor]]:
        """Return the signs of the probes, which all passes in evaluation mode use."""
        return {_SIGNS: make_signs} if self.correlation == "common" else {}

    def begin(self, values: Sequence[Any], context: PassContext) -> None:
        """Pass information about the model and the batch to the values of this pass."""
        within = next((value.within for value in values if isinstance(value, Moments)), None)
        if within is None:  # all weights are deterministic
            return
        if not context.training:
            within.signs = context.buffers.get(_SIGNS)
        within.taken, within.batch_first = 0, context.batch_first
        for value in values:
            if isinstance(value, Moments):
                value.copies = False  # every element occurs once
                value.correction = None
        for value, correction in zip(values, context.corrections, strict=False):
            if isinstance(value, Moments) and correction is not None:
                value.correction = Correction(*correction.unbind(0))
        first = next(tensors_of(context.inputs), None)
        within.rows = None if first is None or first.dim() == 0 else first.shape[0]
        dense = context.dense_output and self.maps == "auto"
        within.maps = dense or self.maps == "independent"
        plain = context.training or not context.convolutional  # tokens have other neighbors than pixels
        within.coherent = dense and self.correlation == "common" and not plain
        within.counted = _counted_tokens(context.inputs)

    def position(self, values: Sequence[Any]) -> int:
        """Return how many columns of the table of signs are used so far."""
        return next((value.within.taken for value in values if isinstance(value, Moments)), 0)

    def copied(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return copies of the moments, which cache their variances."""
        return [copy.copy(value) if isinstance(value, Moments) else value for value in values]

    def move_to(self, values: Sequence[Any], position: int) -> None:
        """Continue with the column of signs after `position`."""
        for value in values:
            if isinstance(value, Moments):
                value.within.taken = position  # all values of a pass share this

    def finish(self, output: Any, context: PassContext) -> Any:
        """Multiply the mean and std of the outputs by the factors that `lb.calibrate` fitted."""
        if not context.random:
            return map_outputs(_without_noise, output)
        mean, std = context.output_scale
        if mean == std == 1:
            return output
        return map_outputs(lambda value: _scaled(value, mean, std) if isinstance(value, Moments) else value, output)

    def calibrated_like(self, other: Rule) -> bool:
        """Whether both rules have the same correlation and activations."""
        return (
            isinstance(other, MomentPropagation)
            and self.correlation == other.correlation
            and self.activations == other.activations
        )


def _without_noise(value: Any) -> Any:
    """Return an output of a network without random weights as Moments with a variance of zero."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return Moments(value, value.new_zeros(()).to(variance_dtype(value.dtype)).expand(value.shape))


def _scaled(value: Moments, mean: float, std: float) -> Moments:
    return value.like_total(
        value.loc * mean, value.variance * std**2, None if value.common is None else value.common * std, value.grid
    )


def _counted_tokens(inputs: Any) -> Tensor | None:
    """Return which tokens are no padding, by the mask that networks of transformers take, or None if all are none."""
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    mask = next(
        (part["attention_mask"] for part in parts if isinstance(part, Mapping) and "attention_mask" in part), None
    )
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask.to(torch.float32)
