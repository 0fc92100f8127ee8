"""How each kind of sensitivity is computed.

To first order the noise of independent weights gives an output the variance Σ_i (∂f/∂θ_i)²·σ_i² (PBN, equation 6), so
the sensitivity to a weight is S_i = Σ_o (∂f_o/∂θ_i)², averaged over examples. `jacobian` and `moment` estimate it; the
other kinds are cheaper or simpler measures to compare with.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from leanbayes.core import noise
from leanbayes.core.layout import Layout
from leanbayes.core.names import suggestion
from leanbayes.core.network import call_with, evaluation_mode, output_tensor
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.gradients import gradients_of, mean_squared_gradient, no_batches, weight_gradient
from leanbayes.posteriors import Posterior
from leanbayes.rules import MomentPropagation

Kind = Literal["jacobian", "moment", "fisher", "paper", "magnitude", "random"]
Batches = Iterable[tuple[Any, Tensor]]
# The kind closest to the exact sensitivity on MLPs and on convolutional networks: experiments/sensitivity.py compares
# all kinds with per-example Jacobians, and docs/partial.md has the results.
DEFAULT: Kind = "jacobian"
NEEDS_NO_DATA = ("magnitude", "random")
# The error of "jacobian" depends on the number of random sign vectors on all batches together. On networks trained on
# digits, 4, 16, 64 and 256 of them find 40, 60, 78 and 90 % of the exact top 1 % of the weights of an MLP, and 79, 90,
# 96 and 98 % on a convolutional network.
PROBES = 256  # at least so many on all batches together
_FEWEST = 4  # at least so many per batch
_VARIANCE = 1e-6  # of every weight in the moment graph; so small that the graph is linear in it


def check_kind(kind: str) -> None:
    """Raise an error for an unknown kind of sensitivity."""
    if kind not in get_args(Kind):
        hint = suggestion(kind, get_args(Kind), f"use one of {', '.join(get_args(Kind))}.")
        raise LeanBayesError(f"There is no sensitivity {kind!r}: {hint}")


def scores_of(bnn: BayesianModel, weights: Tensor, batches: Batches | None, kind: Kind, seed: int = 0) -> Tensor:
    """Return the sensitivity to each weight, at one flat vector of weights; see `lb.sensitivity`."""
    return halves_of(bnn, weights, batches, kind, seed).mean(0)


def halves_of(bnn: BayesianModel, weights: Tensor, batches: Batches | None, kind: Kind, seed: int = 0) -> Tensor:
    """Return the scores from each half of the random sign vectors, (2, weights); (1, weights) for other kinds."""
    check_kind(kind)
    if kind in NEEDS_NO_DATA:
        return score_without_data(weights, kind, seed)[None]
    if batches is None:
        raise LeanBayesError(f"The sensitivity {kind!r} needs training batches: pass data, or use 'magnitude'.")
    with evaluation_mode(bnn):
        if kind == "jacobian":
            batches, number = counted(batches)
            return _jacobian(bnn, weights, _pairs(batches), number, seed)
        return _ESTIMATORS[kind](bnn, weights, _pairs(batches), seed)[None]


def counted(batches: Iterable[Any]) -> tuple[Iterable[Any], int]:
    """Return the batches and their number, or a smaller number that also needs only the fewest probes per batch.

    The first batches of an iterator without a length are kept in memory.
    """
    try:
        return batches, len(batches)  # type: ignore[arg-type]
    except TypeError:  # no length, or a data loader of a data set without one
        rest = iter(batches)
        first = list(islice(rest, PROBES // _FEWEST))
        return chain(first, rest), len(first)


def score_without_data(weights: Tensor, kind: str, seed: int = 0) -> Tensor:
    """Return the magnitude of each weight, or random scores that are the same on every device."""
    if kind == "magnitude":
        return weights.detach().abs()
    generator = torch.Generator().manual_seed(noise.mix(seed))
    return torch.rand(weights.numel(), generator=generator, device="cpu").to(weights)


def _pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise LeanBayesError("Each batch of a sensitivity must be a pair (x, y) of inputs and labels.")
        yield batch[0], batch[1]


def _mean_over_examples(batches: Batches, score: Callable[[int, Any, Tensor], Tensor]) -> Tensor:
    """Add up the scores of all batches, and divide by the number of examples."""
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


def _fisher(bnn: BayesianModel, weights: Tensor, batches: Batches, seed: int) -> Tensor:
    return mean_squared_gradient(bnn, weights, batches, per_example=True)


def _jacobian(bnn: BayesianModel, weights: Tensor, batches: Batches, number: int, seed: int) -> Tensor:
    """Square ∂/∂θ Σ_xo s_xo f_o(x): its mean over random signs s is Σ_xo (∂f_o/∂θ)² (Hutchinson). Return two halves."""
    probes = max(_FEWEST, -(-PROBES // max(number, 1)))
    probes += probes % 2

    def score(number: int, x: Any, y: Tensor) -> Tensor:
        key = noise.make_key(seed, number, bnn.device)

        def signed(stream: int) -> Callable[[Tensor], Tensor]:
            return lambda output: (output * noise.signs(output, tuple(output.shape), key, stream)).sum()

        halves = torch.zeros((2, *weights.shape), dtype=weights.dtype, device=weights.device)
        for stream, gradient in enumerate(gradients_of([signed(n) for n in range(probes)], bnn, weights, x)):
            halves[stream % 2].addcmul_(gradient, gradient, value=2 / probes)
        return halves

    return _mean_over_examples(batches, score)


class _GivenMoments(Posterior):
    """A posterior with given means and variances."""

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
    rule, key = MomentPropagation("common", "taylor"), noise.make_key(seed, device=bnn.device)
    buffers = {name: make().to(bnn.device) for name, make in rule.buffers().items()}

    def score(number: int, x: Any, y: Tensor) -> Tensor:
        variance = torch.full_like(weights, _VARIANCE).requires_grad_()
        with torch.enable_grad():
            values, _ = rule.weights(_GivenMoments(bnn.layout, weights, variance), key, False)
            with bnn.with_values(values) as network:
                rule.begin(values, replace(bnn.pass_context(x), training=False, buffers=buffers))
                output: Any = output_tensor(call_with(network, x))
            return torch.autograd.grad(output.variance.sum(), [variance])[0]

    return _mean_over_examples(batches, score)


_ESTIMATORS: dict[str, Callable[[BayesianModel, Tensor, Batches, int], Tensor]] = {
    "moment": _moment,
    "fisher": _fisher,
    "paper": _paper,
}
