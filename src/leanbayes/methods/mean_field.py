"""Mean-field variational inference: Bayes by Backprop (Blundell et al. 2015) on any network."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.layout import Layout
from leanbayes.method import Method
from leanbayes.posteriors import MeanFieldPosterior
from leanbayes.priors import Normal, Prior, layer_stds
from leanbayes.rules import get_rule

_SMALLEST_STD = 1e-8  # stands for the 0 of a point weight, which softplus cannot give


@configurable
@dataclass(frozen=True)
class MeanField(Method):
    """Mean-field variational inference: each weight has a mean and a spread of its own, w ~ N(μ, σ²).

    Attributes:
        prior: what the weights are believed to be before any data are seen: `Normal` or `ScaleMixture`.
        init_std: the first σ.
        relative: take init_std as a share of the std of each layer's weights, not as σ itself.
        rule: how it is trained and predicts: sample, flipout, local, moments or mean.
        samples: draws of a prediction.
    """

    prior: Prior = field(default_factory=Normal)
    init_std: float = 0.05
    relative: bool = True
    rule: str = "sample"
    samples: int = 30

    def __post_init__(self) -> None:
        if not (math.isfinite(self.init_std) and self.init_std > 0):
            raise LeanBayesError(f"init_std={self.init_std} must be a positive number.")
        if self.samples < 1:
            raise LeanBayesError(f"samples={self.samples} must be at least 1.")
        if isinstance(self.prior, type) or not hasattr(self.prior, "bind"):
            raise LeanBayesError("prior must be an instance such as lb.Normal(0.1).")
        get_rule(self.rule)

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> MeanFieldPosterior:
        """Put μ on the given weights, and σ on an earlier one where there is one."""
        if self.relative:
            stds = [self.init_std * std for std in layer_stds(layout, mean)]
            std = layout.expand(torch.tensor(stds, dtype=mean.dtype, device=mean.device))
        else:
            std = torch.full_like(mean, self.init_std)
        if variance is not None:
            std = torch.where(variance.isnan(), std, variance.sqrt().clamp_min(_SMALLEST_STD))
        return MeanFieldPosterior(layout, mean, std, self.prior.bind(layout, mean))
