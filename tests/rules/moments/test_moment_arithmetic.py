"""Sums, products and quotients of values that share noise, against samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import SAMPLES, assert_moments, check, without_variance
from moment_covariances import assert_linear, expected_covariance, random_value, size_of_common
from torch import Tensor

import leanbayes as lb

MAP, SCALE = (2, 3, 4, 4), (2, 3, 1, 1)
TENSOR = torch.linspace(-1.5, 2, math.prod(MAP), dtype=torch.float64).reshape(MAP)
ROW = torch.tensor([0.5, -2.0, 1.5], dtype=torch.float64)[:, None, None]

LINEAR: dict[str, Callable[[Any], Any]] = {
    "x + t": lambda x: x + TENSOR,
    "t + x": lambda x: TENSOR + x,
    "x + 2": lambda x: x + 2,
    "2 - x": lambda x: 2 - x,
    "t - x": lambda x: TENSOR - x,
    "alpha": lambda x: torch.add(TENSOR, x, alpha=3),
    "x - alpha t": lambda x: x.sub(TENSOR, alpha=0.5),
    "rsub": lambda x: torch.rsub(x, 1.0),
    "-x": lambda x: -x,
    "x · 3": lambda x: x * 3,
    "0.3 · x": lambda x: 0.3 * x,
    "x · row": lambda x: x * ROW,
    "row · x": lambda x: ROW * x,
    "x / 7": lambda x: x / 7,
    "x / row": lambda x: x / ROW,
    "integers": lambda x: x * torch.tensor([1, 2, 3])[:, None, None] + torch.arange(4),
    "zero-dimensional": lambda x: x * torch.tensor(2.5),
    "x broadcast": lambda x: x[:, :, :1, :1] + TENSOR,
    "x broadcast to more": lambda x: x[0, :, 0, 0] * torch.ones(5, 3, dtype=torch.float64),
    "add_": lambda x: x.clone().add_(TENSOR),
    "mul_": lambda x: x.clone().mul_(ROW),
}
SLOPED: dict[str, Callable[[Any], Any]] = {
    "x · t": lambda x: x * TENSOR,
    "t · x": lambda x: TENSOR * x,
    "x / t": lambda x: x / (TENSOR + 3),
    "masked_fill": lambda x: x.masked_fill(TENSOR > 0, -1.0),
    "where": lambda x: torch.where(TENSOR > 0, x, 0.5),
    "where not": lambda x: torch.where(TENSOR > 0, TENSOR, x),
    "x.where": lambda x: x.where(TENSOR > 0, TENSOR),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, 1),
}


def shared_samples(*values: lb.Moments, count: int = SAMPLES) -> list[Tensor]:
    """Sample values whose common parts have the same noise."""
    generator = torch.Generator().manual_seed(1)
    probes = [len(value.common) for value in values if value.common is not None]
    xi = torch.randn((count, max(probes, default=0)), generator=generator, dtype=torch.float64)
    samples = []
    for value in values:
        noise = torch.randn((count, *value.shape), generator=generator, dtype=torch.float64)
        sample = value.loc + value.independent.sqrt() * noise
        if value.common is not None:
            sample = sample + torch.einsum("nr,r...->n...", xi, value.common.expand(-1, *value.shape))
        samples.append(sample)
    return samples


def average(value: Any) -> Any:
    """Return the mean over positions, whose variance shows the noise that the positions share."""
    return value.mean((-2, -1))


@pytest.mark.parametrize("positions", [None, (2, 3)], ids=["independent", "common"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_are_exact(name: str, positions: tuple[int, ...] | None) -> None:
    x = random_value(MAP, positions=positions)
    result = assert_linear(LINEAR[name], x, whole="broadcast" not in name)
    assert positions is None or size_of_common(result) <= 5 * size_of_common(x)


@pytest.mark.parametrize("name", SLOPED)
def test_slopes_that_differ_between_positions(name: str) -> None:
    assert_linear(SLOPED[name], random_value(MAP))
    x = random_value(MAP, positions=(2, 3))
    result = SLOPED[name](x)
    assert size_of_common(result) == size_of_common(x)
    assert torch.equal(result.loc, SLOPED[name](x.loc))
    expected = expected_covariance(SLOPED[name], x)
    variance = expected.diagonal().reshape(MAP)
    torch.testing.assert_close(result.variance.mean((-2, -1)), variance.mean((-2, -1)))
    of_mean = expected.reshape(6, 16, 6, 16).mean((1, 3)).diagonal().reshape(2, 3)
    lost = (result.variance.sum((-2, -1)) - expected.diagonal().reshape(6, 16).sum(1).reshape(2, 3)).abs()
    torch.testing.assert_close(average(result).variance, of_mean, rtol=0.1, atol=float(lost.max()) + 0.005)


@pytest.mark.parametrize("shape", [MAP, SCALE, (3, 1, 1), (1, 3, 4, 4)])
def test_sum_of_two_values_keeps_their_covariance(shape: tuple[int, ...]) -> None:
    x, y = random_value(MAP, positions=(2, 3)), random_value(shape, 1, positions=tuple(range(len(shape)))[-2:])
    whole = shape == MAP
    result = assert_linear(lambda x, y: x + y, x, y, whole=whole)
    assert size_of_common(result) == 6
    assert_linear(lambda x, y: x - 2 * y, x, y, whole=whole)
    assert_linear(lambda x, y: torch.sub(y, x, alpha=0.5), x, y, whole=whole)
    assert_linear(lambda x, y: x + y, x, random_value(shape, 2), whole=whole)
    assert_linear(lambda x, y: x + y, random_value(MAP, 1), random_value(shape, 2), whole=whole)


def test_residual_branches_stay_correlated() -> None:
    x = random_value(MAP, positions=(2, 3))
    zero = x - x
    assert not zero.common.any()
    torch.testing.assert_close((x + x).common_variance(), 4 * x.common.square().sum(0))


@pytest.mark.parametrize("shape", [MAP, SCALE, (3, 4, 4)])
def test_product_of_independent_values(shape: tuple[int, ...]) -> None:
    check(lambda x, y: x * y, random_value(MAP), random_value(shape, 5, std=0.6))


@pytest.mark.parametrize("shape", [MAP, SCALE])
def test_product_of_values_that_share_noise(shape: tuple[int, ...]) -> None:
    x, y = random_value(MAP, positions=(2, 3)), random_value(shape, 5, positions=(2, 3))
    x, y = x.like(x.loc.abs() + 1, x.independent, x.common), y.like(y.loc.abs() + 1, y.independent, y.common)
    if shape == SCALE:  # broadcast independent noise is shared by all positions, which Moments cannot represent
        y = y.like(y.loc, y.independent * 0, y.common)
    result = x * y
    outcomes = torch.mul(*shared_samples(x, y))
    assert size_of_common(result) == 6
    torch.testing.assert_close(result.loc, outcomes.mean(0), rtol=0.01, atol=0)
    # The common part has the mean of the slopes of all positions, so it is correct on average.
    torch.testing.assert_close(result.variance.mean((2, 3)), outcomes.var(0).mean((2, 3)), rtol=0.02, atol=0)
    torch.testing.assert_close(average(result).stddev, outcomes.mean((-2, -1)).std(0), rtol=0.03, atol=0)


def test_product_without_positions_is_exact() -> None:
    x, y = random_value((2, 5), positions=()), random_value((2, 5), 5, std=0.7, positions=())
    assert_moments(x * y, torch.mul(*shared_samples(x, y)))
    check(lambda x, y: x * y, x, random_value((5,), 2))


@pytest.mark.parametrize("positions", [None, ()], ids=["independent", "common"])
def test_square_of_a_value(positions: tuple[int, ...] | None) -> None:
    check(lambda x: x * x, random_value((3, 4), std=0.8, positions=positions))


def test_positions_share_the_noise_of_their_scale() -> None:
    """In squeeze and excitation most noise of the mean over positions comes from the scale."""
    x, y = random_value((2, 3, 8, 8), std=0.05), random_value(SCALE, 3, std=0.3, positions=(2, 3))
    x, y = x.like(x.loc.abs(), x.independent), y.like(y.loc, y.independent * 0, y.common)
    result = x * y
    truth = torch.mul(*shared_samples(x, y, count=20_000)).mean((-2, -1)).std(0)
    torch.testing.assert_close(average(result).stddev, truth, rtol=0.03, atol=0)


@pytest.mark.parametrize("positions", [None, ()], ids=["independent", "common"])
def test_quotients(positions: tuple[int, ...] | None) -> None:
    x, y = random_value((3, 4), positions=positions), random_value((3, 4), 1, std=0.1, positions=positions)
    y = y + 4 * torch.sign(y.loc)
    assert_moments(x / y, torch.div(*shared_samples(x, y)), mean=0.03, std=0.01)
    check(lambda y: 2 / y, y, mean=0.06, std=0.01)
    check(lambda y: TENSOR[0, 0, :3] / y, y, mean=0.06, std=0.01)


def test_addcmul() -> None:
    x, y, z = random_value((3, 4)), random_value((3, 4), 1), random_value((4,), 2)
    check(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), x, y, z)


def test_choice_between_two_values() -> None:
    x, y = random_value((2, 3)), random_value((2, 3), 1)
    assert_linear(lambda x, y: torch.where(torch.tensor([True, False, True]), x, y), x, y)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shapes_that_broadcast(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    values = []
    for seed in range(2):
        own = tuple(1 if data.draw(st.booleans()) else size for size in shape)[
            data.draw(st.integers(0, len(shape) - 1)) :
        ]
        positions = tuple(dim for dim in range(len(own)) if data.draw(st.booleans()))
        values.append(random_value(own, seed, positions=positions if data.draw(st.booleans()) else None))
    assert_linear(lambda x, y: x - 0.5 * y, *values, whole=False)
    product = values[0] * values[1]
    assert product.independent.shape == product.shape == torch.broadcast_shapes(*[value.shape for value in values])


def test_values_on_different_grids() -> None:
    """One value has (examples, windows) in one dimension, the other has no windows."""
    x, y = random_value((2, 4, 3), positions=(1,)), random_value((8, 3), 1, positions=())
    result = assert_linear(lambda x, y: x.reshape(8, 3) + y, x, y)
    assert result.grid == (2, 4, 3)
    shared = x.like(x.loc, x.independent * 0, x.common)
    assert_linear(lambda x: x.reshape(8, 3) + x.reshape(8, 3) * 2, shared)
    assert_linear(lambda x: (x.reshape(8, 3) * ROW[:, 0, 0]).reshape(2, 4, 3), x)
    assert_linear(lambda x, y: x.reshape(24) + y.reshape(6, 4)[:, :4].reshape(24), x, y)


@pytest.mark.parametrize("positions", [None, (2, 3)], ids=["independent", "common"])
def test_the_mean_without_variance_is_exact(positions: tuple[int, ...] | None) -> None:
    x = without_variance(random_value(MAP, positions=positions, dtype=torch.float32))
    y = without_variance(random_value(MAP, 1, positions=positions, dtype=torch.float32))
    for function in (lambda x, y: x * y, lambda x, y: x / y, lambda x, y: x * x, lambda x, y: torch.addcmul(x, y, x)):
        result: Any = function(x, y)
        assert torch.equal(result.loc, function(x.loc, y.loc))
        assert not result.variance.any()


def test_in_place_addition_to_a_plain_tensor() -> None:
    x, tensor = random_value((2, 3)), torch.ones(2, 3, dtype=torch.float64)
    total: Any = tensor
    total += x
    assert isinstance(total, lb.Moments)
    assert torch.equal(total.variance, x.variance)
    assert torch.equal(tensor, 1 + x.loc)
    factor: Any = torch.full((2, 3), 2.0, dtype=torch.float64)
    factor *= x
    torch.testing.assert_close(factor.variance, 4 * x.variance)


def test_variances_of_low_precision_means_are_in_single_precision() -> None:
    x, y = random_value(MAP, positions=(2, 3), dtype=torch.float32), random_value(SCALE, 1, dtype=torch.float32)
    for result in (x.bfloat16() * y.bfloat16(), x.bfloat16() + 1, x.bfloat16() * TENSOR.bfloat16(), x.bfloat16() / 3):
        assert result.dtype == torch.bfloat16
        assert result.independent.dtype == result.common.dtype == torch.float32
    assert (x + TENSOR).independent.dtype == torch.float64


def test_gradients_match_finite_differences_and_are_finite() -> None:
    x, y = random_value((2, 2, 3), positions=(2,)), random_value((2, 2, 1), 1, positions=(2,))

    def variances(*parts: Tensor) -> tuple[Tensor, ...]:
        a: Any = lb.Moments(*parts[:3], within=x.within)
        b: Any = lb.Moments(*parts[3:], within=x.within)
        result = (a * b + a) / (b + 5)
        return result.loc, result.variance

    parts = [part.clone().requires_grad_() for value in (x, y) for part in (value.loc, value.independent, value.common)]
    assert torch.autograd.gradcheck(variances, parts)
    zeros = [part.detach() * (number % 3 == 0) for number, part in enumerate(parts)]
    zeros = [part.requires_grad_() for part in zeros]
    gradients = torch.autograd.grad([result.sum() for result in variances(*zeros)], zeros)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_compiles() -> None:
    x, y = random_value(MAP, positions=(2, 3)), random_value(SCALE, 1, positions=(2, 3))

    def parts(*given: Any) -> tuple[Tensor, Tensor]:
        a: Any = lb.Moments(*given[:3], within=x.within)
        b: Any = lb.Moments(*given[3:], within=x.within)
        result = 1 - (a * b + a * ROW) / 2 + TENSOR
        return result.loc, result.variance

    given = (x.loc, x.independent, x.common, y.loc, y.independent, y.common)
    compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")(*given)
    for found, expected in zip(compiled, parts(*given), strict=True):
        torch.testing.assert_close(found, expected)
