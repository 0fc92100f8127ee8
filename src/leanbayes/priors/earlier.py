"""The posterior of an earlier model as the prior of the next one: Bayes' rule, one data set after the other."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.core.gaussian import NormalTerms
from leanbayes.core.layout import Layout
from leanbayes.errors import LeanBayesError
from leanbayes.priors.base import BoundPrior, normal_log_prob

_REMEDY = "make the prior again with lb.Normal.from_posterior(bnn)"


class _Moments(NamedTuple):
    """The mean and the std of one parameter."""

    mean: Tensor
    std: Tensor


@configurable
@dataclass(frozen=True)
class EarlierPosterior:
    """The prior N(μ, σ²) with the mean and the std of each weight in an earlier model.

    `lb.Normal.from_posterior` makes one. Model files store its tensors beside the posterior.

    Attributes:
        digest: a checksum of means and stds, which tells two of them apart in the record of a run.
    """

    digest: str = ""
    gaussian: ClassVar[bool] = True
    center: ClassVar[str] = "posterior"

    def bind(self, layout: Layout, mean: Tensor) -> BoundPrior:
        """Look up the mean and the std of each weight of a network.

        Args:
            layout: The place of each parameter in the flat vector.
            mean: The (pretrained) weights as a flat vector.

        Returns:
            The prior of this network. If this object was read from a file, the file fills its tensors.

        Raises:
            LeanBayesError: The earlier model has other Bayesian weights.
        """
        known: Mapping[str, _Moments] | None = getattr(self, "_moments", None)
        if known is None:
            return _BoundEarlier(self, layout, torch.zeros_like(mean), torch.zeros_like(mean))
        found = [_found(known, slot.name, slot.shape) for slot in layout]
        loc = layout.join([one.mean for one in found]).to(mean)
        return _BoundEarlier(self, layout, loc, layout.join([one.std for one in found]).to(mean))


def _found(known: Mapping[str, _Moments], name: str, shape: tuple[int, ...]) -> _Moments:
    if name not in known:
        raise LeanBayesError(
            f"The prior comes from a model in which {name} is not Bayesian: select the same parameters in both models."
        )
    if known[name].mean.shape != shape:
        raise LeanBayesError(
            f"The prior comes from a model with {name} of shape {tuple(known[name].mean.shape)}, but this network has "
            f"{tuple(shape)}: use a network of the same architecture."
        )
    return known[name]


@torch.no_grad()
def earlier_posterior(bnn: Any) -> EarlierPosterior:
    """Copy mean and std of each Bayesian weight of a model, on the CPU."""
    posterior, layout = getattr(bnn, "posterior", None), getattr(bnn, "layout", None)
    if posterior is None or not isinstance(layout, Layout):
        raise LeanBayesError(f"from_posterior needs a Bayesian model, not {type(bnn).__name__}: use lb.bayesianize.")
    kind = type(bnn.method).__name__
    if not layout.numel:
        raise LeanBayesError(f"A model of {kind} has no Bayesian weights: use one of lb.MeanField().")
    if not posterior.factorized:
        raise LeanBayesError(
            f"The weights of {kind} are correlated, and a prior has one mean and one std per weight: use a model with "
            "independent weights, such as one of lb.MeanField()."
        )
    means, variance = posterior.mean().detach().cpu(), posterior.variance().detach().cpu()
    fixed = int((variance <= 0).sum())
    if fixed:
        raise LeanBayesError(
            f"{fixed:,} of {layout.numel:,} weights of this {kind} model are deterministic and have no std, which a "
            "prior needs: use a model whose weights are all Bayesian, such as one of lb.MeanField()."
        )
    if not (means.isfinite().all() and variance.isfinite().all()):
        raise LeanBayesError("The posterior has NaN or infinite values: train the model again, with a lower rate.")
    parts = zip(layout, layout.split(means), layout.split(variance.sqrt()), strict=True)
    moments = {name: _Moments(mean.clone(), std.clone()) for slot, mean, std in parts for name in slot.names}
    digest = hashlib.sha256()
    for name, both in moments.items():
        digest.update(name.encode())
        for tensor in both:
            digest.update(tensor.double().contiguous().numpy().data)
    prior = EarlierPosterior(digest.hexdigest()[:16])
    object.__setattr__(prior, "_moments", moments)
    return prior


class _BoundEarlier(BoundPrior):
    settings: EarlierPosterior
    loc: Tensor
    scales: Tensor

    def __init__(self, settings: EarlierPosterior, layout: Layout, loc: Tensor, scales: Tensor) -> None:
        super().__init__(settings)
        self.layout = layout
        self.register_buffer("loc", loc)
        self.register_buffer("scales", scales)
        self._filled = hasattr(settings, "_moments")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not (self.scales > 0).all():
            raise ValueError("a scale of the prior is not positive")
        self._filled = True
        if not hasattr(self.settings, "_moments") and len(self.loc) == self.layout.numel:  # the method is complete too
            parts = zip(self.layout, self.layout.split(self.loc), self.layout.split(self.scales), strict=True)
            moments = {n: _Moments(m.cpu().clone(), s.cpu().clone()) for slot, m, s in parts for n in slot.names}
            object.__setattr__(self.settings, "_moments", moments)

    def keep(self, places: Tensor) -> None:
        if len(self.loc) != len(places):
            self.loc, self.scales = self.loc[places], self.scales[places]

    def normal_terms(self, index: Tensor | None = None) -> NormalTerms:
        if not self._filled:
            raise LeanBayesError(f"This prior was read from a file without its means and stds: {_REMEDY}.")
        if index is None or len(self.loc) == len(index):  # else these are all that it stores
            return NormalTerms(self.loc, self.scales)
        return NormalTerms(self.loc[index], self.scales[index])

    def log_prob(self, weights: Tensor, index: Tensor | None = None) -> Tensor:
        return normal_log_prob(weights, self.normal_terms(index))
