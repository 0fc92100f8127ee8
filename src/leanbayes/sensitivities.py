"""How much each weight matters: what its noise would do to the outputs of a network, or other measures of it.

To first order the noise of independent weights gives an output the variance Σ_i (∂f/∂θ_i)²·σ_i² (PBN, equation 6), so
that a weight counts by S_i = Σ_o (∂f_o/∂θ_i)², on average over examples.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from leanbayes import noise, selection
from leanbayes.bayesian import BayesianModel
from leanbayes.conversion import bayesianize
from leanbayes.errors import LeanBayesError, did_you_mean
from leanbayes.gradients import gradients_of, mean_squared_gradient, no_batches, weight_gradient
from leanbayes.layout import Layout, Select
from leanbayes.likelihoods import Likelihood
from leanbayes.methods.mean_field import MeanField
from leanbayes.network import call_with, evaluation_mode, output_tensor
from leanbayes.posteriors import Posterior
from leanbayes.rules import MomentPropagation
from leanbayes.selection import Per

Kind = Literal["jacobian", "moment", "fisher", "paper", "magnitude", "random"]
# The one that is near the truth on perceptrons and on convolutional networks: experiments/sensitivity.py sets all kinds
# beside Jacobians of single examples, and docs/partial.md has its figures.
DEFAULT: Kind = "jacobian"
NEEDS_NO_DATA = ("magnitude", "random")
_PROBES = 4  # sets of signs a batch
_VARIANCE = 1e-6  # of every weight in the moment graph: so small that the graph is linear in it


@dataclass(frozen=True)
class Sensitivity:
    """A score for each weight of a layout, in one flat vector."""

    layout: Layout
    scores: Tensor
    kind: str

    def per_layer(self) -> dict[str, float]:
        """Return each layer's share of all scores."""
        parts = torch.stack([part.double().sum() for part in self.scores.split(self.layout.sizes)])
        shares = (parts / parts.sum()).nan_to_num(0.0).tolist()
        return {slot.name: share for slot, share in zip(self.layout, shares, strict=True)}

    def top(self, rate: float, per: Per = "weight") -> Tensor:
        """Return the positions of the highest scores, in increasing order: see `selection.top`."""
        return selection.top(self.layout, self.scores, rate, per)

    def chosen(self, rate: float, per: Per = "weight") -> dict[str, int]:
        """Return how many weights of each layer are among those."""
        slots = self.layout.slots_of(self.top(rate, per))
        counts = torch.bincount(slots, minlength=len(self.layout)).tolist()
        return {slot.name: count for slot, count in zip(self.layout, counts, strict=True)}


def sensitivity(
    model: nn.Module,
    batches: Iterable[tuple[Any, Tensor]] | None = None,
    kind: Kind = DEFAULT,
    *,
    likelihood: Likelihood | None = None,
    select: Select = None,
    seed: int = 0,
) -> Sensitivity:
    """Score every weight of a network, or of a Bayesian model at its mean, in evaluation mode; it stays as it is.

    batches: (x, y) of training data; not needed for magnitude and random. kind:
    jacobian   mean over examples of Σ_o (∂f_o/∂θ)², by backward passes of outputs with random signs
    moment     the same by one backward pass of the outputs' variance through the moment graph, which forgets
               correlations
    fisher     mean of (∂L/∂θ)² over single examples
    paper      |∂L/∂θ| of the mean loss
    magnitude  |θ|
    random     numbers from the seed
    likelihood and select as in `bayesianize`, for a plain network.
    """
    if isinstance(model, BayesianModel):
        if select is not None or likelihood is not None:
            raise LeanBayesError("A Bayesian model has its weights and likelihood: leave select and likelihood out.")
        bnn = model
    else:
        bnn = bayesianize(model, MeanField(), select=select, likelihood=likelihood)
    if not len(bnn.layout):
        raise LeanBayesError(f"{type(bnn.method).__name__} has no Bayesian weights to score: pass the plain network.")
    weights = bnn.posterior.mean().detach()
    return Sensitivity(bnn.layout, scores_of(bnn, weights, batches, kind, seed), kind)


def check_kind(kind: str) -> None:
    """Refuse what is no kind of sensitivity."""
    if kind not in get_args(Kind):
        hint = did_you_mean(kind, get_args(Kind), f"there are {', '.join(get_args(Kind))}.")
        raise LeanBayesError(f"There is no sensitivity {kind!r}: {hint}")


