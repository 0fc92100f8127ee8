"""Priors over the weights: settings, which bind to the layout and the weights of a network."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.gaussian import NormalTerms
from leanbayes.layout import Layout


class BoundPrior(nn.Module):
    """A prior over one flat weight vector."""

    def normal_terms(self, index: Tensor | None = None) -> NormalTerms | None:
        """Centre and scale where the prior is Gaussian, so that the KL has a closed form; else None.

        index: the positions to give them for, in the flat vector; None for all.
        """
        return None

    def log_prob(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        """Sum of the log densities of all weights, or of those at some positions."""
        raise NotImplementedError  # abstract

    def keep(self, places: Tensor) -> None:
        """Forget what it holds of all weights but some; from now on it is asked for their positions only.

        places: where these lie among the weights that it knows of now.
        """


class Prior(Protocol):
    """Settings of a prior."""

    def bind(self, layout: Layout, mean: Tensor) -> BoundPrior:
        """Make the prior for this layout; `mean` are the (pretrained) weights."""
        ...


def _check_scale(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise LeanBayesError(f"{name}={value} must be a positive number.")


@configurable
@dataclass(frozen=True)
class Normal:
    """N(centre, scale²), independent for each weight.

    Attributes:
        scale: a number for all weights; or per layer fan_in (gain/√fan_in) or std (gain · the layer's own std).
        center: zero, or pretrained for the weights that the network came with.
        gain: a factor of the scale.
    """

    scale: float | Literal["fan_in", "std"] = 0.1
    center: Literal["zero", "pretrained"] = "zero"
    gain: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.scale, str):
            if self.scale not in ("fan_in", "std"):
                raise LeanBayesError(f"scale={self.scale!r} is unknown: give a positive number, 'fan_in' or 'std'.")
        else:
            _check_scale("scale", self.scale)
        _check_scale("gain", self.gain)
        if self.center not in ("zero", "pretrained"):
            raise LeanBayesError(f"center={self.center!r} is unknown: use 'zero' or 'pretrained'.")

    def bind(self, layout: Layout, mean: Tensor) -> BoundPrior:
        """Fix the scales of this network's layers, and keep its weights if they are the centre."""
        if isinstance(self.scale, str):
            if self.scale == "fan_in":
                scales = [self.gain / math.sqrt(slot.fan_in) for slot in layout]
            else:
                scales = [self.gain * std for std in layer_stds(layout, mean)]
            scale: float | Tensor = torch.tensor(scales, dtype=mean.dtype, device=mean.device)
        else:
            scale = float(self.gain * self.scale)
        return _BoundNormal(layout, mean.clone() if self.center == "pretrained" else None, scale)


def layer_stds(layout: Layout, mean: Tensor) -> list[float]:
    """Each layer's weight std; 1/√fan_in where a layer has none (one weight, or all equal)."""
    stds = []
    for slot, part in zip(layout, mean.split(layout.sizes), strict=True):
        std = float(part.double().std()) if part.numel() > 1 else 0.0
        stds.append(std if std > 0 else 1 / math.sqrt(slot.fan_in))
    return stds


class _BoundNormal(BoundPrior):
    loc: Tensor | None
    layer_scales: Tensor | None

    def __init__(self, layout: Layout, loc: Tensor | None, scale: float | Tensor) -> None:
        super().__init__()
        self.layout = layout
        self.register_buffer("loc", loc)
        self.register_buffer("layer_scales", scale if isinstance(scale, Tensor) else None)
        self.scale = scale if isinstance(scale, float) else None

    def keep(self, places: Tensor) -> None:
        if self.loc is not None and len(self.loc) != len(places):
            self.loc = self.loc[places]

    def normal_terms(self, index: Tensor | None = None) -> NormalTerms:
        loc = self.loc
        if loc is not None and index is not None and len(loc) != len(index):  # else these are all that it knows of
            loc = loc[index]
        if self.layer_scales is None:
            assert self.scale is not None
            return NormalTerms(loc, self.scale)
        if index is None:
            return NormalTerms(loc, self.layout.expand(self.layer_scales))
        return NormalTerms(loc, self.layer_scales[self.layout.slots_of(index)])

    def log_prob(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        loc, scale = self.normal_terms(index)
        scale = scale if isinstance(scale, Tensor) else weights.new_tensor(scale)
        standard = (weights if loc is None else weights - loc) / scale
        constant = weights.numel() * 0.5 * math.log(2 * math.pi)
        return -0.5 * standard.square().sum() - scale.log().expand_as(weights).sum() - constant


@configurable
@dataclass(frozen=True)
class ScaleMixture:
    """π·N(0, wide²) + (1-π)·N(0, narrow²) (Blundell et al. 2015); its KL has no closed form and is sampled."""

    pi: float = 0.5
    wide: float = 0.5
    narrow: float = 0.01

    def __post_init__(self) -> None:
        _check_scale("wide", self.wide)
        _check_scale("narrow", self.narrow)
        if not 0 < self.pi < 1:
            raise LeanBayesError(f"pi={self.pi} must lie between 0 and 1.")

    def bind(self, layout: Layout, mean: Tensor) -> BoundPrior:
        """Make the prior; it needs nothing of the network."""
        return _BoundMixture(self)


class _BoundMixture(BoundPrior):
    def __init__(self, settings: ScaleMixture) -> None:
        super().__init__()
        self.settings = settings

    def log_prob(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        parts = []
        for share, scale in ((self.settings.pi, self.settings.wide), (1 - self.settings.pi, self.settings.narrow)):
            constant = math.log(share) - math.log(scale) - 0.5 * math.log(2 * math.pi)
            parts.append(constant - 0.5 * (weights / scale).square())
        return torch.logaddexp(*parts).sum()
