"""Activations and other elementwise functions of one Gaussian value.

Write f for the function, f' for its slope, and m, v for mean and variance. Under "taylor" the result has the mean f(m)
and the variance f'(m)²·v. Under "exact" it has those of f(x) for x ~ N(m, v): in closed form where there is one, else
by a quadrature. The mean slope, which noise in common takes, is E f'(x) = Cov(f(x), x)/v (Stein).

`_elementwise` at the end of the file is the table: each function with its settings, its slope and its exact moments.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leanbayes.rules.moments.registry import moment_rule, named, unsupported
from leanbayes.rules.moments.value import Moments, shrunk, variance_dtype


class Exact(NamedTuple):
    """What a function makes of N(m, v): the excess E f(x) - f(m), the mean slope, and the variance."""

    excess: Tensor
    slope: Tensor
    variance: Tensor


Function = Callable[..., Tensor]

# Gauss-Hermite with 7 nodes, for the density exp(-x²/2)/√(2π): the positive nodes and their weights. The node at 0 has
# no share in sums of differences from f(m).
_NODES = (
    (1.1544053947399682, 0.24012317860501265),
    (2.366759410734541, 0.030757123967586487),
    (3.750439717725742, 0.0005482688559722181),
)
# Φ(-b)/exp(-b²/2) for b ≥ 0 as a polynomial in t = 1/(1 + 0.325·b), from t on: a fit within 7e-7 of it everywhere.
_TAIL = (
    0.129656152,
    0.129672143,
    0.115503139,
    0.093520543,
    0.026033829,
    0.085327419,
    -0.113534019,
    0.033821061,
)
_TINY = 1e-20  # variances below it count as this in quotients: 1/√ of it has a finite cube in single precision
_FAR = 1e15  # bounds farther away count as this far: beyond any reach, and finite in products
_FLOOR = 1e-12  # arguments that a slope is not finite at, such as √ at 0, keep this distance


def _tail(b: Tensor, bell: Tensor) -> Tensor:
    """Φ(-b) for b ≥ 0, where `bell` = exp(-b²/2) is known: in single precision far cheaper than erfc."""
    if b.dtype == torch.float64:
        return 0.5 * torch.erfc(math.sqrt(0.5) * b)
    t = 1 / (1 + 0.325 * b)
    polynomial = torch.full_like(t, _TAIL[-1])
    for coefficient in _TAIL[-2::-1]:
        polynomial = polynomial * t + coefficient
    return bell * polynomial * t


def _kink(m: Tensor, v: Tensor) -> Exact:
    """Moments of relu(x): with b = |m|/√v and h = φ(b) - bΦ(-b), the variance is v·(slope - h(h + b)).

    That is E x₊² - (E x₊)² with all large numbers taken out, and far below 0 each term vanishes by itself.
    """
    scale = v.clamp_min(_TINY).rsqrt()
    a = m * scale
    b = a.abs()
    bell = torch.exp(-0.5 * a * a)
    tail = _tail(b, bell)
    h = (bell * (1 / math.sqrt(2 * math.pi)) - b * tail).clamp_min(0)
    slope = torch.where(a > 0, 1 - tail, tail)
    return Exact(v * scale * h, slope, v * (slope - h * (h + b)).clamp_min(0))


def _leaky(m: Tensor, v: Tensor, negative_slope: Tensor | float = 0.01) -> Exact:
    """Moments of n·x + (1-n)·relu(x); the covariance of its two terms is n(1-n)·v·slope."""
    kink, rest = _kink(m, v), 1 - negative_slope
    variance = negative_slope**2 * v + rest**2 * kink.variance + 2 * negative_slope * rest * v * kink.slope
    return Exact(rest * kink.excess, negative_slope + rest * kink.slope, variance.clamp_min(0))


def _clamp(m: Tensor, v: Tensor, min: Any = None, max: Any = None) -> Exact:
    """Moments of y = lo + relu(x - lo) - relu(x - hi): the variance is Var₁ - Var₂ - 2E₂(hi - E y).

    Seen from the nearer bound, so that E₂ and Var₂ are the lesser ones and little cancels.
    """
    if max is None:
        return _kink(m - min, v)
    if min is None:
        kink = _kink(max - m, v)
        return Exact(-kink.excess, kink.slope, kink.variance)
    up, down = m - min, max - m
    reach, half = torch.maximum(up, down).clamp_max(_FAR), (0.5 * up + 0.5 * down).clamp_max(_FAR)
    near, far = _kink(torch.minimum(up, down), v), _kink(-reach, v)
    excess = near.excess - far.excess
    variance = near.variance - far.variance - 2 * far.excess * (torch.minimum(reach, 2 * half) - excess)
    variance = torch.minimum(variance.clamp_min(0), half * half)  # no variable between the bounds has more
    return Exact(torch.where(up < down, excess, -excess), near.slope - far.slope, variance)


def _hardsigmoid(m: Tensor, v: Tensor) -> Exact:
    excess, slope, variance = _clamp(m, v, -3.0, 3.0)
    return Exact(excess / 6, slope / 6, variance / 36)


def _square(m: Tensor, v: Tensor) -> Exact:
    return Exact(v, 2 * m, 4 * m * m * v + 2 * v * v)


def _exp(m: Tensor, v: Tensor) -> Exact:
    centre, growth = m.exp(), (0.5 * v).exp()
    slope = centre * growth
    return Exact(centre * torch.expm1(0.5 * v), slope, torch.where(v > 0, slope * slope * torch.expm1(v), v))


def _quadrature(function: Function, slope: Function, m: Tensor, v: Tensor, **settings: Any) -> Exact:
    """Moments by 7 nodes: sums of d = f(m + √v·x) - f(m), of d·x/√v and of d², with the weights of the nodes x.

    Where √v is so small that differences would be rounding errors, the function is straight: it has its slope at m.
    """
    straight = v < 1e-8 * m * m + 1e-7
    std = torch.where(straight, 1.0, v).sqrt()
    centre = function(m, **settings)
    mean = tilt = second = torch.zeros_like(m)
    for node, weight in _NODES:
        above = function(m + node * std, **settings) - centre
        under = function(m - node * std, **settings) - centre
        mean = mean + weight * (above + under)
        tilt = tilt + weight * node * (above - under)
        second = second + weight * (above * above + under * under)
    local = slope(m, **settings)
    variance = torch.where(straight, local * local * v, (second - mean * mean).clamp_min(0))
    return Exact(torch.where(straight, 0.0, mean), torch.where(straight, local, tilt / std), variance)


def _propagate(
    x: Moments, function: Function, slope: Function, exact: Callable[..., Exact] | None, settings: dict[str, Any]
) -> Moments:
    plain = function(x.loc, **settings)
    m = x.loc.to(variance_dtype(x.loc.dtype))
    if exact is None or x.within.activations == "taylor":
        return x.follow(plain, slope(m, **settings))
    v = shrunk(x.variance)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # Made again in the backward pass: keeping all that a formula computes takes many times the memory.
        moments = checkpoint(exact, m, v, use_reentrant=False, preserve_rng_state=False, **settings)
    else:
        moments = exact(m, v, **settings)
    return x.follow((plain + moments.excess).to(plain.dtype), moments.slope, moments.variance)


def _elementwise(
    names: str,
    function: Function,
    slope: Function,
    exact: Callable[..., Exact] | None = None,
    settings: str = "",
    at_mean: bool = False,
) -> None:
    """Register a function by its names, also with _ (in place); `settings` names its arguments after the first.

    Its exact moments are found by quadrature unless `exact` has them; with `at_mean` it is taken as straight.
    """
    order = settings.split()
    moments = None if at_mean else exact or partial(_quadrature, function, slope)

    def rule(input: Moments, *args: Any, **kwargs: Any) -> Moments:
        chosen = {**dict(zip(order, args, strict=False)), **kwargs}
        if any(isinstance(value, Moments) for value in (*args, *kwargs.values())):
            raise unsupported(f"{names.split()[0]} with a random argument beside its input")
        inplace = chosen.pop("inplace", False)
        result = _propagate(input, function, slope, moments, chosen)
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

# torch.compile calls the rules of functions that torch lists here only, and torch forgets two that do ask for a rule.
_LISTED = torch.overrides.get_overridable_functions()[F]
_LISTED += [function for function in (F.hardsigmoid, F.hardswish) if function not in _LISTED]

_elementwise("relu", F.relu, lambda m: (m > 0).to(m.dtype), _kink, "inplace")
_elementwise("relu6", F.relu6, lambda m: _inside(m, 0, 6), lambda m, v: _clamp(m, v, 0.0, 6.0), "inplace")
_elementwise(
    "leaky_relu",
    F.leaky_relu,
    lambda m, negative_slope=0.01: torch.where(m > 0, torch.ones_like(m), negative_slope),
    _leaky,
    "negative_slope inplace",
)
_elementwise("abs absolute __abs__", torch.abs, torch.sign, lambda m, v: _leaky(m, v, -1.0))
_elementwise("clamp clip", torch.clamp, _inside, _clamp, "min max")
_elementwise("clamp_min", torch.clamp_min, _inside, _clamp, "min")
_elementwise(
    "clamp_max", torch.clamp_max, lambda m, max: _inside(m, None, max), lambda m, v, max: _clamp(m, v, None, max), "max"
)
_elementwise(
    "hardtanh",
    F.hardtanh,
    lambda m, min_val=-1.0, max_val=1.0: _inside(m, min_val, max_val),
    lambda m, v, min_val=-1.0, max_val=1.0: _clamp(m, v, min_val, max_val),
    "min_val max_val inplace",
)
_elementwise("hardsigmoid", F.hardsigmoid, lambda m: _inside(m, -3, 3) / 6, _hardsigmoid, "inplace")
_elementwise("hardswish", F.hardswish, lambda m: torch.where(m < 3, (m >= -3) * (m / 3 + 0.5), 1.0), settings="inplace")
_elementwise(
    "elu", F.elu, lambda m, alpha=1.0: torch.where(m > 0, 1.0, alpha * m.clamp_max(0).exp()), settings="alpha inplace"
)
_elementwise("celu", F.celu, lambda m, alpha=1.0: (m / alpha).clamp_max(0).exp(), settings="alpha inplace")
_elementwise("selu", F.selu, _selu_slope, settings="inplace")
_elementwise("gelu", F.gelu, _gelu_slope, settings="approximate")
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
_elementwise("exp", torch.exp, torch.exp, _exp)
_elementwise("square", torch.square, lambda m: 2 * m, _square)
# A Gaussian reaches beyond the domain of these, or to a pole: only their slopes at the mean make sense.
_elementwise("log", torch.log, lambda m: m.clamp_min(_FLOOR).reciprocal(), at_mean=True)
_elementwise("log1p", torch.log1p, lambda m: (1 + m).clamp_min(_FLOOR).reciprocal(), at_mean=True)
_elementwise("sqrt", torch.sqrt, lambda m: 0.5 * m.clamp_min(_FLOOR).rsqrt(), at_mean=True)
_elementwise("rsqrt", torch.rsqrt, lambda m: -0.5 * m.clamp_min(_FLOOR).pow(-1.5), at_mean=True)
_elementwise("reciprocal", torch.reciprocal, lambda m: -_off_zero(m).pow(-2), at_mean=True)


def _pow_slope(m: Tensor, exponent: Any) -> Tensor:
    return exponent * _off_zero(m).pow(exponent - 1)


@moment_rule(torch.pow, Tensor.pow, Tensor.__pow__)
def power(input: Moments, exponent: Any) -> Moments:
    """x to a constant power: by the slope at the mean, but for whole positive exponents, which have no pole."""
    if not isinstance(input, Moments) or isinstance(exponent, Moments):
        raise unsupported("torch.pow with a random exponent")
    if not isinstance(exponent, Tensor) and exponent == 2:
        exact: Any = lambda m, v, exponent: _square(m, v)  # noqa: E731
    elif not isinstance(exponent, Tensor) and exponent == int(exponent) and exponent > 0:
        exact = partial(_quadrature, torch.pow, _pow_slope)
    else:
        exact = None
    return _propagate(input, torch.pow, _pow_slope, exact, {"exponent": exponent})


@moment_rule(Tensor.pow_)
def _power_in_place(input: Moments, exponent: Any) -> Moments:
    return input.assign(power(input, exponent))


@moment_rule(*named("prelu"))
def prelu(input: Moments | Tensor, weight: Moments | Tensor) -> Moments:
    """Leaky ReLU with a slope for each channel; noise of the slope adds its variance times E min(x, 0)²."""
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

    result = _propagate(input, function, slope, partial(_leaky, negative_slope=slopes), {})
    if not isinstance(weight, Moments):
        return result
    m = input.loc.to(variance_dtype(input.loc.dtype))
    square = m.clamp_max(0).square()
    if input.within.activations == "exact":
        kink = _kink(-m, input.variance)
        square = (F.relu(-m) + kink.excess).square() + kink.variance
    # The positions share this noise, but x differs between them: it is kept as noise of their own.
    total = result.variance + weight.variance.reshape(channel_first) * square
    return result.like_total(result.loc, total, result.common, result.grid)


@moment_rule(*named("rrelu"))
def rrelu(
    input: Moments, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Moments:
    """Leaky ReLU with the mean of the slopes, as in evaluation mode."""
    if training:
        raise unsupported("F.rrelu in training mode")
    return cast(Moments, F.leaky_relu(cast(Tensor, input), (lower + upper) / 2, inplace))


# -- dropout ----------------------------------------------------------------------------------------------------------

_DROPOUTS = named("dropout", "dropout_", "feature_dropout", "feature_dropout_", "dropout1d", "dropout2d", "dropout3d")
_ALPHA_DROPOUTS = named("alpha_dropout", "feature_alpha_dropout", "alpha_dropout_", "feature_alpha_dropout_")


def _drawn(function: Function, p: float, like: Tensor) -> tuple[Tensor, Tensor | float]:
    """Let the function draw its mask, and return factor and constant of the x ↦ factor·x + constant that it then is."""
    ones = function(torch.ones_like(like), p, True)
    if function not in _ALPHA_DROPOUTS:
        return ones, 0.0
    # Alpha dropout is a·k·x + a·α·(k - 1 + p) with a mask k: where x = 1 was kept, the result is above a·α·p.
    alpha = 1.7580993408473766
    a = ((1 - p) * (1 + p * alpha**2)) ** -0.5 if p < 1 else 0.0
    factor = torch.where(ones > a * alpha * p, a, 0.0).to(ones.dtype)
    return factor, ones - factor


def _register_dropout(function: Function) -> None:
    by_default, in_place = function not in _ALPHA_DROPOUTS, function.__name__.endswith("_")

    def rule(
        input: Moments,
        p: float = 0.5,
        training: bool = by_default,
        inplace: bool = in_place,
        *,
        train: bool | None = None,  # as functions of torch itself call it
    ) -> Moments:
        if not (training if train is None else train) or p == 0:
            return input
        factor, constant = _drawn(function, p, input.loc)
        loc = input.loc * factor + constant
        result = input.follow(loc, factor.to(variance_dtype(loc.dtype)))
        return input.assign(result) if inplace else result

    moment_rule(function)(rule)


for _function in (*_DROPOUTS, *_ALPHA_DROPOUTS):
    _register_dropout(_function)
