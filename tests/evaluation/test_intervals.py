"""Intervals and CRPS of a Gaussian agree with scipy, numerical integration and many samples."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from training_cases import expect

from leanbayes.evaluation.intervals import crps, interval_coverage, interval_width


def integrated_crps(error: float, std: float) -> float:
    """∫(F(t) - [t ≥ error])² dt for F of N(0, std²), integrated separately on each side of the step."""
    below = integrate.quad(lambda t: stats.norm.cdf(t / std) ** 2, -np.inf, error)[0]
    above = integrate.quad(lambda t: stats.norm.sf(t / std) ** 2, error, np.inf)[0]
    return below + above


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_intervals_are_those_of_scipy(level: float) -> None:
    error, std = torch.randn(200, 2, dtype=torch.float64), torch.rand(200, 2, dtype=torch.float64) + 0.1
    low, high = stats.norm.interval(level, 0, std.numpy())
    np.testing.assert_allclose(interval_width(std, level).numpy(), high - low, rtol=1e-12)
    inside = (low <= error.numpy()) & (error.numpy() <= high)
    found = interval_coverage(error, std, level)
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), inside)
    assert 0 < inside.mean() < 1


def test_intervals_of_the_true_distribution_have_their_nominal_coverage() -> None:
    std = torch.rand(100_000) + 0.1
    error = std * torch.randn(100_000)
    for level in (0.5, 0.95):
        assert float(interval_coverage(error, std, level).mean()) == pytest.approx(level, abs=0.006)
        assert float(interval_coverage(error, std / 2, level).mean()) < level - 0.1
    assert torch.equal(interval_coverage(error, std), interval_coverage(error, std, 0.95))
    assert torch.equal(interval_width(std), interval_width(std, 0.95))


@pytest.mark.parametrize("std", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("error", [-2.5, 0.0, 0.3, 4.0])
def test_crps_is_the_integral(error: float, std: float) -> None:
    found = crps(torch.tensor([error * std, error]), torch.tensor([std, std]))
    expected = [integrated_crps(float(e), std) for e in torch.tensor([error * std, error])]
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_crps_is_the_energy_distance_of_samples() -> None:
    """E|X - y| - ½E|X - X'| (Gneiting & Raftery 2007, eq. 20)."""
    x, other = 2 * torch.randn(2, 1_000_000, dtype=torch.float64)
    expected = (x - 1.3).abs().mean() - 0.5 * (x - other).abs().mean()
    assert float(crps(torch.tensor(1.3), torch.tensor(2.0))) == pytest.approx(float(expected), abs=0.01)


@given(st.floats(-1e3, 1e3), st.floats(0, 1e3), st.floats(0.01, 100))
def test_crps_is_nonnegative_symmetric_and_in_the_unit_of_the_targets(error: float, std: float, unit: float) -> None:
    e, s = torch.tensor([error], dtype=torch.float64), torch.tensor([std], dtype=torch.float64)
    found = float(crps(e, s))
    assert 0 <= found <= abs(error) + std
    assert float(crps(-e, s)) == found
    assert float(crps(unit * e, unit * s)) == pytest.approx(unit * found, rel=1e-6, abs=1e-12)


def test_crps_without_std_is_the_absolute_error() -> None:
    error = torch.tensor([-2.0, 0.0, 0.5], dtype=torch.float64)
    for std in (0.0, 5e-324, 1e-300, 1e-12):
        assert crps(error, torch.full_like(error, std)).tolist() == pytest.approx([2, 0, 0.5], abs=1e-11)
    assert interval_coverage(error, torch.zeros_like(error)).tolist() == [0, 1, 0]
    assert interval_width(torch.zeros(3)).tolist() == [0, 0, 0]


def test_crps_has_gradients_with_and_without_std() -> None:
    error = torch.tensor([-2.0, 0.5, 0.7], dtype=torch.float64, requires_grad=True)
    std = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(crps, (error, std))
    crps(error, torch.zeros(3)).sum().backward()
    assert error.grad is not None
    assert error.grad.tolist() == [-1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_float_types_are_computed_in_double_precision(dtype: torch.dtype) -> None:
    error, std = torch.randn(300).to(dtype), (torch.rand(300) + 0.1).to(dtype)
    assert torch.equal(crps(error, std), crps(error.double(), std.double()))
    assert torch.equal(interval_coverage(error, std), interval_coverage(error.double(), std.double()))
    assert torch.equal(interval_width(std), interval_width(std.double()))
    assert crps(error, std).dtype == interval_width(std).dtype == torch.float64


def test_integers_and_empty_tensors_are_accepted() -> None:
    error, std = torch.tensor([0, 1, -3]), torch.tensor([1, 1, 1])
    assert interval_coverage(error, std).tolist() == [1, 1, 0]
    assert crps(error, std).tolist() == crps(error.double(), std.double()).tolist()
    assert interval_width(std).tolist() == pytest.approx([2 * 1.959964] * 3, rel=1e-6)
    nothing = torch.zeros(0, 2)
    for found in (interval_coverage(nothing, nothing), interval_width(nothing), crps(nothing, nothing)):
        assert found.shape == (0, 2)


def test_invalid_distributions_raise_errors() -> None:
    error, std = torch.zeros(3), torch.ones(3)
    for call in (interval_coverage, crps):
        expect(partial(call, error, -std), "at least 0")
        expect(partial(call, error, std * math.nan), "NaN")
        expect(partial(call, error * math.nan, std), "NaN")
        expect(partial(call, error, std[:, None]), "(3,)", "(3, 1)")
    expect(lambda: interval_width(-std), "at least 0")
    for level in (0.0, 1.0, 95, -0.5, math.nan):
        expect(partial(interval_width, std, level), f"level={level}")
        expect(partial(interval_coverage, error, std, level), f"level={level}")
