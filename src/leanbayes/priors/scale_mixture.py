"""The prior of Bayes by Backprop: a mixture of a wide and a narrow Gaussian."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.priors.base import BoundPrior, check_scale


@configurable
@dataclass(frozen=True)
class ScaleMixture:
    """The prior π·N(0, wide²) + (1-π)·N(0, narrow²), independent for each weight (Blundell et al. 2015).

    Its KL has no closed form: it is estimated from the sample of the weights.

    Attributes:
        pi: the fraction of the wide Gaussian, between 0 and 1.
        wide: the std of the wide Gaussian.
        narrow: the std of the narrow Gaussian.

    Raises:
        LeanBayesError: If a std is not positive, or pi is not between 0 and 1.

    Example:
        >>> method = lb.MeanField(prior=lb.ScaleMixture(pi=0.25, wide=1.0, narrow=0.002))
    """

    pi: float = 0.5
    wide: float = 0.5
    narrow: float = 0.01

    def __post_init__(self) -> None:
        check_scale("wide", self.wide)
        check_scale("narrow", self.narrow)
        if not 0 < self.pi < 1:
            raise LeanBayesError(f"pi={self.pi} must lie between 0 and 1.")

    def bind(self, layout: Layout, mean: Tensor) -> BoundPrior:
        """Return the prior of a network; it is the same for all networks.

        Args:
            layout: The place of each parameter in the flat vector. Not used.
            mean: The (pretrained) weights as a flat vector. Not used.

        Returns:
            The prior of this network.
        """
        return _BoundMixture(self)


class _BoundMixture(BoundPrior):
    settings: ScaleMixture

    def log_prob(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        parts = []
        for share, scale in ((self.settings.pi, self.settings.wide), (1 - self.settings.pi, self.settings.narrow)):
            constant = math.log(share) - math.log(scale) - 0.5 * math.log(2 * math.pi)
            parts.append(constant - 0.5 * (weights / scale).square())
        return torch.logaddexp(*parts).sum()