def scores_of(
    bnn: BayesianModel, weights: Tensor, batches: Iterable[tuple[Any, Tensor]] | None, kind: Kind, seed: int = 0
) -> Tensor:
    """Score the weights of a model at one flat vector of them; see `sensitivity`."""
    check_kind(kind)
    if kind in NEEDS_NO_DATA:
        return score_without_data(weights, kind, seed)
    if batches is None:
        raise LeanBayesError(f"The sensitivity {kind!r} needs training batches: pass data, or use 'magnitude'.")
    pairs = _pairs(batches)
    with evaluation_mode(bnn):
        if kind == "fisher":
            return mean_squared_gradient(bnn, weights, pairs, per_example=True)
        return _KINDS[kind](bnn, weights, pairs, seed)


def _pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise LeanBayesError("The batches of a sensitivity must be pairs (x, y) of inputs and labels: pass those.")
        yield batch[0], batch[1]


def score_without_data(weights: Tensor, kind: str, seed: int = 0) -> Tensor:
    """Score weights by their size, or at random, the same on every device."""
    if kind == "magnitude":
        return weights.detach().abs()
    generator = torch.Generator().manual_seed(noise.mix(seed))
    return torch.rand(weights.numel(), generator=generator, device="cpu").to(weights)


Batches = Iterable[tuple[Any, Tensor]]


def _mean_over_examples(batches: Batches, score: Callable[[int, Any, Tensor], Tensor]) -> Tensor:
    """Add up what the score gives for each batch, and divide by the number of examples."""
    total, count = torch.zeros(()), 0
    for number, (x, y) in enumerate(batches):
        part = score(number, x, y)
        total, count = part if not count else total + part, count + len(y)
    if not count:
        raise no_batches()
    return total / count


def _paper(bnn: BayesianModel, weights: Tensor, batches: Batches, seed: int) -> Tensor:
    def score(number: int, x: Any, y: Tensor) -> Tensor:
        return weight_gradient(bnn, weights, x, y) * len(y)

    return _mean_over_examples(batches, score).abs()


def _jacobian(bnn: BayesianModel, weights: Tensor, batches: Batches, seed: int) -> Tensor:
    """Take squares of ∂/∂θ Σ_xo s_xo f_o(x): over random signs s their mean is Σ_xo (∂f_o/∂θ)² (Hutchinson)."""

    def score(number: int, x: Any, y: Tensor) -> Tensor:
        key = noise.make_key(seed, number, bnn.device)

        def signed(stream: int) -> Callable[[Tensor], Tensor]:
            return lambda output: (output * noise.signs(output, tuple(output.shape), key, stream)).sum()

        gradients = gradients_of([signed(stream) for stream in range(_PROBES)], bnn, weights, x)
        return torch.stack([gradient.square() for gradient in gradients]).mean(0)

    return _mean_over_examples(batches, score)


class _Spread(Posterior):
    """Given means and variances."""

    def __init__(self, layout: Layout, mean: Tensor, variance: Tensor) -> None:
        super().__init__(layout)
        self._mean, self._variance = mean, variance
        self.eval()

    def mean(self) -> Tensor:
        return self._mean

    def variance(self) -> Tensor:
        return self._variance


def _moment(bnn: BayesianModel, weights: Tensor, batches: Batches, seed: int) -> Tensor:
    """Take ∂/∂v Σ_xo Var f_o(x) for small variances v of the weights."""
    rule, key, signs = MomentPropagation("common", "taylor"), noise.make_key(seed, device=bnn.device), bnn.probe_signs

    def score(number: int, x: Any, y: Tensor) -> Tensor:
        variance = torch.full_like(weights, _VARIANCE).requires_grad_()
        with torch.enable_grad():
            values, _ = rule.weights(_Spread(bnn.layout, weights, variance), key, False)
            with bnn.with_values(values) as network:
                rule.begin(bnn, values, x)
                output: Any = output_tensor(call_with(network, x))
            return torch.autograd.grad(output.variance.sum(), [variance])[0]

    rule.prepare(bnn)
    try:
        return _mean_over_examples(batches, score)
    finally:
        bnn.probe_signs = signs


_KINDS: dict[str, Callable[..., Tensor]] = {"jacobian": _jacobian, "moment": _moment, "paper": _paper}
