"""Layers with moments: exact for independent noise, and common noise against weight samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import assert_moments, check, common_pass, gaussian, samples_of, without_variance
from torch import Tensor

import leanbayes as lb

few = settings(max_examples=8, deadline=None, derandomize=True)
DTYPE = torch.float64
F: Any = torch.nn.functional  # declared for tensors only

# Function, shapes of input, weight and bias, and other arguments.
LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "linear": (F.linear, (2, 5), (3, 5), 3, {}),
    "linear on tokens": (F.linear, (2, 4, 5), (3, 5), 3, {}),
    "conv1d": (F.conv1d, (2, 3, 7), (6, 3, 3), 6, {"padding": 1, "stride": 2}),
    "conv2d": (F.conv2d, (2, 3, 5, 4), (6, 3, 3, 3), 6, {"padding": 1}),
    "conv2d, same": (F.conv2d, (2, 3, 5, 4), (6, 3, 3, 1), 6, {"padding": "same", "dilation": (2, 1)}),
    "conv2d, groups": (F.conv2d, (2, 4, 4, 4), (12, 2, 3, 3), 12, {"groups": 2, "dilation": 1}),
    "conv2d, depthwise": (F.conv2d, (2, 4, 4, 4), (4, 1, 3, 3), 4, {"groups": 4, "padding": (1, 2)}),
    "conv3d": (F.conv3d, (1, 2, 3, 3, 3), (5, 2, 2, 2, 2), 5, {}),
    "transposed 1d": (F.conv_transpose1d, (2, 3, 4), (3, 6, 3), 6, {"stride": 2, "padding": 1}),
    "transposed 2d": (F.conv_transpose2d, (1, 4, 3, 3), (4, 6, 2, 2), 12, {"stride": 2, "groups": 2}),
    "transposed 3d": (F.conv_transpose3d, (1, 2, 2, 2, 2), (2, 5, 2, 2, 2), 5, {"stride": 2, "output_padding": 1}),
}
layers = pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))


def outputs_of_samples(layer: Any, x: Any, weight: lb.Moments, bias: Any) -> Tensor:
    """Return the outputs of a layer for samples of its random arguments."""
    function, _, _, _, options = layer
    values = [value if isinstance(value, lb.Moments) else None for value in (x, weight, bias)]
    samples = [samples_of(value, 20_000, seed) if value is not None else None for seed, value in enumerate(values)]
    dims = tuple(None if sample is None else 0 for sample in samples)
    parts = [sample if sample is not None else given for sample, given in zip(samples, (x, weight, bias), strict=True)]
    return torch.vmap(lambda a, w, b: function(a, w, b, **options), in_dims=dims, chunk_size=4000)(*parts)


def values(layer: Any, seed: int = 0, **settings: Any) -> tuple[lb.Moments, lb.Moments, lb.Moments]:
    _, x, weight, bias, _ = layer
    made = [gaussian(shape, seed + n) for n, shape in enumerate((x, weight, (bias,)))]
    if settings:
        within = common_pass(**settings)
        made = [lb.Moments(value.loc, value.independent, within=within) for value in made]
    return made[0], made[1], made[2]


@layers
@pytest.mark.parametrize("random_input", [True, False])
def test_independent_noise_is_exact(layer: Any, random_input: bool) -> None:
    x, weight, bias = values(layer)
    given = x if random_input else x.loc
    assert_moments(layer[0](given, weight, bias, **layer[4]), outputs_of_samples(layer, given, weight, bias), std=0.0)


@layers
def test_noise_in_the_input_alone(layer: Any) -> None:
    x, weight, bias = values(layer)
    result = layer[0](x, weight.loc, bias.loc, **layer[4])
    outcomes = torch.vmap(lambda a: layer[0](a, weight.loc, bias.loc, **layer[4]))(samples_of(x, 20_000))
    assert_moments(result, outcomes)


@layers
def test_noise_in_the_bias_alone(layer: Any) -> None:
    x, weight, bias = values(layer)
    result = layer[0](x.loc, weight.loc, bias, **layer[4])
    expected = bias.variance.reshape(-1, *[1] * (-1 - (-1 if layer[0] is F.linear else 1 - x.dim())))
    torch.testing.assert_close(result.variance, expected.expand(result.shape))


@layers
@pytest.mark.parametrize("correlation", ["none", "common"])
def test_results_without_variance_are_exact(layer: Any, correlation: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        made = [without_variance(value) for value in values(layer)]
        within = common_pass() if correlation == "common" else made[0].within
        made = [lb.Moments(v.loc.to(dtype), v.independent.float(), within=within) for v in made]
        result = layer[0](*made, **layer[4])
        assert torch.equal(result.loc, layer[0](*(value.loc for value in made), **layer[4]))
        assert result.variance.dtype == torch.float32
        assert not result.variance.any()


@layers
def test_total_variance_and_variance_of_the_mean_over_positions(layer: Any) -> None:
    """The total variance is correct on average, and that of the mean over positions is not underestimated."""
    function, shape, _, _, options = layer
    if len(shape) == 2:
        return
    x, weight, bias = values(layer, batch_first=True)
    positive = 1 + x.loc.abs()  # like outputs of a ReLU
    result = function(positive, weight, bias.loc, **options)
    outcomes = outputs_of_samples(layer, positive, weight, bias.loc)
    channel = -1 if function is F.linear else 1
    positions = [dim for dim in range(1, result.dim()) if dim != channel % result.dim()]
    true = outcomes.var(0)
    torch.testing.assert_close(result.variance.mean(positions), true.mean(positions), rtol=0.3, atol=1e-3)
    of_mean = outcomes.mean([dim + 1 for dim in positions]).var(0)
    kept = result.common_variance()
    assert isinstance(kept, Tensor)
    assert (kept.squeeze(positions) >= 0.8 * of_mean).all()
    assert (kept.squeeze(positions) <= 1.2 * true.mean(positions)).all()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(3, 6), st.integers(1, 2))
@few
def test_the_mean_of_a_convolution_of_a_constant(stride: int, taps: int, pad: int, size: int, dilation: int) -> None:
    """Common noise of all pixels is multiplied by the mean effect of a padded kernel over the pixels."""
    if dilation * (taps - 1) + 1 > size + 2 * pad:
        return
    for function, shape in ((F.conv2d, (6, 2, taps, taps)), (F.conv_transpose2d, (2, 6, taps, taps))):
        if function is F.conv_transpose2d and pad > (size - 1) * stride // 2:
            continue
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
        common = torch.randn((3, 1, 2, 1, 1), generator=torch.Generator().manual_seed(1), dtype=DTYPE)
        zero = torch.zeros(1, 2, size, size, dtype=DTYPE)
        x = lb.Moments(zero, zero, common, within=common_pass())
        how = {"stride": stride, "padding": pad, "dilation": dilation}
        result = function(x, weight, None, **how)
        full = function(common.squeeze(1).expand(3, 2, size, size), weight, None, **how)
        torch.testing.assert_close(result.common[:, 0], full.mean((2, 3), keepdim=True))


def test_noise_of_channels_stays_correlated_through_layers() -> None:
    """After two layers on tokens and a mean, the common part has the covariance that a diagonal rule drops."""
    generator = torch.Generator().manual_seed(0)
    x = 1 + 0.1 * torch.randn(1, 16, 8, generator=generator, dtype=DTYPE)
    first = lb.Moments(torch.zeros(400, 8, dtype=DTYPE), torch.full((400, 8), 0.01, dtype=DTYPE), within=common_pass())
    second = torch.randn(3, 400, generator=generator, dtype=DTYPE) / 20
    result = F.linear(F.linear(x, first), second)
    sums = torch.einsum("oi,i->o", second.square(), torch.full((400,), 1.0, dtype=DTYPE)) * 0.01
    expected = sums * x.mean(1).square().sum()
    covariance = torch.einsum("rbto,rbtp->op", result.common, result.common)
    true = second @ second.T * 0.01 * x.mean(1).square().sum()
    assert result.common.shape[2] == 1
    torch.testing.assert_close(covariance.diagonal(), expected, rtol=5 * math.sqrt(2 / 64), atol=0)
    assert (covariance - true).abs().max() < 5 / math.sqrt(64) * true.diagonal().max()


def test_flattened_common_noise_needs_no_more_memory() -> None:
    x = gaussian((2, 3, 4, 4), positions=(2, 3))
    weight = torch.randn(5, 48, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    flat = x.flatten(1)
    assert x.common is not None
    assert flat.common.numel() == x.common.numel()
    result = F.linear(flat, weight)
    outcomes = F.linear(samples_of(x, 20_000).flatten(2), weight)
    assert_moments(result, outcomes)


def test_matrix_products_with_a_weight() -> None:
    weight, bias = gaussian((5, 3), 1), gaussian((3,), 2)
    x = gaussian((4, 5))
    check(torch.matmul, x, weight)
    check(lambda a, w: a @ w, x, weight)
    check(lambda b, a, w: torch.addmm(b, a, w), bias, x, weight)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for it
def test_bilinear_is_exact() -> None:
    check(F.bilinear, gaussian((2, 3)), gaussian((2, 4), 1), gaussian((5, 3, 4), 2), gaussian((5,), 3))


def test_embeddings_have_the_variance_of_their_rows() -> None:
    table, ids = gaussian((7, 3)), torch.tensor([[0, 3], [6, 3]])
    result = F.embedding(ids, table)
    assert torch.equal(result.loc, table.loc[ids])
    assert torch.equal(result.variance, table.variance[ids])
    with pytest.raises(lb.UnsupportedOperation, match="max_norm"):
        F.embedding(ids, table, max_norm=1.0)


def test_time_first_sequences_do_not_mix_examples() -> None:
    within = common_pass(batch_first=False)
    weight = lb.Moments(torch.zeros(4, 3), torch.ones(4, 3), within=within)
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    both = F.linear(x, weight)
    within.taken = 0
    alone = F.linear(x[:, :1], weight)
    torch.testing.assert_close(both.variance[:, :1], alone.variance)
    torch.testing.assert_close(both.common[:, :, :1], alone.common)


def test_gradients_reach_the_variance_of_the_weights_and_are_finite_at_zero() -> None:
    for start in (0.0, 0.1):
        variance = torch.full((6, 3, 3, 3), start, requires_grad=True)
        weight = lb.Moments(torch.randn(6, 3, 3, 3), variance, within=common_pass())
        result = F.conv2d(F.conv2d(torch.rand(2, 3, 5, 5), weight), torch.randn(2, 6, 3, 3))
        result.variance.sum().backward()
        assert variance.grad is not None
        assert variance.grad.isfinite().all()
        assert start == 0 or (variance.grad > 0).any()


def test_addmm_with_factors() -> None:
    matrix = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    bias = torch.ones(4, dtype=torch.float64)
    check(lambda x: torch.addmm(bias, x, matrix, beta=2, alpha=0.5), gaussian((2, 3)), std=0.01)
