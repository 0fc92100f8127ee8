"""How long a step will take, measured before the first one on a copy of the plain network."""

import contextlib
import copy
import random
import time
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.methods import Deterministic
from leanbayes.model.conversion import bayesianize
from leanbayes.model.objective import elbo_loss

# The first pass also loads kernels and allocates memory. On a GPU the second one may still choose algorithms.
_PASSES = {"cpu": 2, "cuda": 4}


def pass_seconds(
    network: nn.Module, likelihood: Likelihood, batches: Batches, accelerator: Accelerator
) -> float | None:
    """Return the seconds of a forward and backward pass of the plain network on one part of a batch.

    Neither the network nor any random state changes: the pass is that of a copy. It does not exchange gradients, and a
    Bayesian step takes as long or longer, so the estimate is a lower bound, unless steps are compiled.

    Several processes call this together: they share the cores, and a SyncBatchNorm of the network waits for all.

    Args:
        network: The network to train.
        likelihood: What its outputs mean.
        batches: This process's parts of the training batches.
        accelerator: The accelerator of the run: its device and its number format.

    Returns:
        The seconds, or None if the loss cannot be computed. The training then says why.
    """
    device = accelerator.device
    try:
        with _same_random_state(device):
            x, y = next(iter(batches.epoch()))
            model = bayesianize(network, Deterministic(), likelihood=copy.deepcopy(likelihood)).to(device).train()
            for _ in range(_PASSES[device.type]):
                started = _now(device)
                with accelerator.autocast():
                    loss = elbo_loss(model, x, y, num_data=batches.examples)
                loss.backward()
                seconds = _now(device) - started
            return seconds
    except (LeanBayesError, torch.OutOfMemoryError):
        return None


def _now(device: torch.device) -> float:
    """Return the time at which the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """Restore the global random states, which dropout and the user's data set may read."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
