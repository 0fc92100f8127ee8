"""Products of two random values against 100,000 samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import assert_moments, check, gaussian, samples_of, without_variance
from torch import Tensor

import leanbayes as lb
from leanbayes.errors import UnsupportedOperation
from leanbayes.rules.moments.products import matmul

sizes = st.integers(1, 4)
bmm: Any = torch.bmm  # declared for tensors only


@st.composite
def factors(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw shapes for torch.matmul: batches that broadcast, matrices and vectors."""
    n, k, m = draw(sizes), draw(sizes), draw(sizes)
    batch = draw(st.lists(sizes, max_size=2))
    cut = draw(st.integers(0, len(batch)))
    left = [1 if draw(st.booleans()) else size for size in batch]
    kind = draw(st.sampled_from(["matrices", "left vector", "right vector", "vectors"]))
    if kind == "vectors":
        return (k,), (k,)
    if kind == "left vector":
        return (k,), (*batch, k, m)
    if kind == "right vector":
        return (*batch, n, k), (k,)
    return (*left, n, k), (*batch[cut:], k, m)


@given(factors(), st.sampled_from(["both", "left", "right"]))
@settings(max_examples=20)
def test_matmul_of_independent_values_is_exact(shapes: tuple[tuple[int, ...], ...], random: str) -> None:
    a, b = gaussian(shapes[0], 0, std=0.7), gaussian(shapes[1], 1, std=0.7)
    if random == "both":
        check(lambda x, y: matmul(x, y) if isinstance(x, lb.Moments) else torch.matmul(x, y), a, b)
    elif random == "left":
        check(lambda x: matmul(x, b.loc) if isinstance(x, lb.Moments) else torch.matmul(x, b.loc), a)
    else:
        check(lambda y: matmul(a.loc, y) if isinstance(y, lb.Moments) else torch.matmul(a.loc, y), b)


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "@": (lambda a, b: a @ b, (2, 3, 4), (2, 4, 5)),
    "torch.matmul": (torch.matmul, (2, 3, 4), (2, 4, 5)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5)),
    "Tensor.bmm": (lambda a, b: a.bmm(b), (2, 3, 4), (2, 4, 5)),
    "mv": (torch.mv, (3, 4), (4,)),
    "dot": (torch.dot, (4,), (4,)),
    "baddbmm": (
        lambda a, b: torch.baddbmm(torch.ones(3, 5, dtype=a.dtype), a, b, beta=2, alpha=0.5),
        (2, 3, 4),
        (2, 4, 5),
    ),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), (2, 3, 4), (2, 4, 5)),
    "einsum by heads": (lambda a, b: torch.einsum("nqhd,nkhd->nhqk", a, b), (2, 3, 2, 4), (2, 5, 2, 4)),
    "einsum without arrow": (lambda a, b: torch.einsum("ik, kj", a, b), (3, 4), (4, 5)),
    "einsum with dots": (lambda a, b: torch.einsum("...ik,...kj->...ji", a, b), (2, 3, 4), (4, 5)),
    "einsum with both": (lambda a, b: torch.einsum("...k,jk", a, b), (2, 3, 4), (5, 4)),
    "einsum of outer products": (lambda a, b: torch.einsum("bi,bj->bij", [a, b]), (2, 3), (2, 4)),
    "einsum with a lone sum": (lambda a, b: torch.einsum("ijk,k->i", a, b), (2, 3, 4), (4,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_independent_values_are_exact(name: str) -> None:
    function, left, right = PRODUCTS[name]
    check(function, gaussian(left, 0), gaussian(right, 1))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_without_variance_equal_those_of_torch(name: str) -> None:
    function, left, right = PRODUCTS[name]
    a, b = (without_variance(gaussian(shape, 2, dtype=torch.float32)) for shape in (left, right))
    result = function(a, b)
    assert torch.equal(result.loc, function(a.loc, b.loc))
    assert not result.variance.any()


def test_reflected_product_with_a_tensor() -> None:
    plain = torch.randn(2, 3, 4, dtype=torch.float64)
    check(lambda x: plain @ x, gaussian((2, 4, 5)))
    check(lambda x: x.__rmatmul__(plain) if isinstance(x, lb.Moments) else plain @ x, gaussian((2, 4, 5)))


def test_baddbmm_with_a_random_sum() -> None:
    check(
        lambda x, a, b: torch.baddbmm(x, a, b, beta=0.5, alpha=2),
        gaussian((3, 5)),
        gaussian((2, 3, 4)),
        gaussian((2, 4, 5)),
    )


def test_einsum_of_one_value_adds_variances() -> None:
    check(lambda x: torch.einsum("bij->bj", x), gaussian((2, 3, 4)))
    check(lambda x: torch.einsum("ij->ji", x), gaussian((2, 3)))


def test_unsupported_einsums_raise_an_error() -> None:
    x = gaussian((3, 3))
    with pytest.raises(UnsupportedOperation, match="two at a time"):
        torch.einsum("ij,jk,kl->il", x, x, x)
    with pytest.raises(UnsupportedOperation, match="take the diagonal first"):
        torch.einsum("ii,ij->j", x, x)


# -- common noise -----------------------------------------------------------------------------------------------------


def position_mean(value: lb.Moments, dim: int) -> lb.Moments:
    """Compute the mean along a dimension by hand: independent noise averages out, common noise does not."""
    value = value.plain()
    common = None if value.common is None else value.common.expand(-1, *value.shape).mean(dim if dim < 0 else dim + 1)
    return value.like(value.loc.mean(dim), value.independent.mean(dim) / value.shape[dim], common)


def check_mean(function: Callable[..., Any], value: lb.Moments, dim: int, **tolerance: float) -> None:
    """Compare the mean over positions of a function's results with that of samples."""
    outcomes = torch.vmap(function)(samples_of(value))
    assert_moments(position_mean(function(value), dim), outcomes.mean(dim if dim < 0 else dim + 1), **tolerance)


def times(plain: Tensor, left: bool = False) -> Callable[[Any], Any]:
    return lambda x: torch.einsum("bij,bjk->bik", plain, x) if left else torch.einsum("bij,bjk->bik", x, plain)


def only_common(value: lb.Moments) -> lb.Moments:
    return value.like(value.loc, torch.zeros_like(value.independent), value.common)


def test_common_noise_times_a_plain_matrix_is_exact() -> None:
    x, plain = gaussian((2, 3, 4), positions=(1,)), torch.randn(2, 4, 5, dtype=torch.float64)
    assert times(plain)(x).common.shape == (3, 2, 1, 5)
    check(times(plain), x)
    check_mean(times(plain), x, 1)


def test_a_plain_mixture_of_positions_keeps_their_common_noise() -> None:
    x = only_common(gaussian((2, 4, 5), positions=(1,)))
    plain = torch.softmax(torch.randn(2, 3, 4, dtype=torch.float64), -1) * torch.tensor([[1.0], [0.5], [2.0]]).double()
    result = times(plain, left=True)(x)
    assert result.common is not None
    assert result.common.shape == (3, 2, 1, 5)
    check(times(plain / plain.sum(-1, keepdim=True), left=True), x)
    check_mean(times(plain / plain.sum(-1, keepdim=True), left=True), x, 1)
    assert result.independent[:, 1].max() == 0  # a row with less than the mean noise has only common noise


def test_both_tangents_are_added_with_their_correlation() -> None:
    # Both factors come from one value, so they share the directions of noise; no row or column is a position.
    def function(x: Any) -> Any:
        return torch.einsum("bik,bkj->bij", x[..., :4], x[..., 4:].transpose(1, 2))

    x = only_common(gaussian((2, 3, 8), std=0.02, positions=()))
    check(function, x, mean=0.05, std=0.02)


def test_scores_of_tokens_keep_the_noise_of_queries_for_each_key() -> None:
    def scores(x: Any) -> Any:
        return torch.einsum("bqk,bjk->bqj", x[..., :4], x[..., 4:])

    x = only_common(gaussian((2, 5, 8), std=0.02, positions=(1,)))
    result = scores(x)
    assert result.common.shape == (3, 2, 1, 5)
    check_mean(scores, x, 1, mean=0.05, std=0.3)  # differences between queries are treated as independent
    outcomes = torch.vmap(scores)(samples_of(x))
    assert abs(result.variance.mean() / outcomes.var(0).mean() - 1) < 0.3  # larger if the common part is overestimated


def test_a_sum_over_positions_keeps_channels_that_both_have() -> None:
    def outer(x: Any) -> Any:  # like linear attention
        return torch.einsum("bld,ble->bde", x[..., :3], x[..., 3:])

    x = only_common(gaussian((2, 6, 5), std=0.02, positions=(1,)))
    assert outer(x).common.shape == (3, 2, 3, 2)
    check(outer, x, mean=0.05, std=0.02)


def test_a_sum_over_positions_of_one_factor() -> None:
    x = gaussian((2, 4, 3), positions=(1,))
    check(lambda value: torch.einsum("blc->bc", value), x)
    check(lambda value: torch.einsum("blc,c->b", value, torch.arange(1.0, 4.0).double()), x)


# -- precision, gradients, compilation --------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [None, (1,)])
def test_gradients_match_finite_differences(positions: tuple[int, ...] | None) -> None:
    x = gaussian((1, 3, 2), positions=positions)
    y = gaussian((1, 2, 3), 1, positions=None if positions is None else (2,))

    def function(*parts: Tensor) -> tuple[Tensor, ...]:
        half = len(parts) // 2
        a, b = (lb.Moments(*own, within=x.within) for own in (parts[:half], parts[half:]))
        result = bmm(a, b)
        return (result.loc, result.variance, *([] if result.common is None else [result.common]))

    parts = [p for v in (x, y) for p in (v.loc, v.independent, v.common) if p is not None]
    assert torch.autograd.gradcheck(function, [p.requires_grad_() for p in parts])


def test_variances_are_in_single_precision() -> None:
    x = gaussian((2, 3, 4), positions=(1,), dtype=torch.float32)
    y = gaussian((2, 4, 3), 1, dtype=torch.float32)
    coarse = bmm(x.like(x.loc.bfloat16(), x.independent, x.common), y.like(y.loc.bfloat16(), y.independent))
    fine = bmm(x, y)
    assert coarse.dtype == torch.bfloat16
    assert coarse.variance.dtype == coarse.common.dtype == torch.float32
    torch.testing.assert_close(coarse.variance, fine.variance, rtol=0.05, atol=1e-3)


def test_products_compile_into_one_graph() -> None:
    x = gaussian((2, 3, 4), positions=(1,), dtype=torch.float32)

    def function(loc: Tensor, independent: Tensor, common: Tensor) -> tuple[Tensor, ...]:
        value = lb.Moments(loc, independent, common)
        result = bmm(value, torch.einsum("bij->bji", value))
        return result.loc, result.variance

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert x.common is not None
    torch.testing.assert_close(compiled(x.loc, x.independent, x.common), function(x.loc, x.independent, x.common))
