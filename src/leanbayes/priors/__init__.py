"""Priors p(w)."""

from leanbayes.priors.base import BoundPrior, Prior
from leanbayes.priors.earlier import EarlierPosterior
from leanbayes.priors.normal import Normal, layer_stds
from leanbayes.priors.scale_mixture import ScaleMixture

__all__ = ["BoundPrior", "EarlierPosterior", "Normal", "Prior", "ScaleMixture", "layer_stds"]
