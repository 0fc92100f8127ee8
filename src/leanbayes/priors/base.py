"""The base classes of priors: settings, which bind to the layout and the weights of a network."""

import math
from typing import Protocol

from torch import Tensor, nn

from leanbayes.core.gaussian import NormalTerms
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError


class Prior(Protocol):
    """The settings of a prior."""

    def bind(self, layout: Layout, mean: Tensor) -> "BoundPrior":
        """Return the prior of a network with this layout and these (pretrained) weights."""
        ...


class BoundPrior(nn.Module):
    """A prior over the flat weight vector of one network.

    Args:
        settings: The settings that it was made from, which its `repr` shows.
    """

    def __init__(self, settings: Prior) -> None:
        super().__init__()
        self.settings = settings

    def normal_terms(self, index: Tensor | None = None) -> NormalTerms | None:
        """Return center and scale if the prior is Gaussian, so that the KL has a closed form, or None.

        Args:
            index: The positions to return them for, in the flat vector. None for all.
        """
        return None

    def log_prob(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the sum of the log densities of all weights, or of those at the given positions."""
        raise NotImplementedError  # abstract

    def set_scale(self, scale: float) -> None:
        """Set a scale that is left open."""

    @property
    def is_open(self) -> bool:
        """Whether the scale is left open, for data to choose."""
        return False

    def choose_scale(self, loss_weight: float) -> None:
        """Set a scale that is left open, for a loss with this weight relative to the KL."""

    def keep(self, places: Tensor) -> None:
        """Drop what is stored for other weights: from now on, only the positions of these are passed.

        Args:
            places: Their indices among the weights that it stores now.
        """

    def __repr__(self) -> str:
        return repr(self.settings)


def normal_log_prob(weights: Tensor, terms: NormalTerms) -> Tensor:
    """Return the sum of the log densities of all weights under a Gaussian."""
    loc, scale = terms
    scale = scale if isinstance(scale, Tensor) else weights.new_tensor(scale)
    standard = (weights if loc is None else weights - loc) / scale
    constant = weights.numel() * 0.5 * math.log(2 * math.pi)
    return -0.5 * standard.square().sum() - scale.log().expand_as(weights).sum() - constant


def check_scale(name: str, value: float) -> None:
    """Raise an error unless the value is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise LeanBayesError(f"{name}={value} must be a positive number.")
