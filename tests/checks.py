"""Assertions and measurements that several test files share."""

from collections.abc import Callable
from typing import Any

from torch import nn

import leanbayes as lb
from leanbayes.core.counters import Cost, CostCounter


def count_cost(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Cost:
    """Call a function, and return the cost of the call."""
    with CostCounter() as counter:
        function(*args, **kwargs)
    return counter.cost


def assert_every_slot_has_a_gradient(bnn: lb.BayesianModel, rule: str) -> None:
    """Check for finite gradients of the mean and scale of every parameter, after a backward pass without the KL."""
    for parameter in (bnn.posterior.mu, bnn.posterior.rho):
        assert isinstance(parameter, nn.Parameter)
        if rule == "mean" and parameter is bnn.posterior.rho:
            assert parameter.grad is None  # without noise and KL nothing depends on it
            continue
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        for slot, part in zip(bnn.layout, bnn.layout.split(parameter.grad), strict=True):
            assert part.any(), slot.name
