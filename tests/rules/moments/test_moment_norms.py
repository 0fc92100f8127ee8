"""Normalization of Gaussian values against samples, the delta method by autograd, and torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moment_cases import assert_moments, common_pass, gaussian, samples_of, without_variance
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.errors import UnsupportedOperation
from leanbayes.rules.moments.context import Activations, Pass

F: Any = nn.functional  # declared for tensors only
Function = Callable[[Any], Any]
MODES: list[Activations] = ["exact", "taylor"]
WEIGHT, BIAS = torch.linspace(0.5, 1.5, 6, dtype=torch.float64), torch.linspace(-1, 1, 6, dtype=torch.float64)
MEAN, VAR = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.linspace(0.5, 2, 6, dtype=torch.float64)


def cast(x: Any, *tensors: Tensor) -> list[Tensor]:
    """Convert parameters and buffers to the dtype of the input."""
    return [tensor.to(x.dtype) for tensor in tensors]


# name: (function, shape of its input, positions)
NORMS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "layer": (lambda x: F.layer_norm(x, (6,), *cast(x, WEIGHT, BIAS)), (2, 5, 6), (1,)),
    "layer over all": (lambda x: F.layer_norm(x, (6, 4, 4)), (2, 6, 4, 4), (2, 3)),
    "rms": (lambda x: F.rms_norm(x, (6,), *cast(x, WEIGHT)), (2, 5, 6), (1,)),
    "group": (lambda x: F.group_norm(x, 2, *cast(x, WEIGHT, BIAS)), (2, 6, 4, 4), (2, 3)),
    "instance": (lambda x: F.instance_norm(x, None, None, *cast(x, WEIGHT, BIAS)), (2, 6, 4, 4), (2, 3)),
    "L2 of tokens": (lambda x: F.normalize(x, dim=-1), (2, 5, 6), (1,)),
    "L2 of pixels": (lambda x: F.normalize(x), (2, 6, 4, 4), (2, 3)),
    "batch": (lambda x: F.batch_norm(x, *cast(x, MEAN, VAR, WEIGHT, BIAS)), (2, 6, 3, 3), (2, 3)),
    "batch of vectors": (lambda x: F.batch_norm(x, *cast(x, MEAN, VAR)), (4, 6), ()),
    "instance by running statistics": (
        lambda x: F.instance_norm(x, *cast(x, MEAN, VAR), use_input_stats=False),
        (2, 6, 5),
        (2,),
    ),
}
# Tolerances of the mean (in stds) and the std (relative) with "exact", for a std of 0.3 and means of size 1. Only 6 or
# 16 elements share a statistic here; with more elements it would fluctuate less.
TOLERANCES = {
    "layer": (0.1, 0.06),
    "layer over all": (0.01, 0.01),
    "rms": (0.1, 0.06),
    "group": (0.02, 0.02),
    "instance": (0.05, 0.03),
    "L2 of tokens": (0.1, 0.06),
    "L2 of pixels": (0.2, 0.15),
    "batch": (0.0, 0.0),
    "batch of vectors": (0.0, 0.0),
    "instance by running statistics": (0.0, 0.0),
}
OF_ONE_EXAMPLE = [name for name in NORMS if not name.startswith("batch") and "running" not in name]


def within(activations: Activations, value: lb.Moments) -> lb.Moments:
    value.within.activations = activations
    return value


def outcomes_of(name: str, value: lb.Moments, count: int) -> Tensor:
    """Call a function on samples; examples are independent, so samples can be merged with examples."""
    samples = samples_of(value, count)
    return NORMS[name][0](samples.flatten(0, 1)).reshape(samples.shape)


def jacobian(function: Function, loc: Tensor) -> Tensor:
    """Return the derivatives of all results with respect to all inputs, as a matrix."""
    slopes = torch.autograd.functional.jacobian(function, loc)
    return slopes.reshape(loc.numel(), loc.numel())


@pytest.mark.parametrize("name", NORMS)
def test_mean_and_variance_equal_those_of_samples(name: str) -> None:
    function, shape, _ = NORMS[name]
    value = gaussian(shape)
    mean, std = TOLERANCES[name]
    assert_moments(function(value), outcomes_of(name, value, 30_000), mean=mean, std=std)


@pytest.mark.parametrize("name", NORMS)
def test_common_noise_keeps_mean_and_variance(name: str) -> None:
    function, shape, positions = NORMS[name]
    value = gaussian(shape, std=0.1, positions=positions)
    mean, std = TOLERANCES[name]
    assert_moments(function(value), outcomes_of(name, value, 30_000), mean=1.5 * mean, std=std)


@pytest.mark.parametrize("name", NORMS)
def test_taylor_is_the_delta_method(name: str) -> None:
    function, shape, _ = NORMS[name]
    value = within("taylor", gaussian(shape))
    expected = (jacobian(function, value.loc).square() @ value.variance.flatten()).reshape(shape)
    torch.testing.assert_close(function(value).variance, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", OF_ONE_EXAMPLE)
def test_common_noise_is_multiplied_by_the_jacobian(name: str) -> None:
    function, shape, positions = NORMS[name]
    value = within("taylor", gaussian(shape, positions=positions))
    assert value.common is not None
    result = function(value.like(value.loc, torch.zeros_like(value.loc), value.common))
    directions = value.common.expand(-1, *shape).flatten(1) @ jacobian(function, value.loc).T
    directions = directions.reshape(-1, *shape)
    shared = directions.mean([dim + 1 for dim in positions], keepdim=True)
    torch.testing.assert_close(result.common, shared, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(result.variance, directions.square().sum(0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["layer", "layer over all", "rms", "group"])
def test_common_noise_keeps_the_covariance_of_channels(name: str) -> None:
    function, shape, positions = NORMS[name]
    value = gaussian(shape, std=0.1, positions=positions)
    result, count = function(value).plain(), 20_000
    places = [dim + 1 for dim in positions]
    true = torch.cov(outcomes_of(name, value, count).mean(places)[:, 0].T)
    common = result.common.expand(-1, *shape).mean(places)[:, 0]
    size = torch.Size([shape[dim] for dim in positions]).numel()
    covariance = common.T @ common + torch.diag(result.independent.mean(positions)[0]) / size
    assert (covariance - true).norm() < 0.1 * true.norm()


def test_merged_positions_equal_separate_ones() -> None:
    value = gaussian((2, 5, 6), positions=(1,))
    merged = value.reshaped(value.loc.reshape(10, 6))
    for function in (F.layer_norm, F.rms_norm):
        result, expected = function(merged, (6,)), function(value, (6,))
        assert result.common.shape == (3, 2, 1, 6)
        torch.testing.assert_close(result.variance.reshape(2, 5, 6), expected.variance)


def test_examples_that_share_noise_get_their_own_directions() -> None:
    value = gaussian((2, 5, 6), positions=(0, 1))
    result: Any = F.layer_norm(value, (6,))
    assert result.common.shape == (3, 2, 1, 6)


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_any_shape(batch: int, groups: int, places: list[int]) -> None:
    shape = (batch, 2 * groups, *places)
    value: Any = gaussian(shape, positions=tuple(range(2, len(shape))))
    for function in (
        lambda x: F.group_norm(x, groups),
        lambda x: F.layer_norm(x, shape[1:]),
        lambda x: F.rms_norm(x, shape[-1:]),
        F.normalize,
        lambda x: F.batch_norm(x, None, None, training=True) if batch > 1 else x,
    ):
        result: Any = function(value)
        assert result.shape == result.variance.shape == shape
        assert (result.variance >= 0).all()
        assert result.common.shape[1:] == value.common.shape[1:]


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_the_mean_without_variance_is_exact(name: str, dtype: torch.dtype, activations: Activations) -> None:
    function, shape, positions = NORMS[name]
    value = without_variance(within(activations, gaussian(shape, positions=positions, dtype=torch.float32)))
    value.loc = value.loc.to(dtype)
    result, plain = function(value), function(value.loc)
    assert torch.equal(result.loc, plain)
    assert result.dtype == plain.dtype
    assert result.variance.dtype == torch.float32
    assert (result.variance == 0).all()


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("name", NORMS)
def test_extreme_inputs_give_finite_moments_and_gradients(name: str, activations: Activations) -> None:
    function, shape, positions = NORMS[name]
    base = gaussian(shape, positions=positions, dtype=torch.float32)
    assert base.common is not None
    shared = common_pass(activations=activations)
    for size in (0.0, 1.0, 1e4):
        if size == 0 and name.startswith("L2"):
            continue  # the direction of 0 is undefined
        for variance in (0.0, 1e-30, 1.0, 1e6):
            m = (size * base.loc).requires_grad_()
            v = torch.full(shape, variance).requires_grad_()
            result = function(lb.Moments(m, v, variance**0.5 * base.common, within=shared))
            assert (result.variance >= 0).all()
            for part in (result.loc, result.variance):
                assert part.isfinite().all()
                for grad in torch.autograd.grad(part.sum(), (m, v), retain_graph=True, allow_unused=True):
                    assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("name", ["layer", "group", "rms", "batch"])
def test_gradients_match_finite_differences(name: str) -> None:
    function, shape, positions = NORMS[name]
    value = gaussian((1, *shape[1:]), positions=positions, std=0.5)
    assert value.common is not None

    def moments(loc: Tensor, variance: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
        result = function(lb.Moments(loc, variance, common, within=common_pass()))
        return result.loc, result.independent.sum() + result.common.square().sum()

    parts = [part.requires_grad_() for part in (value.loc, value.independent, value.common)]
    assert torch.autograd.gradcheck(moments, parts, fast_mode=True)


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_in_training_uses_the_expected_variance_of_the_batch(affine: bool, activations: Activations) -> None:
    ours, plain = nn.BatchNorm2d(6, affine=affine).double(), nn.BatchNorm2d(6, affine=affine).double()
    if affine:
        for layer in (ours, plain):
            nn.init.constant_(layer.weight, 1.7)
            nn.init.constant_(layer.bias, 0.3)
    value = within(activations, gaussian((3, 6, 4, 4), positions=(2, 3)))
    result, of_means = ours(value), plain(value.loc)
    weight, bias = (1.7, 0.3) if affine else (1.0, 0.0)
    noise = value.variance.mean((0, 2, 3))
    scale = (value.loc.var((0, 2, 3), correction=0) + noise + ours.eps).rsqrt()[:, None, None]
    expected = weight * scale * (value.loc - value.loc.mean((0, 2, 3), keepdim=True)) + bias
    torch.testing.assert_close(result.loc, expected if activations == "exact" else of_means)
    torch.testing.assert_close(result.variance, value.variance * (weight * scale).square())
    if activations == "exact":  # by the momentum
        plain.get_buffer("running_var").add_(0.1 * noise)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    assert result.common.shape == (3, 3, 6, 1, 1)
    assert result.loc.requires_grad == affine


@pytest.mark.parametrize("std", [0.3, 1.0])
def test_batch_norm_in_training_matches_samples(std: float) -> None:
    value, layer = gaussian((32, 6, 4, 4), std=std), nn.BatchNorm2d(6, momentum=1.0).double()
    samples = samples_of(value, 2_000)
    with torch.no_grad():
        outcomes = torch.stack([F.batch_norm(one, None, None, training=True) for one in samples])
        assert_moments(layer(value), outcomes, mean=0.1, std=0.1)
        variances = torch.stack([one.var((0, 2, 3)) for one in samples]).mean(0)
        torch.testing.assert_close(layer.get_buffer("running_var"), variances, rtol=0.02, atol=0)


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("shape", [(2, 6, 1, 1), (2, 6), (3, 6, 2)])
def test_batch_norm_in_training_is_bounded_if_the_means_are_nearly_equal(
    shape: tuple[int, ...], activations: Activations
) -> None:
    base, rest = gaussian(shape), [dim for dim in range(len(shape)) if dim != 1]
    for distance in (0.0, 1e-4, 1e-2, 1.0):
        m = (1.0 + distance * base.loc).requires_grad_()
        v = base.variance.detach().clone().requires_grad_()
        result: Any = F.batch_norm(lb.Moments(m, v, within=Pass(activations=activations)), None, None, training=True)
        assert (result.variance.mean(rest) <= 1).all()
        if activations == "exact":
            assert ((result.loc.square() + result.variance).mean(rest) <= 1).all()
        for gradient in torch.autograd.grad(result.variance.square().sum(), (m, v)):
            assert gradient.abs().max() < 100


RANDOM: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "layer": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (2, 5, 6)),
    "rms": (lambda x, w, b: F.rms_norm(x, (6,), w), (2, 5, 6)),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 6, 4, 4)),
    "batch": (lambda x, w, b: F.batch_norm(x, MEAN, VAR, w, b), (2, 6, 3, 3)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_noise_in_weight_and_bias(name: str) -> None:
    function, shape = RANDOM[name]
    weight, bias = lb.Moments(WEIGHT, 0.1 * WEIGHT), lb.Moments(BIAS, BIAS.square())
    value = gaussian(shape, std=0.1)
    zero, one = torch.zeros_like(WEIGHT), torch.ones_like(WEIGHT)
    place = (1, 6) if shape[-1] == 6 else (6, 1, 1)
    samples = samples_of(value, 20_000)
    normalized = function(samples.flatten(0, 1), one, zero).reshape(samples.shape)
    w, b = (samples_of(part, 20_000, seed).reshape(20_000, 1, *place) for seed, part in ((2, weight), (3, bias)))
    outcomes = w * normalized + (0 if name == "rms" else b)
    assert_moments(function(value, weight, bias), outcomes, mean=0.05, std=0.02)
    alone = function(value.loc, weight, bias)  # an input without noise
    x = function(value.loc, one, zero)
    expected = weight.variance.reshape(place) * x.square() + (0 if name == "rms" else bias.variance.reshape(place))
    torch.testing.assert_close(alone.variance, expected)


def test_functions_of_torch_equal_those_of_functional() -> None:
    value: Any = gaussian((2, 6, 4))
    pairs: list[tuple[Any, Any]] = [
        (torch.layer_norm(value, (4,)), F.layer_norm(value, (4,))),
        (torch.group_norm(value, 3), F.group_norm(value, 3)),
        (
            torch.batch_norm(value, WEIGHT, BIAS, MEAN, VAR, False, 0.1, 1e-5, False),
            F.batch_norm(value, MEAN, VAR, WEIGHT, BIAS),
        ),
    ]
    for one, other in pairs:
        assert torch.equal(one.loc, other.loc)
        assert torch.equal(one.variance, other.variance)


def test_other_norms_than_the_euclidean_raise_an_error() -> None:
    with pytest.raises(UnsupportedOperation, match="p other than 2"):
        F.normalize(gaussian((2, 3)), p=1.0)


def test_results_without_common_noise_have_none() -> None:
    value = lb.Moments(torch.randn(2, 5, 6), torch.rand(2, 5, 6), within=Pass())
    assert F.layer_norm(value, (6,)).common is None


@pytest.mark.parametrize("name", ["layer", "group", "batch", "L2 of tokens"])
def test_compiled_equals_eager(name: str) -> None:
    function, shape, positions = NORMS[name]
    value, shared = gaussian(shape, positions=positions, dtype=torch.float32), common_pass()

    def moments(loc: Tensor, variance: Tensor, common: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = function(lb.Moments(loc, variance, common, within=shared))
        return result.loc, result.independent, result.common

    parts: Any = value.loc, value.independent, value.common
    compiled = torch.compile(moments, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*parts), moments(*parts))
