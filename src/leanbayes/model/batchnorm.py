"""The loop behind `BayesianModel.refresh_batchnorm`."""

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from leanbayes.core.network import call_with, evaluation_mode, inputs_of
from leanbayes.errors import LeanBayesError
from leanbayes.model.draw import StochasticNetwork

if TYPE_CHECKING:
    from leanbayes.model.bayesian import BayesianModel


@torch.no_grad()
def refresh_batchnorm(bnn: "BayesianModel", batches: Iterable[Any], generator: torch.Generator | None) -> int:
    """Average the statistics of all BatchNorm layers over the batches, with one weight sample per batch.

    Members have a pass of each batch, and so has their mean if it has statistics of its own.
    """
    norms = [m for m in bnn.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    iterator = iter(batches)
    first = next(iterator, None) if norms else None
    if first is None:
        if norms:
            raise LeanBayesError("refresh_batchnorm() got no batches: pass some training inputs.")
        return 0
    momenta = [norm.momentum for norm in norms]
    try:
        with evaluation_mode(bnn):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain average over all batches
                norm.train()
            passes: list[tuple[Any, int]] = [(bnn.current_rule, number) for number in range(bnn.loss_passes)]
            if isinstance(bnn.network, StochasticNetwork) and bnn.network.mean_apart and bnn.members is not None:
                passes = [*(("sample", number) for number in range(bnn.members)), ("mean", 0)]
            for batch in itertools.chain([first], iterator):
                x = inputs_of(batch)
                for rule, number in passes:
                    draw = bnn.next_draw(generator, number)._replace(training=True, joint=bnn.joint)
                    with bnn.using(rule):
                        call_with(bnn, x, _draw=draw)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return len(norms)
