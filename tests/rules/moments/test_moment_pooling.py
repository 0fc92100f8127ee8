"""Pooling, interpolation, padding and unfolding."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import check, without_variance
from moment_covariances import assert_linear, expected_covariance, random_value, size_of_common
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.rules.moments.buffers import stored

SHAPES = {1: (2, 3, 12), 2: (2, 2, 6, 7), 3: (1, 2, 4, 5, 4)}
AVERAGES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "1d": (1, nn.AvgPool1d(3, 2, 1, count_include_pad=False)),
    "1d ceil": (1, lambda x: F.avg_pool1d(x, 5, stride=3, ceil_mode=True)),
    "2d": (2, nn.AvgPool2d(2)),
    "2d uneven": (2, lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True, count_include_pad=False)),
    "2d ceil": (2, lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
    "2d of an example": (2, lambda x: F.avg_pool2d(x[0], 2)),
    "3d": (3, nn.AvgPool3d(2, 1)),
    "adaptive 1d": (1, nn.AdaptiveAvgPool1d(5)),
    "adaptive 2d": (2, nn.AdaptiveAvgPool2d((4, None))),
    "adaptive to 1": (2, nn.AdaptiveAvgPool2d(1)),
    "adaptive to more": (2, nn.AdaptiveAvgPool2d(9)),
    "adaptive 3d": (3, nn.AdaptiveAvgPool3d((2, 3, 1))),
    "area": (2, lambda x: F.interpolate(x, (4, 3), mode="area")),
    "nearest": (2, nn.Upsample(scale_factor=2)),
    "nearest down": (2, lambda x: F.interpolate(x, size=(4, 3))),
    "nearest-exact": (1, lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact")),
    "linear": (1, lambda x: F.interpolate(x, 7, mode="linear")),
    "bilinear": (2, nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear aligned": (2, lambda x: F.interpolate(x, (9, 4), mode="bilinear", align_corners=True)),
    "bilinear factors": (2, lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear")),
    "bilinear recomputed": (
        2,
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
    ),
    "bilinear smoothed": (2, lambda x: F.interpolate(x, (3, 4), mode="bilinear", antialias=True)),
    "bicubic": (2, lambda x: F.interpolate(x, (8, 5), mode="bicubic")),
    "bicubic aligned": (2, lambda x: F.interpolate(x, (8, 5), mode="bicubic", align_corners=True)),
    "trilinear": (3, lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear")),
    "reflect": (2, lambda x: F.pad(x, (2, 1, 1, 0), mode="reflect")),
    "replicate": (1, lambda x: F.pad(x, (2, 1), "replicate")),
    "circular": (2, nn.CircularPad2d(1)),
    "crop": (2, lambda x: F.pad(x, (-1, -2))),
    "channels": (2, lambda x: F.pad(x, (0, 0, 0, 0, 1, 2))),
    "windows": (2, lambda x: F.unfold(x, (2, 3), stride=2)),
    "grid": (2, lambda x: F.grid_sample(x, places(2, 0.8).to(x.dtype), align_corners=False)),
    "grid border": (
        2,
        lambda x: F.grid_sample(x, places(2, 1.6).to(x.dtype), padding_mode="border", align_corners=False),
    ),
    "grid reflection": (
        2,
        lambda x: F.grid_sample(x, places(2, 5.0).to(x.dtype), padding_mode="reflection", align_corners=False),
    ),
    "grid aligned": (
        2,
        lambda x: F.grid_sample(x, places(2, 5.0).to(x.dtype), padding_mode="reflection", align_corners=True),
    ),
    "grid nearest": (2, lambda x: F.grid_sample(x, places(2, 1.0).to(x.dtype), "nearest", "border", False)),
    "grid 3d": (3, lambda x: F.grid_sample(x, places(3, 1.0).to(x.dtype), align_corners=True)),
}


def places(dims: int, size: float) -> Tensor:
    """Return random places up to a distance from the center of a map."""
    generator = torch.Generator().manual_seed(dims)
    shape = (SHAPES[dims][0], *(4, 5, 3)[:dims], dims)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * size


ZEROS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "1d": (1, nn.AvgPool1d(3, 2, 1)),
    "2d": (2, nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
    "2d divisor": (2, lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=4)),
    "3d": (3, nn.AvgPool3d(3, 2, 1)),
    "grid": (2, lambda x: F.grid_sample(x, places(2, 1.5).to(x.dtype), align_corners=False)),
    "grid nearest": (2, lambda x: F.grid_sample(x, places(2, 1.5).to(x.dtype), "nearest", align_corners=True)),
    "grid 3d": (3, lambda x: F.grid_sample(x, places(3, 1.3).to(x.dtype), align_corners=False)),
    "pad": (2, nn.ZeroPad2d((1, 0, 2, 1))),
    "pad by ones": (1, lambda x: F.pad(x, (3, 0), value=1.0)),
    "pad more and less": (2, lambda x: F.pad(x, (3, -2, 1, 1))),
    "windows": (2, lambda x: F.unfold(x, 3, padding=1, stride=2)),
}
MAXIMA: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "1d": (1, nn.MaxPool1d(3)),
    "2d": (2, nn.MaxPool2d(3, 2, 1)),
    "2d of torch": (2, lambda x: torch.max_pool2d(x, 2)),
    "2d dilated": (2, lambda x: F.max_pool2d(x, 2, stride=1, dilation=2, ceil_mode=True)),
    "2d with indices": (2, lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
    "2d of an example": (2, lambda x: F.max_pool2d(x[1], 2)),
    "3d": (3, nn.MaxPool3d(2)),
    "adaptive 1d": (1, nn.AdaptiveMaxPool1d(5)),
    "adaptive 2d": (2, nn.AdaptiveMaxPool2d((2, None))),
    "adaptive 3d": (3, lambda x: nn.AdaptiveMaxPool3d(2, return_indices=True)(x)[0]),
}


def value(dims: int, common: bool, dtype: torch.dtype = torch.float64) -> Any:
    shape = SHAPES[dims]
    return random_value(shape, positions=tuple(range(2, len(shape))) if common else None, dtype=dtype)


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_are_exact(name: str, common: bool) -> None:
    dims, function = AVERAGES[name]
    result = assert_linear(function, value(dims, common), whole=False)
    if common:
        assert size_of_common(result) <= 2.5 * size_of_common(value(dims, True))


@pytest.mark.parametrize("name", ["2d", "adaptive 2d", "bilinear", "reflect", "crop", "channels", "windows"])
def test_the_common_part_does_not_change(name: str) -> None:
    """Without independent noise the correlations of all elements stay the same."""
    dims, function = AVERAGES[name]
    x = value(dims, True)
    assert_linear(function, x.like(x.loc, x.independent * 0, x.common))


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_have_no_noise(name: str) -> None:
    dims, function = ZEROS[name]
    assert_linear(function, value(dims, False), whole=False)
    x = value(dims, True)
    x = x.like(x.loc, x.independent * 0, x.common)
    result = function(x)
    assert torch.equal(result.loc, function(x.loc))
    assert size_of_common(result) == size_of_common(x)
    examples, channels = x.shape[:2]
    expected = expected_covariance(function, x).diagonal().reshape(examples, channels, -1)
    found = result.variance.reshape(examples, channels, -1)
    torch.testing.assert_close(found.mean(-1), expected.mean(-1))
    whole = result.reshape(examples, channels, -1).mean(-1)
    mean = expected_covariance(lambda x: function(x).reshape(examples, channels, -1).mean(-1), x).diagonal()
    torch.testing.assert_close(whole.common.square().sum(0).reshape(-1), mean)


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", MAXIMA)
def test_maxima_have_the_noise_of_the_winner(name: str, common: bool) -> None:
    dims, function = MAXIMA[name]
    assert_linear(function, value(dims, common), whole=False)


def test_indices_of_maxima() -> None:
    x = value(2, True)
    values, indices = nn.MaxPool2d(2, return_indices=True)(x)
    assert torch.equal(indices, F.max_pool2d(x.loc, 2, return_indices=True)[1])
    assert isinstance(values, lb.Moments)
    assert torch.equal(F.adaptive_max_pool2d(x, 2, True)[1], F.adaptive_max_pool2d(x.loc, 2, True)[1])


def test_random_places_and_other_kinds_of_sampling_are_refused() -> None:
    x, random = value(2, False), cast(Any, lb.Moments(places(2, 1), places(2, 1) ** 2))
    with pytest.raises(lb.UnsupportedOperation, match="random places"):
        F.grid_sample(x, random, align_corners=False)
    with pytest.raises(lb.UnsupportedOperation, match="random places"):
        F.grid_sample(x.loc, random, align_corners=False)
    with pytest.raises(lb.UnsupportedOperation, match="mode='bicubic'"):
        F.grid_sample(x, places(2, 1), "bicubic", align_corners=False)


def test_pooled_maps_against_samples() -> None:
    x = random_value((2, 3, 4, 4), positions=(2, 3))
    check(lambda x: F.avg_pool2d(x, 2).mean((2, 3)), x)
    grid = places(2, 0.7)[:1].to(x.dtype)
    check(lambda x: F.grid_sample(x, grid.expand(len(x), -1, -1, -1), align_corners=False), x)
    distinct = random_value((1, 2, 4, 4), 3, std=0.01, positions=(2, 3))  # so that all samples have the same maxima
    check(lambda x: F.max_pool2d(x, 4).flatten(1), distinct, mean=0.01, std=0.01)


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(3, 8), st.integers(3, 8)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1),
    st.booleans(),
)
def test_windows_of_all_kinds(size: tuple[int, int], kernel: int, stride: int, padding: int, ceil_mode: bool) -> None:
    padding = min(padding, kernel // 2)
    x = random_value((1, 2, *size))
    for include in (True, False):
        assert_linear(
            lambda x, include=include: F.avg_pool2d(x, kernel, stride, padding, ceil_mode, include), x, whole=False
        )
    assert_linear(lambda x: F.max_pool2d(x, kernel, stride, padding, 1, ceil_mode), x, whole=False)
    assert_linear(lambda x: F.adaptive_avg_pool2d(x, (kernel, stride)), x, whole=False)


def test_values_on_a_finer_grid() -> None:
    """Pixels that were channels have different common noise, which is averaged."""
    x = random_value((1, 8, 3, 3), positions=(2, 3))
    x = x.like(x.loc, x.independent * 0, x.common)
    result: Any = F.avg_pool2d(F.pixel_shuffle(x, 2), 2)
    expected = x.common.reshape(3, 1, 2, 4).mean(-1)
    torch.testing.assert_close(result.common.reshape(3, 1, 2), expected)
    assert math.prod(result.grid) == result.numel()


def test_the_mean_without_variance_is_exact() -> None:
    for dims, function in [*AVERAGES.values(), *ZEROS.values(), *MAXIMA.values()]:
        x = without_variance(value(dims, True, torch.float32))
        assert torch.equal(function(x).loc, function(x.loc))
        assert not function(x).variance.any()


def test_variances_of_low_precision_means_are_in_single_precision() -> None:
    x = value(2, True, torch.float32).bfloat16()
    for name in ("2d", "adaptive 2d", "bilinear", "reflect"):
        result = AVERAGES[name][1](x)
        assert result.dtype == torch.bfloat16
        assert result.independent.dtype == torch.float32


def test_gradients_match_finite_differences() -> None:
    x = random_value((1, 2, 4, 4), positions=(2, 3))

    def moments(*parts: Tensor) -> tuple[Tensor, ...]:
        value: Any = lb.Moments(*parts, within=x.within)
        pooled = F.max_pool2d(value, 2), F.avg_pool2d(value, 3, 1, 1), F.interpolate(value, 3, mode="bilinear")
        results: Any = (*pooled, F.pad(value, (1, 0)), F.adaptive_avg_pool2d(value, 3))
        return tuple(part for result in results for part in (result.loc, result.variance))

    assert torch.autograd.gradcheck(moments, [part.requires_grad_() for part in (x.loc, x.independent, x.common)])


@pytest.mark.skipif(torch.__version__ < "2.11", reason="the compiler of torch 2.10 cannot trace F.pad of moments")
def test_compiles() -> None:
    x = value(2, True)

    def parts(loc: Tensor, independent: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        value: Any = lb.Moments(loc, independent, common, within=x.within)
        result: Any = F.adaptive_avg_pool2d(F.max_pool2d(F.pad(value, (1, 1)), 2), 1)
        result = F.avg_pool2d(F.interpolate(value + result, scale_factor=2, mode="bilinear"), 3, 2, 1)
        return result.loc, result.variance

    given = (x.loc, x.independent, x.common)
    compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")(*given)
    for found, expected in zip(compiled, parts(*given), strict=True):
        torch.testing.assert_close(found, expected)


RESIZED = [
    *("nearest", "linear", "bilinear", "bilinear aligned", "bilinear factors", "bilinear recomputed"),
    *("bilinear smoothed", "bicubic", "trilinear"),
]


@pytest.mark.parametrize("name", RESIZED)
def test_interpolation_is_the_same_in_compiled_code(name: str) -> None:
    """Compiled code interpolates variances by indices, not by matrices."""
    dims, function = AVERAGES[name]
    x = value(dims, True)

    def parts(loc: Tensor, independent: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        result = function(lb.Moments(loc, independent, common, within=x.within))
        return result.loc, result.independent

    given = (x.loc, x.independent, x.common)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")(*given)
        for found, expected in zip(compiled, parts(*given), strict=True):
            torch.testing.assert_close(found, expected)


def test_compiled_code_stores_a_map_before_it_is_interpolated() -> None:
    """`stored` is a view in compiled code without gradients, also of a map in another order, and else nothing."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.rand(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(lambda x: stored(x.exp()), fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(x), x.exp())
        assert compiled(x).stride() == x.stride()
        assert stored(x) is x
    assert "as_strided" in graphs[0].code
    torch.compiler.reset()
    assert torch.equal(compiled(x.requires_grad_()), x.exp())
    assert "as_strided" not in graphs[-1].code
