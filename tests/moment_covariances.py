"""Moments against the covariance from the Jacobian of a function, which is exact for linear functions."""

from collections.abc import Callable
from typing import Any

import torch
from moment_cases import gaussian
from torch import Tensor

import leanbayes as lb

random_value: Callable[..., Any] = gaussian  # torch declares that its functions take tensors


def covariance_of(*values: lb.Moments) -> Tensor:
    """Return the covariance of all elements of values that share the noise of their common parts."""
    flat = [value.plain() for value in values]
    whole = torch.diag(torch.cat([value.independent.reshape(-1) for value in flat]))
    commons = [
        value.common.expand(-1, *value.shape).reshape(len(value.common), -1)
        for value in flat
        if value.common is not None
    ]
    if len(commons) == len(flat):
        return whole + torch.cat(commons, 1).T @ torch.cat(commons, 1)
    start = 0
    for value in flat:
        end = start + value.numel()
        if value.common is not None:
            common = value.common.expand(-1, *value.shape).reshape(len(value.common), -1)
            whole[start:end, start:end] += common.T @ common
        start = end
    return whole


def expected_covariance(function: Callable[..., Any], *values: lb.Moments) -> Tensor:
    """Return J Σ Jᵀ."""
    jacobians = torch.autograd.functional.jacobian(function, tuple(value.loc for value in values))
    jacobian = torch.cat(
        [part.flatten(part.dim() - value.dim()) for part, value in zip(jacobians, values, strict=True)], -1
    )
    jacobian = jacobian.reshape(-1, jacobian.shape[-1])
    return jacobian @ covariance_of(*values) @ jacobian.T


def assert_linear(function: Callable[..., Any], *values: lb.Moments, whole: bool = True) -> lb.Moments:
    """Check that the means are equal and the covariances agree, or with whole=False only the variances."""
    result = function(*values)
    assert torch.equal(result.loc, function(*[value.loc for value in values]))
    assert result.independent.shape == result.shape
    expected = expected_covariance(function, *values)
    torch.testing.assert_close(result.variance.reshape(-1), expected.diagonal(), rtol=1e-6, atol=1e-12)
    if whole:
        torch.testing.assert_close(covariance_of(result), expected, rtol=1e-6, atol=1e-12)
    return result


def size_of_common(value: lb.Moments) -> int:
    """Return the number of elements of the common part per probe."""
    assert value.common is not None
    return value.common[0].numel()
