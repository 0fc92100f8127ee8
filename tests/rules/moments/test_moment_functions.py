"""Moments of further functions of torch against Monte Carlo, and of what networks ask a tensor besides."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moment_cases import assert_moments, check, gaussian, samples_of

import leanbayes as lb

FIXED = torch.randn(3, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
WEIGHTS = torch.rand(3, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def near_zero(value: lb.Moments) -> lb.Moments:
    """Return a value whose means are within a few stds of those of others."""
    return value.like(0.3 * value.loc, value.independent, value.common, value.grid)


def check_on_average(function: Any, *values: lb.Moments, dims: Any, mean: float = 0.0, std: float = 0.01) -> None:
    """Compare means with Monte Carlo, and variances that are averaged over positions."""
    result = function(*values)
    outcomes = torch.vmap(function)(*[samples_of(value, seed=number + 1) for number, value in enumerate(values)])
    off = (result.loc - outcomes.mean(0)).abs() / outcomes.std(0)
    assert off.max() < mean + 5 / len(outcomes) ** 0.5
    ratio = (result.variance.mean(dims) / outcomes.var(0).mean(dims)).sqrt()
    assert (ratio - 1).abs().max() < std + 0.02


@pytest.mark.parametrize("positions", [None, (0,), (1,)])
def test_std_is_the_method_of_tensors(positions: Any) -> None:
    x = gaussian((3, 6), std=0.08, positions=positions)
    functions: list[Any] = [
        lambda x: x.std(-1),
        lambda x: torch.std(x, dim=1, keepdim=True),
        lambda x: torch.std_mean(x, -1)[0],
        lambda x: torch.var_mean(x, dim=-1, unbiased=False)[0],
    ]
    for function in functions:
        if positions == (0,):
            check_on_average(function, x, dims=0, mean=0.2, std=0.1)
        else:
            check(function, x, mean=0.2, std=0.1)
    check(lambda x: torch.var_mean(x, -1)[1], x)


@pytest.mark.parametrize("positions", [None, (0,), (1,)])
def test_glu(positions: Any) -> None:
    if positions is None:
        check(F.glu, gaussian((3, 4)), mean=0.05, std=0.05)
    else:
        check_on_average(F.glu, gaussian((3, 4), positions=positions), dims=positions, mean=0.1, std=0.05)


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum])
@pytest.mark.parametrize("positions", [None, (0,), (1,)])
@pytest.mark.parametrize("std", [0.3, 1.0])
def test_extremes_of_two_values(function: Any, positions: Any, std: float) -> None:
    x = near_zero(gaussian((3, 4), std=std))
    y = near_zero(gaussian((3, 4), seed=5, std=std, positions=positions))
    check(function, x, y)
    check(lambda y: function(y, 0.1 * FIXED), y)
    check(lambda y: function(0.1 * FIXED, y), y)


def test_extremes_of_values_with_common_noise() -> None:
    x = gaussian((3, 4), std=0.5, positions=(0,))
    assert x.common is not None
    first: Any = lb.Moments(x.loc, torch.zeros_like(x.loc), x.common, within=x.within)
    second: Any = lb.Moments(FIXED, torch.zeros_like(FIXED), -0.5 * x.common, within=x.within)
    sample = samples_of(first)
    result: Any = torch.maximum(first, second)
    assert_moments(result, torch.maximum(sample, FIXED - 0.5 * (sample - x.loc)))


def test_the_extreme_of_a_value_and_itself_is_the_value() -> None:
    x: Any = gaussian((3, 4))
    assert torch.maximum(x, x) is x
    assert torch.minimum(x, x) is x


@pytest.mark.parametrize("positions", [None, (0,), (1,)])
def test_cumsum(positions: Any) -> None:
    check(lambda x: x.cumsum(1), gaussian((3, 4), positions=positions))
    check(lambda x: torch.cumsum(x, dim=0), gaussian((3, 4), positions=positions))


@pytest.mark.parametrize("positions", [None, (0,)])
def test_lerp(positions: Any) -> None:
    x, y = gaussian((3, 4)), gaussian((3, 4), seed=5, positions=positions)
    check(lambda x, y: torch.lerp(x, y, 0.3), x, y)
    check_on_average(lambda x, y: torch.lerp(x, y, WEIGHTS), x, y, dims=0)
    check_on_average(lambda y: torch.lerp(FIXED, y, WEIGHTS), y, dims=0)
    gate = gaussian((3, 4), seed=7, std=0.2)
    check(lambda x, gate: torch.lerp(x, FIXED, gate), x, gate)
    check_on_average(lambda x, y, gate: torch.lerp(x, y, gate), x, y, gate, dims=0)
    check(lambda gate: torch.lerp(FIXED, FIXED + 1, gate), gate)


@pytest.mark.parametrize("positions", [None, (0,), (1,)])
def test_cosine_similarity(positions: Any) -> None:
    x, y = gaussian((3, 6), std=0.05), gaussian((3, 6), seed=5, std=0.05, positions=positions)
    check(lambda x, y: F.cosine_similarity(x, y, dim=-1), x, y, mean=0.2, std=0.1)
    check(lambda y: F.cosine_similarity(y, y.new_ones(6), dim=1), y, mean=0.2, std=0.1)


def test_linalg_norm() -> None:
    x: Any = gaussian((3, 6))
    check(lambda x: torch.linalg.norm(x, dim=-1), x, mean=0.05, std=0.1)
    check(lambda x: torch.linalg.norm(x, "fro"), x, mean=0.05, std=0.1)
    check(lambda x: torch.linalg.norm(x, 1, dim=-1), x)
    check(lambda x: x.norm(1, dim=0, keepdim=True), x)
    with pytest.raises(lb.UnsupportedOperation, match="nuc"):
        torch.linalg.norm(x, "nuc")


@pytest.mark.parametrize("positions", [None, (2,)])
def test_fold(positions: Any) -> None:
    x, y = gaussian((2, 8, 9), positions=positions), gaussian((2, 8, 4), positions=positions)
    check_on_average(lambda x: F.fold(x, (4, 4), (2, 2)), x, dims=(-2, -1))
    check_on_average(lambda y: F.fold(y, (3, 3), (2, 2), padding=1, stride=2), y, dims=(-2, -1))


BAG = torch.tensor([[1, 2, 4], [0, 3, 3], [1, 4, 1]])  # with rows that are in a bag twice


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(mode: str) -> None:
    weight = gaussian((5, 4))
    samples = samples_of(weight, 20_000)
    for settings in ({}, {"padding_idx": 1}):
        outcomes = torch.stack([F.embedding_bag(BAG, w, mode=mode, **settings) for w in samples])  # type: ignore[arg-type]
        assert_moments(F.embedding_bag(BAG, weight, mode=mode, **settings), outcomes)  # type: ignore[arg-type]
    with pytest.raises(lb.UnsupportedOperation, match="max"):
        F.embedding_bag(BAG, weight, mode="max")  # type: ignore[arg-type]


def test_embedding_bag_with_factors_and_offsets() -> None:
    weight, factors = gaussian((5, 4)), torch.tensor([0.5, 2.0, -1.0, 1.0, 0.25], dtype=torch.float64)
    rows = torch.tensor([3, 1, 1, 2, 1])
    for last in ({"offsets": torch.tensor([0, 1])}, {"offsets": torch.tensor([0, 1, 5]), "include_last_offset": True}):
        given = {"mode": "sum", "per_sample_weights": factors, **last}
        outcomes = torch.stack([F.embedding_bag(rows, w, **given) for w in samples_of(weight, 20_000)])  # type: ignore[arg-type]
        assert_moments(F.embedding_bag(rows, weight, **given), outcomes)  # type: ignore[arg-type]


def test_attributes_of_tensors() -> None:
    x: Any = gaussian((3, 4))
    x.loc.requires_grad_()
    assert isinstance(x.data, lb.Moments)
    assert not x.data.requires_grad
    assert x.is_leaf
    assert x.nbytes == x.loc.nbytes
    assert f"{x:.3f}" == f"{x}" == repr(x)
    assert not hasattr(x, "imag")
    with pytest.raises(lb.UnsupportedOperation, match=r"Tensor\.imag.*sample"):
        _ = x.imag
