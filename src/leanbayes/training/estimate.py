"""How long a step will take, measured before the first one on a copy of the plain network."""

import contextlib
import copy
import random
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.methods import Deterministic
from leanbayes.model.conversion import bayesianize
from leanbayes.model.objective import elbo_loss

_PASSES = 2  # the first one also loads kernels and allocates memory


def pass_seconds(network: nn.Module, likelihood: Likelihood, batches: Batches) -> float | None:
    """Return the seconds of a forward and backward pass of the plain network on one part of a batch.

    Neither the network nor any random state changes: the pass is that of a copy. A Bayesian step takes as long or
    longer, so the estimate is a lower bound.

    Args:
        network: The network to train.
        likelihood: What its outputs mean.
        batches: The training batches.

    Returns:
        The seconds, or None if the loss cannot be computed. The training then says why.
    """
    try:
        with _same_random_state():
            x, y = next(iter(batches.epoch()))
            model = bayesianize(network, Deterministic(), likelihood=copy.deepcopy(likelihood)).train()
            for _ in range(_PASSES):
                started = time.perf_counter()
                elbo_loss(model, x, y, num_data=batches.examples).backward()
                seconds = time.perf_counter() - started
            return seconds
    except LeanBayesError:
        return None


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Restore the global random states, which dropout and the user's data set may read."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
