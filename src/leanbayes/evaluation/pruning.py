"""Global pruning: how the scores of any method change as its least important weights are set to zero.

Importance is |μ| ("magnitude") or |μ|/σ ("snr": Graves 2011, Blundell et al. 2015), ranked over all layers together.
The weights are those of the posterior, less biases and norms; where a network keeps its own, those that would be
Bayesian by default, of all members of an ensemble together.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError, UnsupportedOperation, did_you_mean
from leanbayes.evaluation.scores import evaluate
from leanbayes.figures import Figure, Series
from leanbayes.layout import Slot, choose
from leanbayes.network import places
from leanbayes.posteriors import Posterior
from leanbayes.ranking import part_of

SHARES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)


class Pruned(Posterior):
    """Any posterior with some weights set to zero; it predicts by every rule, and is neither trained nor saved."""

    dropped: Tensor

    def __init__(self, posterior: Posterior, dropped: Tensor) -> None:
        super().__init__(posterior.layout)
        self.inner = posterior
        self.register_buffer("dropped", dropped)

    def mean(self) -> Tensor:
        """E[w], 0 where pruned."""
        return self._kept(self.inner.mean())

    def variance(self) -> Tensor:
        """Var[w], 0 where pruned."""
        return self._kept(self.inner.variance())

    def sample(self, key: Tensor) -> Tensor:
        """Return the draw of the whole posterior, 0 where pruned."""
        return self._kept(self.inner.sample(key))

    def perturbation(self, key: Tensor) -> Tensor:
        """Return the perturbation of the whole posterior, 0 where pruned."""
        return self._kept(self.inner.perturbation(key))

    def kl(self, key: Tensor) -> Tensor:
        """Refuse: a weight that is surely zero has no finite KL."""
        raise UnsupportedOperation("A pruned model has no KL: train the model that it was pruned from.")

    def scale_parameters(self) -> Iterator[nn.Parameter]:
        """Yield those of the whole posterior."""
        return self.inner.scale_parameters()

    def _kept(self, flat: Tensor) -> Tensor:
        return flat.masked_fill(self.dropped, 0.0)

    def _save_to_state_dict(self, *args: Any) -> NoReturn:
        # lb.load would build the method's own posterior, which this does not fit.
        raise UnsupportedOperation("A pruned model cannot be saved: save the one it was pruned from, and prune again.")


def _magnitude(mean: Tensor, variance: Tensor) -> Tensor:
    return mean.abs()


def _snr(mean: Tensor, variance: Tensor) -> Tensor:
    if not variance.any():
        raise LeanBayesError('The weights have no spread to rank by: prune by="magnitude".')
    # A weight that is surely zero matters least, and another one without spread matters most.
    return torch.where(mean == 0, mean, mean.abs() / variance.sqrt())


CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"magnitude": _magnitude, "snr": _snr}


@torch.no_grad()
def prune(bnn: BayesianModel, share: float, by: str = "magnitude") -> BayesianModel:
    """Return a copy of the model in which the ⌊share·n⌋ least important of its n weights are zero in every draw.

    Among equal weights those that come first in the layout go first.
    """
    if by not in CRITERIA:
        hint = did_you_mean(by, CRITERIA, f"there are {', '.join(CRITERIA)}.")
        raise LeanBayesError(f"There is no criterion {by!r}: {hint}")
    if not 0 <= share <= 1:
        raise LeanBayesError(f"share={share} must lie between 0 and 1.")
    pruned = copy.deepcopy(bnn)
    posterior = pruned.posterior
    if len(pruned.layout):
        weights = torch.tensor([_is_weight(pruned.network, slot) for slot in pruned.layout], device=bnn.device)
        if not weights.any():
            raise LeanBayesError("Only biases and norms are Bayesian, and are not pruned: choose weights with select=.")
        dropped = _least(posterior.mean(), posterior.variance(), pruned.layout.expand(weights), share, by)
        pruned.posterior = Pruned(posterior, dropped).train(posterior.training)
        return pruned
    layout, _ = choose(pruned.network, None)
    parameters = dict(pruned.network.named_parameters(remove_duplicate=False))
    held = [parameters[slot.name] for slot in layout]
    flat = layout.join(held)
    dropped = _least(flat, torch.zeros_like(flat), torch.ones_like(flat, dtype=torch.bool), share, by)
    for weight, part in zip(held, layout.split(dropped), strict=True):
        weight.masked_fill_(part, 0.0)
    return pruned


def _is_weight(network: nn.Module, slot: Slot) -> bool:
    owners = places(network, slot.names)
    special = any("bias" in name or "norm" in type(module).__name__.lower() for module, name in owners)
    return len(slot.shape) > 1 and not special


def _least(mean: Tensor, variance: Tensor, weights: Tensor, share: float, by: str) -> Tensor:
    """Mark the least important of the weights."""
    found = weights.nonzero()[:, 0]
    order = CRITERIA[by](mean[found], variance[found]).argsort(stable=True)
    dropped = order[: int(part_of(share, len(found)))]
    return torch.zeros_like(weights).index_fill_(0, found[dropped], True)


def pruning_curve(
    bnn: BayesianModel,
    batches: Callable[[], Iterable[tuple[Any, Tensor]]],
    shares: Sequence[float] = SHARES,
    *,
    by: str = "magnitude",
    samples: int | None = None,
    rule: str | None = None,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Score the model at each share of pruned weights: a dict of `share` and what `evaluate` gives.

    batches: a function that gives the test batches (x, y) anew; every share reads them once, with the same draws.
    """
    if not callable(batches):
        raise LeanBayesError("batches must be a function that gives them anew for each share: pass lambda: batches.")
    return [
        {"share": float(share)} | evaluate(prune(bnn, share, by), batches(), samples=samples, rule=rule, seed=seed)
        for share in shares
    ]


def pruning_figure(curves: Mapping[str, Sequence[Mapping[str, float]]], score: str | None = None) -> Figure:
    """Draw a score over the share of pruned weights, one line a named curve; by default accuracy, else rmse."""
    if score is None:
        score = "accuracy" if all("accuracy" in point for curve in curves.values() for point in curve) else "rmse"
    return Figure(
        key="pruning",
        title="Pruning",
        kind="lines",
        x="weights set to zero",
        y=score,
        caption="The least important weights of all layers are set to zero, without training again. A line that stays "
        "flat for long belongs to a model that needs few of its weights.",
        series=tuple(
            Series(name, tuple(point["share"] for point in curve), tuple(point[score] for point in curve))
            for name, curve in curves.items()
        ),
        percent="x" if score == "rmse" else "xy",
    )
