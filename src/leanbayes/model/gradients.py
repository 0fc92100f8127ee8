"""Gradients of the loss with respect to a flat vector of weights, including those that a sparse posterior omits."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.core import noise
from leanbayes.core.network import call_with, map_rows, output_tensor
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import NegativeLogLikelihood
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.draw import Draw, StochasticNetwork
from leanbayes.model.method import Training

_MOST_NUMBERS = 2**26  # of per-example gradients in memory at once


class ShardedWeights(NamedTuple):
    """Weights of a sharded model, which no process has all of: the sample of a key, or the mean (None)."""

    key: Tensor | None


def weights_at(bnn: BayesianModel, key: Tensor | None = None) -> Tensor | ShardedWeights:
    """Return the sample of a key, or the mean, as functions of this module take it."""
    if bnn.root_units is not None:
        return ShardedWeights(key)
    return bnn.posterior.mean() if key is None else bnn.posterior.sample(key)


def averaged(training: Training, values: Tensor) -> Tensor:
    """Return the mean of gradients over all processes, which those of a sharded model already are."""
    return values if training.model.root_units is not None else training.average(values)


def weight_gradient(bnn: BayesianModel, weights: Tensor | ShardedWeights, x: Any, y: Tensor) -> Tensor:
    """Return ∂L/∂w of the mean NLL of a batch. The model does not change.

    The network runs in its current mode, training or evaluation. Its buffers, such as BatchNorm's statistics, and the
    global random state are restored, and no parameter's .grad changes.

    Args:
        bnn: The model.
        weights: Where to take the gradient: one flat vector, or the weights of a sharded model. Then the result is the
            mean over all processes, and of each unit the part that this process holds.
        x: The inputs.
        y: The targets.
    """
    if isinstance(weights, Tensor):
        return nll_and_gradient(bnn, weights, x, y)[1]
    counts: list[Tensor | int] = []

    def loss(output: Tensor) -> Tensor:
        total, observations = bnn.likelihood.nll(output, y)
        counts.append(observations)
        return total

    return _sharded_gradient(bnn, weights.key, loss, x, counts)


def mean_nll(bnn: BayesianModel, weights: Tensor, x: Any, y: Tensor) -> Tensor:
    """Return the mean NLL of a batch at one flat vector of weights. The model does not change."""
    with _outputs(bnn, weights.detach(), x) as output:
        total, observations = bnn.likelihood.nll(output, y)
        return total / observations


def nll_and_gradient(bnn: BayesianModel, weights: Tensor, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean NLL of a batch at one flat vector of weights, and ∂L/∂w, as `weight_gradient` computes it."""
    values: list[NegativeLogLikelihood] = []

    def loss(output: Tensor) -> Tensor:
        values.append(bnn.likelihood.nll(output, y))
        return values[0].total  # not the mean, whose gradient underflows more often in fp16

    (gradient,) = gradients_of([loss], bnn, weights, x)
    total, observations = values[0]
    return total.detach() / observations, gradient / observations


