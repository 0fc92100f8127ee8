"""Score every weight of a network by how sensitive its outputs are to noise in the weight."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.core.layout import Layout, Select
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.pbn import selection
from leanbayes.methods.pbn.estimators import DEFAULT, Kind, halves_of
from leanbayes.methods.pbn.selection import Per
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.conversion import bayesianize

_SHOWN = 10  # layers of a printed result


@dataclass(frozen=True)
class Sensitivity:
    """The scores that `lb.sensitivity` returns.

    Attributes:
        layout: The place of each parameter in the flat vector.
        scores: One score per weight, in one flat vector.
        kind: The kind of sensitivity.
        halves: Two independent estimates, (2, weights), of which `scores` is the mean. None if nothing was estimated
            from random signs.

    Example:
        >>> scores = lb.sensitivity(network, train_loader)
        >>> scores.per_layer()
        {'0.weight': 0.71, '2.weight': 0.29}
        >>> scores.overlap(0.01)
        0.92
    """

    layout: Layout
    scores: Tensor
    kind: str
    halves: Tensor | None = None

    def __repr__(self) -> str:
        shares = sorted(self.per_layer().items(), key=lambda item: -item[1])[:_SHOWN]
        width = max((len(name) for name, _ in shares), default=0)
        lines = [f"Sensitivity: {self.kind}, {self.layout.numel:,} weights, share of each layer"]
        lines += [f"  {name:<{width}}  {share:6.1%}" for name, share in shares]
        if len(self.layout) > _SHOWN:
            lines.append(f"  ... and {len(self.layout) - _SHOWN:,} more")
        return "\n".join(lines)

    def per_layer(self) -> dict[str, float]:
        """Return each layer's fraction of the sum of all scores."""
        parts = torch.stack([part.double().sum() for part in self.scores.split(self.layout.sizes)])
        shares = (parts / parts.sum()).nan_to_num(0.0).tolist()
        return {slot.name: share for slot, share in zip(self.layout, shares, strict=True)}

    def top(self, rate: float, per: Per = "weight") -> Tensor:
        """Return the positions of the highest scores, in increasing order.

        Args:
            rate: The fraction of all n weights to select.
            per: "weight" selects exactly ⌊rate·n⌋ weights. "row" and "layer" select whole rows (outputs of a layer) or
                whole layers in order of their mean score, each if it still fits.

        Raises:
            LeanBayesError: The rate is not a fraction, or it allows less than one weight, row or layer.
        """
        return selection.top(self.layout, self.scores, rate, per)

    def overlap(self, rate: float, per: Per = "weight") -> float | None:
        """Estimate the fraction of the exact top weights that `top` finds.

        Two independent estimates, each from half of the random signs, have the fraction s of their top weights in
        common. The mean of both finds about 2s/(1 + s) of the exact ones (the formula of Spearman and Brown), on the
        same examples.

        Args:
            rate: The fraction of all weights to select.
            per: As in `top`.

        Returns:
            The fraction, or None for kinds that are not estimated from random signs.

        Raises:
            LeanBayesError: The rate is not a fraction, or it allows less than one weight, row or layer.
        """
        if self.halves is None:
            return None
        one, other = (selection.top(self.layout, half, rate, per) for half in self.halves)
        largest = max(len(one), len(other))
        if not largest:
            return 1.0
        share = torch.isin(one, other).sum().item() / largest
        return 2 * share / (1 + share)

    def chosen(self, rate: float, per: Per = "weight") -> dict[str, int]:
        """Return how many weights of each layer `top` selects."""
        slots = self.layout.slots_of(self.top(rate, per))
        counts = torch.bincount(slots, minlength=len(self.layout)).tolist()
        return {slot.name: count for slot, count in zip(self.layout, counts, strict=True)}


@checked()
def sensitivity(
    model: nn.Module,
    batches: Iterable[tuple[Any, Tensor]] | None = None,
    kind: Kind = DEFAULT,
    *,
    likelihood: Likelihood | None = None,
    select: Select = None,
    seed: int = 0,
) -> Sensitivity:
    """Score every weight of a network, or of a Bayesian model at its mean, in evaluation mode.

    The model does not change. To first order the noise of independent weights gives an output the variance
    Σ_i (∂f/∂θ_i)²·σ_i² ("Efficient Uncertainty Estimation via Sensitivity-Guided Subnetwork Selection for Scalable
    Variational Inference", equation 6), so the squared Jacobian says how much the noise of a weight matters.

    Args:
        model: A network, or a Bayesian model.
        batches: Training batches (x, y). "magnitude" and "random" do not need them. Of an iterator without a length,
            "jacobian" keeps up to 64 batches in memory.
        kind: What to compute, with f the outputs, θ the weights and L the loss:

            - "jacobian": Σ_o (∂f_o/∂θ)², averaged over examples, estimated by backward passes with random signs: at
              least 256 in all and at least 4 per batch. `Sensitivity.overlap` estimates how many of the top weights
              that finds.
            - "moment": the same by one backward pass through the moment graph, which approximates correlations.
            - "fisher": (∂L/∂θ)² of single examples, averaged.
            - "paper": |∂L/∂θ| of the mean loss.
            - "magnitude": |θ|.
            - "random": random numbers.
        likelihood: As in `lb.bayesianize`, for a plain network.
        select: As in `lb.bayesianize`, for a plain network.
        seed: The seed of random signs and random scores.

    Returns:
        The scores, with methods to summarize them per layer and to select the highest.

    Raises:
        LeanBayesError: The kind is unknown, it needs batches and there are none, or the model has no Bayesian weights.

    Example:
        >>> scores = lb.sensitivity(network, train_loader)
        >>> positions = scores.top(0.05)
    """
    if isinstance(model, BayesianModel):
        if select is not None or likelihood is not None:
            raise LeanBayesError("A Bayesian model has its weights and likelihood: leave select and likelihood out.")
        bnn = model
    else:
        bnn = bayesianize(model, MeanField(), select=select, likelihood=likelihood)
    if not bnn.method.random_weights:
        raise LeanBayesError(f"{type(bnn.method).__name__} has no Bayesian weights to score: pass the plain network.")
    weights = bnn.posterior.mean().detach()
    halves = halves_of(bnn, weights, batches, kind, seed)
    return Sensitivity(bnn.layout, halves.mean(0), kind, halves if len(halves) == 2 else None)
