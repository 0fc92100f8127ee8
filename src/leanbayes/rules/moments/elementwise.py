"""Activations and other elementwise functions of one Gaussian value.

Let f be the function, f' its slope, and m, v the mean and variance. With "taylor" the result has the mean f(m) and the
variance f'(m)²·v. With "exact" it has the mean and variance of f(x) for x ~ N(m, v) (`exact_moments`). Common noise is
multiplied by the mean slope.

The calls of `_elementwise` list each function with its settings, slope and exact moments.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leanbayes.core import noise
from leanbayes.rules.moments.exact_moments import (
    Exact,
    Function,
    clamp_moments,
    exp_moments,
    gelu_moments,
    hardsigmoid_moments,
    in_pieces,
    leaky_relu_moments,
    quadrature,
    relu_moments,
    square_moments,
)
from leanbayes.rules.moments.fused_activations import averaged_positions, by_one_kernel
from leanbayes.rules.moments.registry import moment_rule, named, unsupported
from leanbayes.rules.moments.value import Moments, shrunk, variance_dtype

_FLOOR = 1e-12  # distance to arguments with an infinite slope, such as 0 for √


def _propagate(
    x: Moments, function: Function, slope: Function, exact: Callable[..., Exact] | None, settings: dict[str, Any]
) -> Moments:
    m = x.loc.to(variance_dtype(x.loc.dtype))
    if exact is None or x.within.activations != "exact":
        return x.follow(function(x.loc, **settings), slope(m, **settings))
    fused = by_one_kernel(x, function, settings)
    if fused is not None:
        return fused
    if torch.compiler.is_compiling() or noise.in_transform():
        moments = exact(m, shrunk(x.variance), **settings)
    elif torch.is_grad_enabled():
        # Recompute in the backward pass: to store all intermediate results takes many times the memory.
        moments = checkpoint(exact, m, shrunk(x.variance), use_reentrant=False, preserve_rng_state=False, **settings)
    else:
        moments = in_pieces(exact, m, x.variance_of, averaged_positions(x), settings)
    if moments.is_mean:
        return x.follow(moments.excess.to(x.dtype), moments.slope, moments.variance)
    plain = function(x.loc, **settings)
    return x.follow((plain + moments.excess).to(plain.dtype), moments.slope, moments.variance)


def _elementwise(
    names: str,
    function: Function,
    slope: Function,
    exact: Callable[..., Exact] | None = None,
    settings: str = "",
    at_mean: bool = False,
) -> None:
    """Register a function under its names, also in place (with _).

    Args:
        names: The names of the function, separated by spaces.
        function: The function.
        slope: Its derivative.
        exact: Its exact moments; by quadrature if None.
        settings: The names of its parameters after the first one, separated by spaces.
        at_mean: Whether to linearize it at the mean.
    """
    order = settings.split()
    moments = None if at_mean else exact or partial(quadrature, function)

    def rule(input: Moments, *args: Any, **kwargs: Any) -> Moments:
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        if any(isinstance(value, Moments) for value in (*args, *kwargs.values())):
            raise unsupported(f"{names.split()[0]} with a random argument other than its input")
        inplace = given.pop("inplace", False)
        result = _propagate(input, function, slope, moments, given)
        return input.assign(result) if inplace else result

    def rule_in_place(input: Moments, *args: Any, **kwargs: Any) -> Moments:
        return input.assign(rule(input, *args, **kwargs))

    modules = (torch, Tensor, F, torch.special)
    moment_rule(*named(*names.split(), modules=modules))(rule)
    moment_rule(*named(*(f"{name}_" for name in names.split()), modules=modules))(rule_in_place)


# -- slopes -----------------------------------------------------------------------------------------------------------


def _inside(m: Tensor, min: Any = None, max: Any = None) -> Tensor:
    inside = torch.ones_like(m, dtype=torch.bool)
    if min is not None:
        inside = inside & (m >= min)
    if max is not None:
        inside = inside & (m <= max)
    return inside.to(m.dtype)


def _normal_density(m: Tensor) -> Tensor:
    return torch.exp(-0.5 * m * m) / math.sqrt(2 * math.pi)


def _gelu_slope(m: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return torch.special.ndtr(m) + m * _normal_density(m)
    outer, inner = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(outer * (m + inner * m**3))
    return 0.5 * (1 + t) + 0.5 * m * (1 - t * t) * outer * (1 + 3 * inner * m * m)


def _silu_slope(m: Tensor) -> Tensor:
    sigmoid = m.sigmoid()
    return sigmoid * (1 + m * (1 - sigmoid))


def _mish_slope(m: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(m))
    return t + m * m.sigmoid() * (1 - t * t)


def _sigmoid_slope(m: Tensor) -> Tensor:
    return m.sigmoid() * (-m).sigmoid()


def _selu_slope(m: Tensor) -> Tensor:
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * torch.where(m > 0, 1.0, alpha * m.clamp_max(0).exp())


def _off_zero(m: Tensor) -> Tensor:
    return torch.where(m.abs() < _FLOOR, _FLOOR, m)


# -- the table --------------------------------------------------------------------------------------------------------

# torch.compile dispatches only functions in this list of torch, which lacks two that support dispatch.
_LISTED = torch.overrides.get_overridable_functions()[F]
_LISTED += [function for function in (F.hardsigmoid, F.hardswish) if function not in _LISTED]

_elementwise("relu", F.relu, lambda m: (m > 0).to(m.dtype), relu_moments, "inplace")
_elementwise("relu6", F.relu6, lambda m: _inside(m, 0, 6), lambda m, v: clamp_moments(m, v, 0.0, 6.0), "inplace")
_elementwise(
    "leaky_relu",
    F.leaky_relu,
    lambda m, negative_slope=0.01: torch.where(m > 0, torch.ones_like(m), negative_slope),
    leaky_relu_moments,
    "negative_slope inplace",
)
_elementwise("abs absolute __abs__", torch.abs, torch.sign, lambda m, v: leaky_relu_moments(m, v, -1.0))
_elementwise("clamp clip", torch.clamp, _inside, clamp_moments, "min max")
_elementwise("clamp_min", torch.clamp_min, _inside, clamp_moments, "min")
_elementwise(
    "clamp_max",
    torch.clamp_max,
    lambda m, max: _inside(m, None, max),
    lambda m, v, max: clamp_moments(m, v, None, max),
    "max",
)
_elementwise(
    "hardtanh",
    F.hardtanh,
    lambda m, min_val=-1.0, max_val=1.0: _inside(m, min_val, max_val),
    lambda m, v, min_val=-1.0, max_val=1.0: clamp_moments(m, v, min_val, max_val),
    "min_val max_val inplace",
)
_elementwise("hardsigmoid", F.hardsigmoid, lambda m: _inside(m, -3, 3) / 6, hardsigmoid_moments, "inplace")
_elementwise("hardswish", F.hardswish, lambda m: torch.where(m < 3, (m >= -3) * (m / 3 + 0.5), 1.0), settings="inplace")
_elementwise(
    "elu", F.elu, lambda m, alpha=1.0: torch.where(m > 0, 1.0, alpha * m.clamp_max(0).exp()), settings="alpha inplace"
)
_elementwise("celu", F.celu, lambda m, alpha=1.0: (m / alpha).clamp_max(0).exp(), settings="alpha inplace")
_elementwise("selu", F.selu, _selu_slope, settings="inplace")
_elementwise("gelu", F.gelu, _gelu_slope, gelu_moments, "approximate")
_elementwise("silu", F.silu, _silu_slope, settings="inplace")
_elementwise("mish", F.mish, _mish_slope, settings="inplace")
_elementwise("tanh", torch.tanh, lambda m: 1 - torch.tanh(m).square())
_elementwise("sigmoid expit", torch.sigmoid, _sigmoid_slope)
_elementwise("logsigmoid", F.logsigmoid, lambda m: (-m).sigmoid())
_elementwise("softplus", F.softplus, lambda m, beta=1, threshold=20: (beta * m).sigmoid(), settings="beta threshold")
_elementwise("softsign", F.softsign, lambda m: (1 + m.abs()).square().reciprocal())
_elementwise("tanhshrink", F.tanhshrink, lambda m: torch.tanh(m).square())
_elementwise("erf", torch.erf, lambda m: 2 / math.sqrt(math.pi) * torch.exp(-m * m))
_elementwise("sin", torch.sin, torch.cos)
_elementwise("cos", torch.cos, lambda m: -torch.sin(m))
_elementwise("exp", torch.exp, torch.exp, exp_moments)
_elementwise("square", torch.square, lambda m: 2 * m, square_moments)
# The domain of these functions is bounded, or they have a pole, so they are linearized at the mean.
_elementwise("log", torch.log, lambda m: m.clamp_min(_FLOOR).reciprocal(), at_mean=True)
_elementwise("log1p", torch.log1p, lambda m: (1 + m).clamp_min(_FLOOR).reciprocal(), at_mean=True)
_elementwise("sqrt", torch.sqrt, lambda m: 0.5 * m.clamp_min(_FLOOR).rsqrt(), at_mean=True)
_elementwise("rsqrt", torch.rsqrt, lambda m: -0.5 * m.clamp_min(_FLOOR).pow(-1.5), at_mean=True)
_elementwise("reciprocal", torch.reciprocal, lambda m: -_off_zero(m).pow(-2), at_mean=True)


def _pow_slope(m: Tensor, exponent: Any) -> Tensor:
    return exponent * _off_zero(m).pow(exponent - 1)


@moment_rule(torch.pow, Tensor.pow, Tensor.__pow__)
def power(input: Moments, exponent: Any) -> Moments:
    """Raise x to a constant power: exact for positive integer exponents, else linearized at the mean."""
    if not isinstance(input, Moments) or isinstance(exponent, Moments):
        raise unsupported("torch.pow with a random exponent")
    if not isinstance(exponent, Tensor) and exponent == 2:
        exact: Any = lambda m, v, exponent: square_moments(m, v)  # noqa: E731
    elif not isinstance(exponent, Tensor) and exponent == int(exponent) and exponent > 0:
        exact = partial(quadrature, torch.pow)
    else:
        exact = None
    return _propagate(input, torch.pow, _pow_slope, exact, {"exponent": exponent})


@moment_rule(Tensor.pow_)
def _power_in_place(input: Moments, exponent: Any) -> Moments:
    return input.assign(power(input, exponent))


@moment_rule(*named("prelu"))
def prelu(input: Moments | Tensor, weight: Moments | Tensor) -> Moments:
    """Compute leaky ReLU with one slope per channel; noise in the slope adds its variance times E min(x, 0)²."""
    if not isinstance(input, Moments):
        assert isinstance(weight, Moments)
        input = weight.like(input, torch.zeros_like(input, dtype=variance_dtype(input.dtype)))
    channel_first = (-1, *[1] * max(input.dim() - 2, 0))
    loc = weight.loc if isinstance(weight, Moments) else weight
    slopes = loc.to(variance_dtype(loc.dtype)).reshape(channel_first)

    def function(m: Tensor) -> Tensor:
        return F.prelu(m, loc.to(m.dtype))

    def slope(m: Tensor) -> Tensor:
        return torch.where(m > 0, 1.0, slopes)

    result = _propagate(input, function, slope, partial(leaky_relu_moments, negative_slope=slopes), {})
    if not isinstance(weight, Moments):
        return result
    m = input.loc.to(variance_dtype(input.loc.dtype))
    square = m.clamp_max(0).square()
    if input.within.activations == "exact":
        kink = relu_moments(-m, input.variance)
        square = (F.relu(-m) + kink.excess).square() + kink.variance
    # The positions share this noise, but x differs between them, so it is treated as independent.
    total = result.variance + weight.variance.reshape(channel_first) * square
    return result.like_total(result.loc, total, result.common, result.grid)


@moment_rule(*named("rrelu"))
def rrelu(
    input: Moments, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Moments:
    """Compute leaky ReLU with the mean slope, as in evaluation mode."""
    if training:
        raise unsupported("F.rrelu in training mode")
    return cast(Moments, F.leaky_relu(cast(Tensor, input), (lower + upper) / 2, inplace))
