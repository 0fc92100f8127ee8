"""The gradient of the loss for all weights of the moment, also for those that a sparse posterior does not hold."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.network import call_with, output_tensor


def weight_gradient(bnn: BayesianModel, weights: Tensor, x: Any, y: Tensor) -> Tensor:
    """∂L/∂w of a batch's mean NLL at one flat vector of weights; nothing of the model is changed.

    The network runs as it stands, in training mode or not. Its buffers, such as BatchNorm's statistics, and the global
    random state are as before when it is done, and no parameter's .grad is touched.
    """
    before = [(buffer, buffer.clone()) for buffer in bnn.network.buffers()]
    leaf = weights.detach().requires_grad_()
    devices = [bnn.device] if bnn.device.type == "cuda" else []
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=devices), bnn.holding(leaf) as network:
            total, observations = bnn.likelihood.nll(output_tensor(call_with(network, x)), y)
            # The sum and not the mean is differentiated: in fp16 fewer of its gradients vanish.
            (gradient,) = torch.autograd.grad(total, [leaf])
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
    return gradient / observations


def mean_squared_gradient(bnn: BayesianModel, weights: Tensor, batches: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """S = the mean over batches of (∂L/∂w)², at one flat vector of weights: a Fisher-like sensitivity of each."""
    total, count = torch.zeros_like(weights), 0
    for x, y in batches:
        total += weight_gradient(bnn, weights, x, y).square()
        count += 1
    if not count:
        raise LeanBayesError("The sensitivity of weights needs training batches: give training.batches some.")
    return total / count
