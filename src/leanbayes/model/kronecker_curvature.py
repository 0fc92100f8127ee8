"""Kronecker factors of the Gauss-Newton matrix (KFAC: Martens and Grosse 2015, Grosse and Martens 2016).

A linear layer z = W a has the Gauss-Newton matrix Σ_n B_n ⊗ a_n a_nᵀ, where B_n is that of its output z_n. KFAC takes
(Σ_n B_n) ⊗ (mean of a_n a_nᵀ), as if both were independent. It is exact for one example, and whenever all B_n are
equal, as for the last layer of a regression. A convolution is a linear layer of patches, and each patch counts as an
example of its own. A bias is a layer whose input is 1. Parameters are independent of each other.
"""

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.network import call_with, evaluation_mode, output_tensor
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.curvature import COUNTED, labeled


class Factors(NamedTuple):
    """The Kronecker factors of one parameter: B, the sum over examples, and A, the mean."""

    outputs: Tensor
    inputs: Tensor


class _Layer:
    """The sums of one layer over all data: Σ a aᵀ, their number, and Σ g gᵀ of gradients of its outputs."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.inputs: Tensor | float = 0.0
        self.outputs: Tensor | float = 0.0
        self.count = 0
        self.seen: list[Tensor] = []

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """Add the inputs of a call, and keep its output. Later layers may change a copy of it in place."""
        patches = _patches(module, (args[0] if args else kwargs["input"]).detach()).double()
        self.inputs = self.inputs + patches.mT @ patches
        self.count += len(patches)
        self.seen.append(output)
        return output.clone()

    def add(self, gradient: Tensor | None, weight: float) -> None:
        """Add the gradient of an output."""
        if gradient is not None:
            channels = gradient.movedim(1, -1) if isinstance(self.module, nn.modules.conv._ConvNd) else gradient
            rows = channels.flatten(0, -2).double()
            self.outputs = self.outputs + weight * (rows.mT @ rows)


def kronecker_factors(
    bnn: BayesianModel, weights: Tensor, batches: Iterable[Any], probes: int | None, seed: int = 0
) -> list[Factors]:
    """Compute the Kronecker factors of each parameter of the layout, in double precision.

    Args:
        bnn: The model, which does not change.
        weights: The flat vector of weights.
        batches: Batches (x, y).
        probes: How many backward passes with random signs to take on the first 64 batches together, and as many per
            batch on others. None takes one per output, which is exact, and so do probes that are not fewer.
        seed: The seed of the random signs.

    Raises:
        UnsupportedOperation: A Bayesian parameter is not the weight or bias of a linear layer or convolution.
    """
    layers = _layers_of(bnn)
    sums = {id(module): _Layer(module) for module in layers}
    rest = iter(batches)
    first = list(islice(rest, COUNTED))
    each = None if probes is None else max(1, -(-probes // max(len(first), 1)))
    handles = [module.register_forward_hook(sums[id(module)], with_kwargs=True) for module in layers]
    try:
        with evaluation_mode(bnn), torch.enable_grad():
            for number, (x, y) in enumerate(labeled(bnn, chain(first, rest))):
                with bnn.holding(weights.detach().requires_grad_()) as network:
                    output = output_tensor(call_with(network, x))
                    key = noise.make_key(seed, number, bnn.device)
                    _add_gradients(bnn, output, y, list(sums.values()), each, key)
    finally:
        for handle in handles:
            handle.remove()
    return [_factors(bnn, slot.name, sums) for slot in bnn.layout]


def _add_gradients(
    bnn: BayesianModel, output: Tensor, y: Tensor, layers: list[_Layer], probes: int | None, key: Tensor
) -> None:
    """Add g gᵀ for the gradients g of Σ_n (L_n u)·f_n, where u are the unit vectors, or random signs."""
    size = output[0].numel()
    probes = None if probes is not None and probes >= size else probes
    targets = [tensor for layer in layers for tensor in layer.seen]
    owners = [layer for layer in layers for _ in layer.seen]
    for number in range(size if probes is None else probes):
        if probes is None:
            unit = F.one_hot(torch.tensor(number, device=output.device), size).to(output).view(output[:1].shape)
            direction = unit.expand_as(output)
        else:
            direction = noise.signs(output, tuple(output.shape), key, number)
        scalar = (output * bnn.likelihood.fisher_root(output.detach(), y, direction)).sum()
        gradients = torch.autograd.grad(scalar, targets, retain_graph=True, allow_unused=True)
        for layer, gradient in zip(owners, gradients, strict=True):
            layer.add(gradient, 1.0 if probes is None else 1 / probes)
    for layer in layers:
        layer.seen.clear()


def _layers_of(bnn: BayesianModel) -> list[Any]:
    """Return the layers with Bayesian parameters, each once."""
    found: dict[int, Any] = {}
    for slot, places in zip(bnn.layout, bnn.slot_places, strict=True):
        module, name = places[0]
        usual = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and name in ("weight", "bias")
        if usual and not isinstance(module, nn.Linear):
            usual = bool(module.groups == 1) and module.padding_mode == "zeros"
        if not usual or len(places) > 1:
            raise UnsupportedOperation(_refusal(slot.name))
        found[id(module)] = module
    return list(found.values())


def _refusal(name: str) -> str:
    return (
        f"{name} has no Kronecker factors, which linear layers and convolutions without groups have: choose other "
        "parameters by select= or over='last-layer', or use covariance='diagonal'."
    )


def _factors(bnn: BayesianModel, name: str, sums: dict[int, _Layer]) -> Factors:
    module, attribute = bnn.slot_places[[slot.name for slot in bnn.layout].index(name)][0]
    layer = sums[id(module)]
    if isinstance(layer.outputs, float) or isinstance(layer.inputs, float):
        if layer.count or not any(other.count for other in sums.values()):
            raise LeanBayesError("The curvature needs data: pass training batches, or set training.batches.")
        raise UnsupportedOperation(_refusal(name))
    inputs = layer.inputs / layer.count
    return Factors(layer.outputs, inputs if attribute == "weight" else torch.ones_like(inputs[:1, :1]))


def _patches(module: Any, x: Tensor) -> Tensor:
    """Return the inputs of a layer as rows: one per example, or one per patch of a convolution."""
    if isinstance(module, nn.Linear):
        return x.flatten(0, -2)
    two = isinstance(module, nn.Conv2d)
    kernel, stride, dilation = (
        tuple(size) if two else (1, *size) for size in (module.kernel_size, module.stride, module.dilation)
    )
    x = F.pad(x, module._reversed_padding_repeated_twice)
    columns = F.unfold(x if two else x.unsqueeze(-2), kernel, dilation, 0, stride)
    return columns.mT.flatten(0, 1)