def _sharded_gradient(
    bnn: BayesianModel, key: Tensor | None, loss: Callable[[Tensor], Tensor], x: Any, counts: list[Tensor | int]
) -> Tensor:
    posterior: Any = bnn.posterior
    rule = "mean" if key is None else "sample"
    draw = Draw(noise.make_key(0, device=bnn.device) if key is None else key)
    before = [(parameter, parameter.grad) for parameter in bnn.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        with _unchanged(bnn), bnn.using(rule), posterior.watching(lambda grad: grad / counts[0]) as gradient:
            loss(output_tensor(call_with(bnn, x, _draw=draw))).backward()
            return gradient()
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def gradients_of(
    functions: Sequence[Callable[[Tensor], Tensor]], bnn: BayesianModel, weights: Tensor, x: Any
) -> Iterator[Tensor]:
    """Yield ∂/∂w of functions of the same outputs, at one flat vector of weights. The model does not change."""
    leaf = weights.detach().requires_grad_()
    with _outputs(bnn, leaf, x) as output:
        for number, function in enumerate(functions, start=1):
            yield torch.autograd.grad(function(output), [leaf], retain_graph=number < len(functions))[0]


@contextlib.contextmanager
def _outputs(bnn: BayesianModel, weights: Tensor, x: Any) -> Iterator[Tensor]:
    """Yield the outputs for one flat vector of weights, with a graph if it requires a gradient.

    After the block the model is as before.
    """
    with _unchanged(bnn), torch.set_grad_enabled(weights.requires_grad), bnn.holding(weights) as held:
        network = partial(held, None) if isinstance(held, StochasticNetwork) else held
        yield output_tensor(call_with(network, x))


@contextlib.contextmanager
def _unchanged(bnn: BayesianModel) -> Iterator[None]:
    """Compute gradients in a block, and restore the buffers of the network and the global random state after it."""
    before = [(buffer, buffer.clone()) for buffer in bnn.network.buffers()]
    devices = [bnn.device] if bnn.device.type == "cuda" else []
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def mean_squared_gradient(
    bnn: BayesianModel,
    weights: Tensor | ShardedWeights,
    batches: Iterable[tuple[Any, Tensor]],
    per_example: bool = False,
) -> Tensor:
    """Return the mean of (∂L/∂w)².

    L is the loss of a batch, whose gradient is cheap, or of one example (the diagonal of the empirical Fisher
    information).
    """
    total, count = torch.zeros((), device=bnn.device), 0
    for x, y in batches:
        if per_example:
            assert isinstance(weights, Tensor)
            total = total + _squared_gradients(bnn, weights.detach(), x, y)
            count += len(y)
        else:
            total = total + weight_gradient(bnn, weights, x, y).square()
            count += 1
    if not count:
        raise no_batches()
    return total / count


def no_batches() -> LeanBayesError:
    """Return the error for a sensitivity without data."""
    return LeanBayesError("The sensitivity of weights needs data: pass training batches, or set training.batches.")


def _squared_gradients(bnn: BayesianModel, weights: Tensor, x: Any, y: Tensor) -> Tensor:
    """Return the sum of (∂L/∂w)² over the examples of a batch, computed for a few examples at a time."""
    if not bnn.batch_first:
        raise LeanBayesError(
            "The sensitivity of single examples needs networks with the batch first, and this one has layers with "
            'batch_first=False: use batch_first=True, or another sensitivity such as "jacobian".'
        )
    total, rows = torch.zeros_like(weights), len(y)
    step = max(1, min(rows, _MOST_NUMBERS // max(1, weights.numel())))
    for part in torch.arange(rows, device=y.device).split(step):
        try:
            total += _vectorized(bnn, weights, x, y, part)
        except RuntimeError:  # torch.vmap does not support an operation, such as a recurrent layer
            for row in part.tolist():
                one = map_rows(lambda tensor, row=row: tensor[row : row + 1], x, rows)  # type: ignore[misc]
                total += _example_gradient(bnn, weights, one, y[row : row + 1]).square()
    return total


def _example_gradient(bnn: BayesianModel, weights: Tensor, x: Any, y: Tensor) -> Tensor:
    (gradient,) = gradients_of([lambda output: bnn.likelihood.nll(output, y).total], bnn, weights, x)
    return gradient


def _vectorized(bnn: BayesianModel, weights: Tensor, x: Any, y: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of the squared gradients of a few examples of a batch, by torch.vmap."""

    def loss(flat: Tensor, row: Tensor) -> Tensor:
        one = row[None]  # torch.vmap does not support a single number as an index
        inputs = map_rows(lambda tensor: tensor[one], x, len(y))
        with bnn.holding(flat) as network:
            return bnn.likelihood.nll(output_tensor(call_with(network, inputs)), y[one]).total

    with warnings.catch_warnings():  # some operations, such as attention, run for one example after the other
        warnings.filterwarnings("ignore", "There is a performance drop because")
        gradients: Any = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)
    return gradients.detach().square().sum(0)
