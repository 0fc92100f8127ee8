"""Sums, means, variances and extremes along dimensions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import check, without_variance
from moment_covariances import assert_linear, expected_covariance, random_value
from torch import Tensor

import leanbayes as lb
from leanbayes.errors import UnsupportedOperation

MAP = (2, 3, 4, 5)
LINEAR: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: torch.sum(x),
    "mean of positions": lambda x: x.mean((2, 3)),
    "mean of channels": lambda x: torch.mean(x, 1, keepdim=True),
    "mean of both": lambda x: x.mean([-1, 1], keepdim=True),
    "sum of positions": lambda x: x.sum(-1),
    "sum of all but examples": lambda x: x.sum((1, 2, 3)),
    "numpy names": lambda x: x.sum(axis=2, keepdims=True),
    "mean by name": lambda x: torch.mean(input=x, dim=(0, 2)),
    "mean of a merged dimension": lambda x: x.flatten(1).mean(1),
    "sum of windows": lambda x: x.permute(0, 2, 3, 1).reshape(8, 5, 3).sum(1),
    "mean in another order": lambda x: x.flatten(0, 1).transpose(0, 1).mean(0),
}


@pytest.mark.parametrize("positions", [None, (2, 3), (1,)], ids=["independent", "common", "odd"])
@pytest.mark.parametrize("name", LINEAR)
def test_sums_and_means_are_exact(name: str, positions: tuple[int, ...] | None) -> None:
    assert_linear(LINEAR[name], random_value(MAP, positions=positions))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dimensions_of_all_kinds(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    positions = tuple(dim for dim in range(len(shape)) if data.draw(st.booleans()))
    dims = data.draw(st.lists(st.integers(-len(shape), -1), unique=True, max_size=len(shape)))
    keepdim = data.draw(st.booleans())
    x = random_value(shape, positions=positions)
    assert_linear(lambda x: x.mean(dims, keepdim), x)
    assert_linear(lambda x: x.sum(dims, keepdim), x)


def test_dtype_of_a_mean() -> None:
    x = random_value(MAP, positions=(2, 3), dtype=torch.float32)
    assert x.mean(1, dtype=torch.float64).independent.dtype == torch.float64
    coarse = x.bfloat16().mean((2, 3))
    assert coarse.dtype == torch.bfloat16
    assert coarse.independent.dtype == coarse.common.dtype == torch.float32
    torch.testing.assert_close(coarse.variance, x.mean((2, 3)).variance)


def test_mean_over_positions_keeps_common_noise() -> None:
    """Compare with samples; without the common part the std would be √60 times too small."""
    check(lambda x: x.mean((1, 2)), random_value((3, 6, 10), positions=(1, 2)))


@pytest.mark.parametrize("positions", [None, (), (2,)], ids=["independent", "shared", "common"])
def test_euclidean_norm(positions: tuple[int, ...] | None) -> None:
    x = random_value((2, 3, 4), positions=positions)
    check(lambda x: torch.linalg.vector_norm(x, dim=-1), x, mean=0.02, std=0.05)
    check(lambda x: x.norm(p=2, dim=(1, 2), keepdim=True), x, mean=0.02, std=0.05)
    for function in (torch.linalg.vector_norm, torch.norm, lambda x: torch.norm(x, dim=1)):
        result = function(without_variance(x))
        assert torch.equal(result.loc, function(x.loc))
        assert not result.variance.any()
    with pytest.raises(UnsupportedOperation, match="ord other than 1 or 2"):
        torch.linalg.vector_norm(x, 3)


def test_gradients_of_a_norm_of_zero_are_finite() -> None:
    parts = [torch.zeros(2, 3, requires_grad=True) for _ in range(2)]
    length: Any = torch.linalg.vector_norm(lb.Moments(*parts), dim=1)
    (length.loc.sum() + length.variance.sum()).backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in parts)


@pytest.mark.parametrize("positions", [None, (), (2,)], ids=["independent", "shared", "common"])
def test_logsumexp(positions: tuple[int, ...] | None) -> None:
    x = random_value((2, 3, 4), std=0.1, positions=positions)
    check(lambda x: x.logsumexp(-1), x, mean=0.2, std=0.02)
    check(lambda x: torch.logsumexp(x, (1, 2), keepdim=True), x, mean=0.2, std=0.02)


def test_logsumexp_at_several_positions() -> None:
    """The common part has the mean of the slopes of all positions, so it is correct on average."""
    x = random_value((2, 3, 4), positions=(1,))
    result = x.logsumexp(-1)
    expected = expected_covariance(lambda x: x.logsumexp(-1), x).diagonal().reshape(2, 3)
    torch.testing.assert_close(result.variance.mean(1), expected.mean(1))
    assert result.common.shape == (3, 2, 1)


def test_variance_of_elements() -> None:
    x = random_value((3, 40), std=0.2)
    check(lambda x: x.var(-1), x, std=0.06)
    check(lambda x: torch.var(x, 1, unbiased=False, keepdim=True), x, std=0.06)
    check(lambda x: x.var(correction=0), x, std=0.06)
    shared = random_value((3, 40), std=0.2, positions=(1,))
    torch.testing.assert_close(shared.var(-1).variance, shared.like(shared.loc, shared.independent).var(-1).variance)


WINNERS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: x.max(1).values,
    "max kept": lambda x: torch.max(x, -1, keepdim=True)[0],
    "max of all": lambda x: x.max(),
    "min": lambda x: torch.min(x, dim=2).values,
    "amax": lambda x: x.amax((1, 3)),
    "amin": lambda x: torch.amin(x, dim=-1, keepdim=True),
    "amax of all": lambda x: x.amax(),
    "topk": lambda x: x.topk(2, 1)[0],
    "topk smallest": lambda x: torch.topk(x, 2, largest=False).values,
    "sort": lambda x: x.sort(dim=1, descending=True)[0],
}


@pytest.mark.parametrize("positions", [None, (2, 3)], ids=["independent", "common"])
@pytest.mark.parametrize("name", WINNERS)
def test_selected_elements_keep_their_noise(name: str, positions: tuple[int, ...] | None) -> None:
    """The Jacobian of a maximum selects one element."""
    x = random_value(MAP, positions=positions)
    result = WINNERS[name](x)
    assert torch.equal(result.loc, WINNERS[name](x.loc))
    expected = expected_covariance(WINNERS[name], x)
    torch.testing.assert_close(result.variance.reshape(-1), expected.diagonal())


def test_indices_of_selected_elements() -> None:
    x = random_value(MAP)
    for result, plain in ((x.max(1), x.loc.max(1)), (x.sort(), x.loc.sort()), (x.topk(2), x.loc.topk(2))):
        assert torch.equal(result.indices, plain.indices)


def test_the_mean_without_variance_is_exact() -> None:
    x = without_variance(random_value(MAP, positions=(2, 3), dtype=torch.float32))
    for function in [*LINEAR.values(), *WINNERS.values(), lambda x: x.var(1), lambda x: x.logsumexp((1, 2))]:
        assert torch.equal(function(x).loc, function(x.loc))
        assert not function(x).variance.any()


def test_gradients_match_finite_differences() -> None:
    x = random_value((2, 3, 4), positions=(2,))

    def moments(*parts: Tensor) -> tuple[Tensor, ...]:
        value: Any = lb.Moments(*parts, within=x.within)
        results = value.mean(2), value.sum(1), value.max(1).values, value.logsumexp(1), value.var(2)
        return tuple(part for result in results for part in (result.loc, result.variance))

    assert torch.autograd.gradcheck(moments, [part.requires_grad_() for part in (x.loc, x.independent, x.common)])


def test_compiles() -> None:
    x = random_value(MAP, positions=(2, 3))

    def parts(loc: Tensor, independent: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        value: Any = lb.Moments(loc, independent, common, within=x.within)
        result = value.mean((2, 3)) + value.amax((2, 3)) + value.sum(-1).max(-1).values
        return result.loc, result.variance

    given = (x.loc, x.independent, x.common)
    compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")(*given)
    for found, expected in zip(compiled, parts(*given), strict=True):
        torch.testing.assert_close(found, expected)
