"""Softmax and its logarithm against 100,000 samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import assert_moments, check, gaussian, samples_of, shapes, without_variance
from torch import Tensor

import leanbayes as lb

softmax: Any = torch.softmax  # declared for tensors only
log_softmax: Any = torch.log_softmax
SPELLINGS: dict[str, Callable[..., Any]] = {
    "F.softmax": lambda x: F.softmax(x, dim=1),
    "torch.softmax": lambda x: torch.softmax(x, 1),
    "Tensor.softmax": lambda x: x.softmax(1),
    "torch.special.softmax": lambda x: torch.special.softmax(x, 1),
    "by type": lambda x: torch.softmax(x, 1, torch.float64),
    "by name of the type": lambda x: F.softmax(x, 1, dtype=torch.float64),
    "softmin": lambda x: F.softmin(x, dim=1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=1),
    "torch.log_softmax": lambda x: torch.log_softmax(x, 1),
    "Tensor.log_softmax": lambda x: x.log_softmax(1),
    "torch.special.log_softmax": lambda x: torch.special.log_softmax(x, 1),
}


@pytest.mark.parametrize("positions", [None, (2,)])
@pytest.mark.parametrize("name", SPELLINGS)
def test_results_without_variance_equal_those_of_torch(name: str, positions: tuple[int, ...] | None) -> None:
    x = without_variance(gaussian((2, 5, 3), positions=positions, dtype=torch.float32))
    result = SPELLINGS[name](x)
    assert torch.equal(result.loc, SPELLINGS[name](x.loc))
    assert result.dtype == SPELLINGS[name](x.loc).dtype
    assert not result.variance.any()


@given(shapes, st.integers(0, 3))
@settings(max_examples=10)
def test_small_variances_equal_those_of_samples(shape: tuple[int, ...], dim: int) -> None:
    x, dim = gaussian(shape, std=0.1), dim % len(shape)
    check(lambda value: softmax(value, dim), x, mean=0.12, std=0.03)
    check(lambda value: log_softmax(value, dim), x, mean=0.12, std=0.03)


@pytest.mark.parametrize(("variance", "tolerance"), [(0.01, 0.02), (0.1, 0.06), (1.0, 0.2)])
@pytest.mark.parametrize("classes", [2, 5, 20])
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_variance_of_shares_at_any_size(variance: float, tolerance: float, classes: int, sharpness: float) -> None:
    x = gaussian((20, classes), std=math.sqrt(variance / 0.7))
    x.loc = sharpness * x.loc
    result, outcomes = softmax(x, -1), softmax(samples_of(x, 20_000), -1)
    assert abs(result.variance.mean() / outcomes.var(0).mean() - 1) < tolerance
    assert (result.variance <= result.loc * (1 - result.loc) + 1e-12).all()


def test_common_noise_keeps_its_mean_over_the_positions() -> None:
    x = gaussian((2, 6, 5), std=0.03, positions=(1,))
    x = x.like(x.loc, 0.01 * x.independent, x.common)
    for function in (softmax, log_softmax):
        result = function(x, -1)
        assert result.common is not None
        assert result.common.shape == (3, 2, 1, 5)
        outcomes = torch.vmap(lambda value, f=function: f(value, -1))(samples_of(x))
        mean = result.common.square().sum(0).squeeze(1) + result.independent.mean(1) / 6
        torch.testing.assert_close(mean.mean(), outcomes.mean(2).var(0).mean(), rtol=0.15, atol=0.0)
        assert_moments(result, outcomes, mean=0.1, std=0.03)


@pytest.mark.parametrize("positions", [(0, 2), (0, 1, 3), (1, 2, 3), ()])
def test_the_compact_tangent_equals_the_full_one(positions: tuple[int, ...]) -> None:
    x = gaussian((2, 3, 4, 2), positions=positions)
    x = x.like(x.loc, torch.zeros_like(x.independent), x.common)
    assert x.common is not None
    for function in (softmax, log_softmax):
        p = softmax(x.loc, 1)
        full = x.common.expand(-1, *x.shape)
        full = full - (p * full).sum(2, keepdim=True)
        full = full if function is log_softmax else p * full
        dims = [dim + 1 for dim in positions if dim != 1]
        mean = full.mean(dims, keepdim=True) if dims else full
        energy, bound = full.square().sum(0), p * (1 - p)
        result = function(x, 1)
        if 1 in positions:
            assert result.common is None
            assert result.variance.max() < 1e-12
            continue
        torch.testing.assert_close(result.common, mean)
        energy = energy if function is log_softmax else energy * bound / (energy + bound)
        torch.testing.assert_close(result.variance, energy)


def test_masked_scores_have_no_variance() -> None:
    x = gaussian((2, 3, 4), positions=(1,))
    x.loc[:, :, 0] = -math.inf
    x.loc.requires_grad_()
    result = softmax(x, -1)
    assert not result.variance[:, :, 0].any()
    assert result.variance[:, :, 1:].all()
    (grad,) = torch.autograd.grad(result.variance.sum(), x.loc)
    assert grad.isfinite().all()


def test_huge_variances_stay_bounded() -> None:
    x = gaussian((3, 4), dtype=torch.float32)
    x = lb.Moments((100 * x.loc).requires_grad_(), 1e12 * x.independent)
    result = softmax(x, -1)
    assert result.variance.isfinite().all()
    assert (result.variance <= 0.25).all()
    result.variance.sum().backward()
    assert x.loc.grad is not None
    assert x.loc.grad.isfinite().all()


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_gradients_match_finite_differences(function: Callable[..., Any]) -> None:
    x = gaussian((2, 3, 2), positions=(2,))

    def parts(loc: Tensor, independent: Tensor, common: Tensor) -> tuple[Tensor, ...]:
        result = function(lb.Moments(loc, independent, common, within=x.within), 1)
        return result.loc, result.independent, result.common

    inputs = [part.requires_grad_() for part in (x.loc, x.independent, x.common) if part is not None]
    assert torch.autograd.gradcheck(parts, inputs)


def test_gradients_are_finite_without_variance() -> None:
    x = without_variance(gaussian((2, 3, 2), positions=(2,), dtype=torch.float32))
    inputs = [part.requires_grad_() for part in (x.loc, x.independent, x.common) if part is not None]
    softmax(x, 1).variance.sum().backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in inputs)


def test_variances_are_in_single_precision() -> None:
    x = gaussian((2, 3, 4), positions=(1,), dtype=torch.float32)
    result = softmax(x.like(x.loc.bfloat16(), x.independent, x.common), -1)
    assert result.dtype == torch.bfloat16
    assert result.variance.dtype == torch.float32
    torch.testing.assert_close(result.variance, softmax(x, -1).variance, rtol=0.05, atol=1e-3)


def test_a_changed_value_is_no_longer_treated_as_shares() -> None:
    x = gaussian((2, 3, 4))
    values = torch.randn(2, 4, 5, dtype=torch.float64) + 3
    shares = softmax(x, -1)
    offset = (shares @ values).variance
    torch.testing.assert_close(((shares + 1) @ values).variance, offset)  # the same noise still cancels
    assert ((shares * shares.loc) @ values).variance.mean() > offset.mean()
    shares.assign(shares * 2.0)
    assert (shares @ values).variance.mean() > 5 * offset.mean()


def test_softmax_compiles_into_one_graph() -> None:
    x = gaussian((2, 3, 4), positions=(1,), dtype=torch.float32)

    def function(loc: Tensor, independent: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        result = softmax(lb.Moments(loc, independent, common), -1)
        return result.loc, result.variance

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    parts = x.loc, x.independent, x.common
    torch.testing.assert_close(compiled(*parts), function(*parts))  # type: ignore[arg-type]
