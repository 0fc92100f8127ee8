"""Gaussian priors."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.core.gaussian import NormalTerms
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.priors.base import BoundPrior, check_scale, normal_log_prob
from leanbayes.priors.earlier import EarlierPosterior, earlier_posterior

_AUTO_SCALE = 0.1
_WEIGHT_DECAY = 1e-3


@configurable
@dataclass(frozen=True)
class Normal:
    """The prior N(center, scale²), independent for each weight.

    Attributes:
        scale: a number for all weights; or, per layer, fan_in (gain/√fan_in) or std (gain · std of its weights); or
            auto, which is gain · 0.1, until the engine ivon sets it to 1/√(0.001·N) for N training examples (divided by
            the temperature). That is a weight decay of 0.001.
        center: zero, or pretrained for the weights that the network came with.
        gain: a factor of the scale.

    Raises:
        LeanBayesError: If scale or gain is not positive, or a name is unknown.

    Example:
        >>> method = lb.MeanField(prior=lb.Normal("fan_in", gain=0.5))
        >>> method = lb.MeanField(prior=lb.Normal(0.1, center="pretrained"))
    """

    scale: float | Literal["auto", "fan_in", "std"] = 0.1
    center: Literal["zero", "pretrained"] = "zero"
    gain: float = 1.0
    gaussian: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.scale, str):
            if self.scale not in ("auto", "fan_in", "std"):
                raise LeanBayesError(
                    f"scale={self.scale!r} is unknown: give a positive number, 'auto', 'fan_in' or 'std'."
                )
        else:
            check_scale("scale", self.scale)
        check_scale("gain", self.gain)
        if self.center not in ("zero", "pretrained"):
            raise LeanBayesError(f"center={self.center!r} is unknown: use 'zero' or 'pretrained'.")

    @staticmethod
    def from_posterior(bnn: Any) -> EarlierPosterior:
        """Return the posterior of a model as the prior of the next one: its mean and std for each weight.

        By Bayes' rule, the posterior after two data sets is the posterior after the second one, with the posterior
        after the first one as the prior. So a model learns from new data without the old ones, and forgets little.
        The earlier data count as much as the new ones if both models are trained at the same temperature.

        Args:
            bnn: The earlier `BayesianModel`. All its weights must be Bayesian and independent (`lb.MeanField`,
                `lb.VDP`). It is copied, so that it can be trained further.

        Returns:
            A prior for `lb.MeanField`, `lb.PBN` and `lb.VDP`, with both engines, for a network of the same
            architecture. `lb.save` stores it with the model.

        Raises:
            LeanBayesError: Weights of the model are correlated or deterministic.

        Example:
            >>> first = lb.fit(network, lb.MeanField(), first_data)
            >>> second = lb.fit(first, lb.MeanField(prior=lb.Normal.from_posterior(first)), second_data)
        """
        return earlier_posterior(bnn)

    def bind(self, layout: Layout, mean: Tensor) -> BoundPrior:
        """Compute the scales of the network's layers, and copy its weights if they are the center.

        Args:
            layout: The place of each parameter in the flat vector.
            mean: The (pretrained) weights as a flat vector.

        Returns:
            The prior of this network.
        """
        if self.scale == "auto":
            scale: float | Tensor = self.gain * _AUTO_SCALE
        elif isinstance(self.scale, str):
            if self.scale == "fan_in":
                scales = [self.gain / math.sqrt(slot.fan_in) for slot in layout]
            else:
                scales = [self.gain * std for std in layer_stds(layout, mean)]
            scale = torch.tensor(scales, dtype=mean.dtype, device=mean.device)
        else:
            scale = float(self.gain * self.scale)
        return _BoundNormal(self, layout, mean.clone() if self.center == "pretrained" else None, scale)


def layer_stds(layout: Layout, mean: Tensor) -> list[float]:
    """Return the std of each layer's weights, or 1/√fan_in if that is 0 (one weight, or all equal)."""
    stds = []
    for slot, part in zip(layout, mean.split(layout.sizes), strict=True):
        std = float(part.double().std()) if part.numel() > 1 else 0.0
        stds.append(std if std > 0 else 1 / math.sqrt(slot.fan_in))
    return stds


class _BoundNormal(BoundPrior):
    settings: Normal
    loc: Tensor | None
    chosen_scale: Tensor | None  # a buffer, so that files have it
    layer_scales: Tensor | None

    def __init__(self, settings: Normal, layout: Layout, loc: Tensor | None, scale: float | Tensor) -> None:
        super().__init__(settings)
        self.layout = layout
        self.register_buffer("loc", loc)
        self.register_buffer("layer_scales", scale if isinstance(scale, Tensor) else None)
        self.scale = scale if isinstance(scale, float) else None
        is_auto = settings.scale == "auto"
        self.register_buffer("chosen_scale", torch.tensor(scale, dtype=torch.float64) if is_auto else None)

    def choose_scale(self, loss_weight: float) -> None:
        self.set_scale(1 / math.sqrt(_WEIGHT_DECAY * loss_weight))

    def set_scale(self, scale: float) -> None:
        if self.chosen_scale is not None:
            self.scale = scale
            self.chosen_scale.fill_(scale)

    @property
    def is_open(self) -> bool:
        return self.chosen_scale is not None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.chosen_scale is not None:
            self.scale = float(self.chosen_scale)
            if not (math.isfinite(self.scale) and self.scale > 0):
                raise ValueError(f"the scale of the prior is {self.scale}")

    def keep(self, places: Tensor) -> None:
        if self.loc is not None and len(self.loc) != len(places):
            self.loc = self.loc[places]

    def normal_terms(self, index: Tensor | None = None) -> NormalTerms:
        loc = self.loc
        if loc is not None and index is not None and len(loc) != len(index):  # else these are all that it stores
            loc = loc[index]
        if self.layer_scales is None:
            assert self.scale is not None
            return NormalTerms(loc, self.scale)
        if index is None:
            return NormalTerms(loc, self.layout.expand(self.layer_scales))
        return NormalTerms(loc, self.layer_scales[self.layout.slots_of(index)])

    def log_prob(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        return normal_log_prob(weights, self.normal_terms(index))
