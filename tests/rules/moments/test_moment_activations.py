"""Elementwise functions of Gaussian values against samples, autograd and torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from moment_cases import assert_moments, check, common_pass, gaussian, samples_of, shapes, without_variance
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.errors import UnsupportedOperation
from leanbayes.rules.moments import exact_moments
from leanbayes.rules.moments.context import Activations, Pass

F: Any = nn.functional  # declared for tensors only
Function = Callable[[Any], Any]
MODES: list[Activations] = ["exact", "taylor"]
SLOPES = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)

# name: (function, tolerance of its mean in stds, relative tolerance of its std), for inputs with a std of 0.5.
# Closed forms are exact, and smooth functions accurate to 0.01; the quadrature is less accurate near a kink.
FUNCTIONS: dict[str, tuple[Function, float, float]] = {
    "relu": (F.relu, 0.0, 0.0),
    "relu6": (F.relu6, 0.0, 0.0),
    "leaky_relu": (F.leaky_relu, 0.0, 0.0),
    "leaky_relu 0.3": (lambda x: F.leaky_relu(x, 0.3), 0.0, 0.0),
    "rrelu": (F.rrelu, 0.0, 0.0),
    "prelu": (lambda x: F.prelu(x, SLOPES.to(x.dtype)), 0.0, 0.0),
    "abs": (torch.abs, 0.0, 0.0),
    "clamp": (lambda x: x.clamp(-0.5, 0.8), 0.0, 0.0),
    "clamp min": (lambda x: torch.clamp(x, min=0.2), 0.0, 0.0),
    "clamp far": (lambda x: torch.clamp(x, min=0.2, max=torch.finfo(x.dtype).max), 0.0, 0.0),
    "clamp_min": (lambda x: x.clamp_min(-0.3), 0.0, 0.0),
    "clamp_max": (lambda x: torch.clamp_max(x, 0.4), 0.0, 0.0),
    "hardtanh": (F.hardtanh, 0.0, 0.0),
    "hardtanh ±0.3": (lambda x: F.hardtanh(x, -0.3, 0.3), 0.0, 0.0),
    "hardsigmoid": (F.hardsigmoid, 0.0, 0.0),
    "square": (torch.square, 0.0, 0.0),
    "exp": (torch.exp, 0.0, 0.0),
    "pow 2": (lambda x: x**2, 0.0, 0.0),
    "pow 3": (lambda x: torch.pow(x, 3), 0.0, 0.0),
    "hardswish": (F.hardswish, 0.15, 0.15),
    "elu": (F.elu, 0.01, 0.01),
    "elu 0.5": (lambda x: F.elu(x, 0.5), 0.05, 0.05),
    "celu": (lambda x: F.celu(x, alpha=0.7), 0.01, 0.01),
    "selu": (F.selu, 0.05, 0.05),
    "gelu": (F.gelu, 0.01, 0.01),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), 0.01, 0.01),
    "silu": (F.silu, 0.01, 0.01),
    "mish": (F.mish, 0.01, 0.01),
    "tanh": (torch.tanh, 0.01, 0.01),
    "sigmoid": (torch.sigmoid, 0.01, 0.01),
    "logsigmoid": (F.logsigmoid, 0.01, 0.01),
    "softplus": (F.softplus, 0.01, 0.01),
    "softplus 2": (lambda x: F.softplus(x, beta=2), 0.01, 0.01),
    "softsign": (F.softsign, 0.03, 0.03),
    "tanhshrink": (F.tanhshrink, 0.01, 0.01),
    "erf": (torch.erf, 0.01, 0.01),
    "sin": (torch.sin, 0.01, 0.01),
    "cos": (torch.cos, 0.01, 0.01),
}
# Functions with a bounded domain use the slope at the mean; for inputs from about 2 to 4 with a std of 0.1.
ON_A_DOMAIN: dict[str, tuple[Function, float, float]] = {
    "log": (torch.log, 0.05, 0.01),
    "log1p": (torch.log1p, 0.05, 0.01),
    "sqrt": (torch.sqrt, 0.05, 0.01),
    "rsqrt": (torch.rsqrt, 0.08, 0.02),
    "reciprocal": (torch.reciprocal, 0.1, 0.02),
    "pow -1.5": (lambda x: x**-1.5, 0.12, 0.03),
    "pow 0.5": (lambda x: x.pow(0.5), 0.05, 0.01),
}
CENTERS = {"relu6": 6.0, "hardsigmoid": 3.0, "hardswish": -3.0}  # where they have a kink
ALL = {name: case[0] for name, case in (FUNCTIONS | ON_A_DOMAIN).items()}


def within(activations: Activations, value: lb.Moments) -> lb.Moments:
    value.within.activations = activations
    return value


def input_of(name: str, shape: tuple[int, ...] = (1, 3, 4), std: float = 0.5, **kwargs: Any) -> lb.Moments:
    value = gaussian(shape, std=0.1 if name in ON_A_DOMAIN else std, **kwargs)
    # Near the kinks, because rare events cannot be compared by sampling.
    value.loc = value.loc.abs() + 2 if name in ON_A_DOMAIN else 0.7 * value.loc.tanh() + CENTERS.get(name, 0.0)
    return value


@pytest.mark.parametrize("positions", [None, (2,)])
@pytest.mark.parametrize("name", ALL)
def test_mean_and_variance_equal_those_of_samples(name: str, positions: tuple[int, ...] | None) -> None:
    function, mean, std = (FUNCTIONS | ON_A_DOMAIN)[name]
    value = input_of(name, std=0.35 if positions else 0.5, positions=positions)  # the same total noise
    check(function, value, mean=mean, std=std, batched="prelu" not in name)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "clamp", "gelu", "tanh", "softplus", "sqrt"])
def test_common_noise_keeps_the_covariance_of_channels(name: str) -> None:
    value = input_of(name, (2, 3, 40), std=0.2, positions=(2,))
    result, outcomes = ALL[name](value), ALL[name](samples_of(value, 20_000))
    assert result.common.shape == (3, 2, 3, 1)
    means = outcomes.mean(3)[:, 0]
    own = torch.diag(result.independent.mean(2)[0] / 40)
    covariance = result.common[:, 0, :, 0].T @ result.common[:, 0, :, 0] + own
    true = torch.cov(means.T)
    assert (covariance - true).norm() < 0.06 * true.norm()


@pytest.mark.parametrize("name", ALL)
def test_taylor_is_the_delta_method(name: str) -> None:
    value = within("taylor", input_of(name))
    loc = value.loc.clone().requires_grad_()
    outcome = ALL[name](loc)
    (slope,) = torch.autograd.grad(outcome.sum(), loc)
    result = ALL[name](value)
    torch.testing.assert_close(result.loc, outcome.detach(), rtol=0, atol=0)
    torch.testing.assert_close(result.variance, slope.square() * value.variance, rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_the_mean_without_variance_is_exact(name: str, dtype: torch.dtype, activations: Activations) -> None:
    value = without_variance(within(activations, input_of(name, (4, 3, 50), positions=(2,), dtype=torch.float32)))
    value.loc = (2 * value.loc).to(dtype)
    result, plain = ALL[name](value), ALL[name](value.loc)
    assert torch.equal(result.loc, plain)
    assert result.dtype == plain.dtype
    assert result.variance.dtype == torch.float32
    assert (result.variance == 0).all()


@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("name", ALL)
def test_extreme_inputs_give_finite_moments_and_gradients(name: str, activations: Activations) -> None:
    means = [0.0, 1e-6, 0.5, -0.5, 3.0, -3.0, 50.0, -50.0, 1e4, -1e4]
    variances = [0.0, 1e-30, 1e-20, 1e-8, 1.0, 1e6]
    if name in ON_A_DOMAIN:
        means = [1e-4, 0.5, 50.0, 1e4]
    if name == "exp":
        means, variances = [0.0, 10.0, -10.0, -1e4], [0.0, 1e-30, 1e-8, 1.0]
    m, v = torch.cartesian_prod(torch.tensor(means), torch.tensor(variances)).T.unsqueeze(1).unbind(0)
    if name == "prelu":
        m, v = m.expand(3, -1).T.clone(), v.expand(3, -1).T.clone()
    m.requires_grad_()
    v.requires_grad_()
    result = ALL[name](lb.Moments(m, v, within=Pass(activations=activations)))
    for part in (result.loc, result.variance):
        assert part.isfinite().all()
        for grad in torch.autograd.grad(part.sum(), (m, v), retain_graph=True, allow_unused=True):
            assert grad is None or grad.isfinite().all()
    assert (result.variance >= 0).all()


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "clamp", "gelu", "mish", "exp", "sqrt"])
def test_gradients_match_finite_differences(name: str) -> None:
    value = input_of(name, (2, 3))

    def moments(loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        result = ALL[name](lb.Moments(loc, variance))
        return result.loc, result.variance

    assert torch.autograd.gradcheck(moments, (value.loc.requires_grad_(), value.independent.requires_grad_()))


@settings(max_examples=10)
@given(shapes)
def test_any_shape(shape: tuple[int, ...]) -> None:
    value = gaussian(shape)
    functions: list[Function] = [F.relu, F.gelu, torch.tanh, lambda x: x.clamp(-1, 1)]
    for function in functions:
        result = function(value)
        assert result.shape == result.variance.shape == shape


def test_relu_is_accurate_in_single_precision() -> None:
    ratio = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    for std in (1e-4, 1.0, 1e3):
        loc, variance = ratio * std, torch.full_like(ratio, std**2)
        coarse = F.relu(lb.Moments(loc.float(), variance.float()))
        fine = F.relu(lb.Moments(loc, variance))
        torch.testing.assert_close(coarse.loc.double(), fine.loc, rtol=2e-3, atol=0)
        torch.testing.assert_close(coarse.variance.double(), fine.variance, rtol=3e-2, atol=0)


def test_small_and_large_variances_of_a_smooth_function_are_accurate_in_single_precision() -> None:
    for std in (1e-6, 1e-4, 3e-4, 1e-3, 1e-2):
        loc = torch.linspace(-3, 3, 101, dtype=torch.float64)
        variance = torch.full_like(loc, std**2)
        for function in (F.sigmoid, F.gelu, F.softplus):
            coarse = function(lb.Moments(loc.float(), variance.float()))
            fine = function(lb.Moments(loc, variance))
            torch.testing.assert_close(coarse.stddev.double(), fine.stddev, rtol=3e-3, atol=3e-4 * std)


def test_all_names_of_a_function_are_equivalent() -> None:
    names = (
        "relu relu6 leaky_relu prelu elu selu celu gelu silu mish tanh sigmoid logsigmoid softplus hardtanh hardswish "
        "hardsigmoid exp log sqrt rsqrt square abs reciprocal erf sin cos"
    ).split()
    for name in names:
        extra = (torch.tensor([0.2]),) if name == "prelu" else ()
        results = []
        for owner in (torch, Tensor, F):
            for spelling in (name, f"{name}_"):
                if hasattr(owner, spelling):
                    value = gaussian((3, 4), dtype=torch.float32)
                    value.loc = value.loc.abs() + 1
                    bound = getattr(value, spelling) if owner is Tensor else partial(getattr(owner, spelling), value)
                    results.append(bound(*extra))
                    assert (results[-1] is value) == spelling.endswith("_"), spelling
        assert results, name
        for other in results[1:]:
            assert torch.equal(results[0].loc, other.loc)
            assert torch.equal(results[0].variance, other.variance)


@pytest.mark.parametrize("name", "relu relu6 leaky_relu elu selu celu silu mish hardtanh hardswish hardsigmoid".split())
def test_inplace_changes_the_value_itself(name: str) -> None:
    function, value = getattr(F, name), gaussian((3, 4))
    expected = function(value)
    assert function(value, inplace=True) is value
    assert torch.equal(value.loc, expected.loc)
    assert torch.equal(value.variance, expected.variance)


def test_noise_in_the_slopes_of_prelu() -> None:
    weight = lb.Moments(SLOPES, torch.tensor([0.01, 0.04, 0.02], dtype=torch.float64))
    value = gaussian((2, 3, 4))
    x, w = samples_of(value), samples_of(weight, seed=2)[:, None, :, None]
    result: Any = F.prelu(value, weight)
    assert_moments(result, torch.where(x > 0, x, w * x))
    result = F.prelu(value.loc, weight)
    assert_moments(result, torch.where(value.loc > 0, value.loc, w * value.loc))


def test_other_random_arguments_raise_an_error() -> None:
    value: Any = gaussian((3,))
    with pytest.raises(UnsupportedOperation, match="random exponent"):
        torch.pow(value.loc, value)
    with pytest.raises(UnsupportedOperation, match="clamp with a random argument"):
        torch.clamp(value, min=value)
    with pytest.raises(UnsupportedOperation, match="training"):
        F.rrelu(value, training=True)


DROPOUTS: list[Any] = [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout]


@pytest.mark.parametrize("function", DROPOUTS)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_masks_equal_those_of_torch(function: Any, p: float) -> None:
    dims = {F.dropout1d: 3, F.dropout3d: 5}.get(function, 4)
    value = gaussian((2, 6, 3, 2, 2)[:dims], positions=tuple(range(2, dims)), dtype=torch.float32)
    torch.manual_seed(3)
    result = function(value, p=p, training=True)
    torch.manual_seed(3)
    loc = value.loc.clone().requires_grad_()
    plain = function(loc, p=p, training=True)
    (mask,) = torch.autograd.grad(plain.sum(), loc)
    torch.testing.assert_close(result.loc, plain.detach())
    if function in (F.dropout2d, F.dropout1d, F.dropout3d):  # whole channels are dropped
        torch.testing.assert_close(result.variance, mask.square() * value.variance)
    alone: Any = lb.Moments(value.loc, value.independent)
    torch.manual_seed(3)
    torch.testing.assert_close(function(alone, p=p, training=True).variance, mask.square() * value.independent)


@pytest.mark.parametrize("function", DROPOUTS)
def test_dropout_is_the_identity_in_evaluation_mode(function: Any) -> None:
    value = gaussian((2, 6, 3, 3))
    for result in (function(value, training=False), function(value, p=0.0, training=True)):
        assert torch.equal(result.loc, value.loc)
        assert torch.equal(result.variance, value.variance)


@pytest.mark.parametrize("function", [torch.dropout, torch.feature_dropout, torch.alpha_dropout])
def test_dropout_functions_of_the_torch_namespace(function: Any) -> None:
    value = gaussian((2, 6, 3), dtype=torch.float32)
    torch.manual_seed(3)
    result = function(value, p=0.3, train=True)
    torch.manual_seed(3)
    torch.testing.assert_close(result.loc, function(value.loc, p=0.3, train=True))
    assert torch.equal(function(value, p=0.3, train=False).variance, value.variance)


@pytest.mark.parametrize("name", ["relu", "gelu", "clamp", "prelu", "pow 3", "sigmoid", "hardswish", "hardsigmoid"])
def test_compiled_equals_eager(name: str) -> None:
    value = gaussian((2, 3, 5), positions=(2,), dtype=torch.float32)
    shared = common_pass()

    def moments(loc: Tensor, variance: Tensor, common: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = ALL[name](lb.Moments(loc, variance, common, within=shared))
        return result.loc, result.independent, result.common

    parts: Any = value.loc, value.independent, value.common
    compiled = torch.compile(moments, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*parts), moments(*parts))


@pytest.mark.parametrize("shared", [False, True], ids=["own variances", "one variance"])
@pytest.mark.parametrize("function", [F.relu, F.gelu, torch.square, lambda x: x.clamp(-0.5, 0.5)])
def test_large_values_are_computed_in_pieces(function: Function, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(7, 5, 4, generator=generator)
    variance = torch.rand(1 if shared else 7, 5, 1, generator=generator).expand(7, 5, 4)
    with torch.no_grad():
        whole = function(lb.Moments(loc, variance))
        monkeypatch.setattr(exact_moments, "_LARGE", 1)
        monkeypatch.setattr(exact_moments, "_PIECE", 40)  # two examples at a time, and one at the end
        pieces = function(lb.Moments(loc, variance))
    torch.testing.assert_close(pieces.loc, whole.loc)
    torch.testing.assert_close(pieces.variance, whole.variance)
