"""The curvature of the loss at given weights: the generalized Gauss-Newton matrix G = Σ_n J_nᵀ F_n J_n.

J_n are the derivatives of the outputs of example n with respect to the weights, and F_n is the Fisher information of
the likelihood with respect to these outputs, so G is the Fisher information of the weights. With L_n L_nᵀ = F_n and
random signs u_n, the gradient g of Σ_n (L_n u_n)·f_n(w) has E[g gᵀ] = G. So the squares of g estimate the diagonal, in
the memory and time of a training step, for any network.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.core import noise
from leanbayes.core.network import call_with, evaluation_mode, map_rows, map_tensors, output_tensor
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.gradients import gradients_of

_MOST_NUMBERS = 2**26  # of derivatives in memory at once
COUNTED = 64  # batches that are kept in memory, to know whether there are fewer


class Curvature(NamedTuple):
    """A sum over examples: the diagonal of G, (weights,), or all of G, (weights, weights); and how many there were."""

    total: Tensor
    examples: int


def estimated_diagonal(
    bnn: BayesianModel, weights: Tensor, batches: Iterable[Any], probes: int, seed: int = 0
) -> Curvature:
    """Estimate the diagonal of G at one flat vector of weights, by backward passes with random signs.

    The relative error of an entry is about √(2/probes), with the probes of all batches together, if the examples of a
    batch have gradients of similar size. It does not depend on the number of weights.

    Args:
        bnn: The model, which does not change.
        weights: The flat vector of weights.
        batches: Batches (x, y).
        probes: How many backward passes to take on the first 64 batches together, and as many per batch on others. At
            least one per batch.
        seed: The seed of the random signs.
    """
    rest = iter(batches)
    first = list(islice(rest, COUNTED))
    each = max(1, -(-probes // max(len(first), 1)))
    total, examples = torch.zeros_like(weights), 0
    with evaluation_mode(bnn):
        for number, (x, y) in enumerate(labeled(bnn, chain(first, rest))):
            key = noise.make_key(seed, number, bnn.device)

            def signed(stream: int, y: Tensor = y, key: Tensor = key) -> Callable[[Tensor], Tensor]:
                def scalar(output: Tensor) -> Tensor:
                    sign = noise.signs(output, tuple(output.shape), key, stream)
                    return (output * bnn.likelihood.fisher_root(output.detach(), y, sign)).sum()

                return scalar

            for gradient in gradients_of([signed(stream) for stream in range(each)], bnn, weights, x):
                total.addcmul_(gradient, gradient, value=1 / each)
            examples += len(y)
    return Curvature(total, _some(examples))


def exact_diagonal(bnn: BayesianModel, weights: Tensor, batches: Iterable[Any]) -> Curvature:
    """Compute the diagonal of G from the derivatives of each output of each example, a few examples at a time."""
    total, examples = torch.zeros_like(weights), 0
    for rows in _rooted(bnn, weights, batches):
        total += rows.square().sum((0, 1))
        examples += len(rows)
    return Curvature(total, _some(examples))


def full_matrix(bnn: BayesianModel, weights: Tensor, batches: Iterable[Any], index: Tensor | None = None) -> Curvature:
    """Compute all of G in double precision, or its rows and columns of the weights at the given positions."""
    size = len(weights) if index is None else len(index)
    total, examples = torch.zeros(size, size, dtype=torch.float64, device=weights.device), 0
    for rows in _rooted(bnn, weights, batches):
        chosen = (rows if index is None else rows[..., index]).flatten(0, 1).double()
        total.addmm_(chosen.mT, chosen)
        examples += len(rows)
    return Curvature(total, _some(examples))


def labeled(bnn: BayesianModel, batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield batches (x, y) on the device of the model; raise an error for anything else."""
    for batch in batches:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise LeanBayesError("A posterior is fitted to batches (x, y) of inputs and labels: pass such batches.")
        yield map_tensors(lambda tensor: tensor.to(bnn.device), batch[0]), batch[1].to(bnn.device)


def _some(examples: int) -> int:
    if not examples:
        raise LeanBayesError("The curvature needs data: pass training batches, or set training.batches.")
    return examples


@torch.no_grad()
def _rooted(bnn: BayesianModel, weights: Tensor, batches: Iterable[Any]) -> Iterator[Tensor]:
    """Yield L_nᵀ J_n of some examples, (examples, outputs, weights)."""
    if not bnn.batch_first:
        raise LeanBayesError("Derivatives of single examples need networks with the batch first: use batch_first=True.")
    with evaluation_mode(bnn):
        for x, y in labeled(bnn, batches):
            with bnn.holding(weights) as network:
                output = output_tensor(call_with(network, x))
            units = torch.eye(output[0].numel(), dtype=output.dtype, device=output.device)
            columns = [
                bnn.likelihood.fisher_root(output, y, unit.view(output[:1].shape).expand_as(output)).flatten(1)
                for unit in units
            ]
            roots = torch.stack(columns, 1).to(weights.dtype)  # (examples, columns of L, outputs)
            step = max(1, _MOST_NUMBERS // (len(units) * len(weights)))
            for rows in torch.arange(len(y), device=y.device).split(step):
                yield roots[rows] @ _jacobians(bnn, weights, x, len(y), rows).to(weights.dtype)


def _jacobians(bnn: BayesianModel, weights: Tensor, x: Any, total: int, rows: Tensor) -> Tensor:
    """Return the derivatives of the outputs of some examples of a batch, (examples, outputs, weights)."""

    def outputs(flat: Tensor, row: Tensor) -> Tensor:
        one = map_rows(lambda tensor: tensor[row[None]], x, total)  # torch.vmap does not support one number as an index
        with bnn.holding(flat) as network:
            return output_tensor(call_with(network, one)).flatten()

    try:
        with warnings.catch_warnings():  # some operations, such as attention, run for one example after the other
            warnings.filterwarnings("ignore", "There is a performance drop because")
            found: Any = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))(weights.detach(), rows)
            return found.detach()
    except RuntimeError:  # torch.vmap does not support an operation, such as a recurrent layer
        return torch.stack([_one_jacobian(bnn, weights, outputs, row) for row in rows])


def _one_jacobian(
    bnn: BayesianModel, weights: Tensor, outputs: Callable[[Tensor, Tensor], Tensor], row: Tensor
) -> Tensor:
    with torch.enable_grad():
        leaf = weights.detach().requires_grad_()
        values = outputs(leaf, row)
        return torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in values])
