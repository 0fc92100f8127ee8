"""Assertions that several test files make of a model."""

from torch import nn

import leanbayes as lb


def assert_every_slot_has_a_gradient(bnn: lb.BayesianModel, rule: str) -> None:
    """After a backward pass without KL, every Bayesian parameter has a finite gradient for its mean and its scale."""
    for parameter in (bnn.posterior.mu, bnn.posterior.rho):
        assert isinstance(parameter, nn.Parameter)
        if rule == "mean" and parameter is bnn.posterior.rho:
            assert parameter.grad is None  # without noise and KL nothing depends on it
            continue
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        for slot, part in zip(bnn.layout, bnn.layout.split(parameter.grad), strict=True):
            assert part.any(), slot.name
