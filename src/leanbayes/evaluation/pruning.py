"""Global pruning: set the least important weights of a model to zero.

Importance is |μ| ("magnitude") or |μ|/σ ("snr": Graves 2011, Blundell et al. 2015), ranked over all layers together.
The candidates are the weights of the posterior without biases and norms. If the posterior has none (an
ensemble, dropout, rank-1 factors, noise in norms), they are the weights that would be Bayesian by default, ranked over
all members of an ensemble together.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from leanbayes.core.layout import Slot, choose
from leanbayes.core.names import suggestion
from leanbayes.core.ranking import part_of
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.model.bayesian import BayesianModel
from leanbayes.posteriors import Posterior
from leanbayes.posteriors.base import GroupFactors

SHARES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)  # of the weights, for a pruning curve


class Pruned(Posterior):
    """A posterior with some weights set to zero. It predicts with every rule, but cannot be trained or saved."""

    dropped: Tensor

    def __init__(self, posterior: Posterior, dropped: Tensor) -> None:
        super().__init__(posterior.layout)
        self.inner = posterior
        self.factorized, self.has_groups = posterior.factorized, posterior.has_groups
        self.register_buffer("dropped", dropped)

    def mean(self) -> Tensor:
        """E[w], 0 where pruned."""
        return self._kept(self.inner.mean())

    def variance(self) -> Tensor:
        """Var[w], 0 where pruned."""
        return self._kept(self.inner.variance())

    def sample(self, key: Tensor) -> Tensor:
        """Return a sample of the original posterior, 0 where pruned."""
        return self._kept(self.inner.sample(key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Return the perturbation of the original posterior, 0 where pruned."""
        return self._kept(self.inner.perturbation(key))

    def group_factors(self) -> GroupFactors:
        """Return the factors of the original posterior, with 0 for pruned weights."""
        found = self.inner.group_factors()
        return found._replace(weights=self._kept(found.weights))

    def key_of_member(self, key: Tensor, number: int) -> Tensor:
        """Return the key of the original posterior."""
        return self.inner.key_of_member(key, number)

    def kl(self, key: Tensor) -> Tensor:
        """Raise an error: the KL of a weight that is always zero is infinite."""
        raise UnsupportedOperation("A pruned model has no KL: train the model it was pruned from.")

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the scale parameters of the original posterior."""
        return self.inner.scale_parameters()

    def _kept(self, flat: Tensor) -> Tensor:
        return flat.masked_fill(self.dropped, 0.0)

    def _save_to_state_dict(self, *args: Any) -> NoReturn:
        # lb.load would build the posterior of the method, whose state differs from this one.
        raise UnsupportedOperation(
            "A pruned model cannot be saved: save the model it was pruned from, and prune it after loading."
        )


def _magnitude(mean: Tensor, variance: Tensor) -> Tensor:
    return mean.abs()


def _snr(mean: Tensor, variance: Tensor) -> Tensor:
    if not variance.any():
        raise LeanBayesError('The weights have no std to rank by: use by="magnitude".')
    # A weight that is always zero matters least; any other weight without a std matters most.
    return torch.where(mean == 0, mean, mean.abs() / variance.sqrt())


CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"magnitude": _magnitude, "snr": _snr}


@torch.no_grad()
def prune(bnn: BayesianModel, share: float, by: str = "magnitude") -> BayesianModel:
    """Return a copy of a model in which the ⌊share·n⌋ least important of its n weights are zero in every sample.

    Of weights with equal importance, those that come first in the layout are pruned first.

    Args:
        bnn: The model. It is not changed.
        share: Fraction of the weights to prune, from 0 to 1.
        by: Importance of a weight: "magnitude" for |μ|, or "snr" for |μ|/σ.

    Raises:
        LeanBayesError: If share or by is invalid, or if the model has no weights to rank by this criterion.

    Example:
        >>> from leanbayes.evaluation.pruning import prune
        >>> lb.evaluate(prune(bnn, 0.9), test_loader)["accuracy"]
    """
    if by not in CRITERIA:
        hint = suggestion(by, CRITERIA, f"choose {' or '.join(CRITERIA)}.")
        raise LeanBayesError(f"There is no pruning criterion {by!r}: {hint}")
    if not 0 <= share <= 1:
        raise LeanBayesError(f"share={share} must be a fraction from 0 to 1.")
    pruned = copy.deepcopy(bnn)
    posterior = pruned.posterior
    if len(pruned.layout) and bnn.method.random_weights:
        slots = zip(pruned.slot_places, pruned.layout, strict=True)
        weights = torch.tensor([_is_weight(owners, slot) for owners, slot in slots], device=bnn.device)
        if not weights.any():
            raise LeanBayesError(
                "Only biases and norms are Bayesian, and these are not pruned: choose weights with select=."
            )
        dropped = _least(posterior.mean(), posterior.variance(), pruned.layout.expand(weights), share, by)
        pruned.posterior = Pruned(posterior, dropped).train(posterior.training)
        return pruned
    # ABNN freezes the weights, which are pruned all the same.
    frozen = bnn.method.chooses_parameters
    layout, _ = choose(copy.deepcopy(pruned.network).requires_grad_(True) if frozen else pruned.network, None)
    parameters = dict(pruned.network.named_parameters(remove_duplicate=False))
    held = [parameters[slot.name] for slot in layout]
    flat = layout.join(held)
    dropped = _least(flat, torch.zeros_like(flat), torch.ones_like(flat, dtype=torch.bool), share, by)
    for weight, part in zip(held, layout.split(dropped), strict=True):
        weight.masked_fill_(part, 0.0)
    return pruned


def _is_weight(owners: Sequence[tuple[nn.Module, str]], slot: Slot) -> bool:
    special = any("bias" in name or "norm" in type(module).__name__.lower() for module, name in owners)
    return len(slot.shape) > 1 and not special


def _least(mean: Tensor, variance: Tensor, weights: Tensor, share: float, by: str) -> Tensor:
    """Mark the least important of the candidate weights."""
    found = weights.nonzero()[:, 0]
    order = CRITERIA[by](mean[found], variance[found]).argsort(stable=True)
    dropped = order[: int(part_of(share, len(found)))]
    return torch.zeros_like(weights).index_fill_(0, found[dropped], True)
