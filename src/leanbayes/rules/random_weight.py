"""Random weights as tensor-like values: layers call torch functions on them, and the rule computes the results.

A `RandomWeight` has a mean and a noise part. Functions that only move elements (`moving.py`) are applied to both.
Functions that are linear in the weight (registered by `linear_in_weight`) are computed by `apply`. Every other function
raises an error that names it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core.noise import NoiseSource
from leanbayes.core.tensor_like import TensorLike, one_line
from leanbayes.errors import UnsupportedOperation
from leanbayes.rules.moving import MOVING, copies_in
from leanbayes.rules.multi_head_attention import multi_head_attention_forward


@dataclass(frozen=True)
class LinearForm:
    """How a function that is linear in its weight names its arguments."""

    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    weight: str
    bias: str | None
    channel_dim: int


@dataclass(frozen=True)
class LinearUse:
    """The arguments of a call of a function that is linear in its weight, so that a rule can call it again."""

    arguments: dict[str, Any]
    form: LinearForm

    @property
    def inputs(self) -> list[Tensor]:
        """The arguments that multiply the weight; none for a lookup such as an embedding."""
        return [self.arguments[name] for name in self.form.inputs]

    def call(self, function: Callable[..., Tensor], inputs: Iterable[Tensor], weight: Tensor, bias: bool) -> Tensor:
        """Call a function with other inputs and another weight, with or without the bias."""
        arguments: dict[str, Any] = {
            **self.arguments,
            self.form.weight: weight,
            **dict(zip(self.form.inputs, inputs, strict=True)),
        }
        if not bias and self.form.bias == "input":  # addmm needs its first argument
            arguments["beta"] = 0
        elif not bias and self.form.bias in arguments:
            arguments[self.form.bias] = None
        leading = []  # some functions accept their first arguments by position only
        for name in self.form.parameters:
            if name not in arguments:
                break
            leading.append(arguments.pop(name))
        return function(*leading, **arguments)


_FORMS: dict[Callable[..., Any], LinearForm] = {}


def linear_in_weight(
    function: Callable[..., Any],
    parameters: str,
    *,
    inputs: str = "input",
    weight: str = "weight",
    bias: str | None = "bias",
    channel_dim: int = -1,
) -> None:
    """Register a function that is linear in its weight for the rules `local`, `flipout` and `moments`.

    Each output must be a sum of inputs times weights, with each weight at most once.

    Args:
        function: The function. It must support `torch.overrides.handle_torch_function`, as functions of torch do.
        parameters: The names of its parameters in order, separated by spaces.
        inputs: The names of the parameters that multiply the weight, separated by spaces.
        weight: The name of the weight.
        bias: The name of the bias, or None if there is none.
        channel_dim: The dimension of the channels of an input and of the output, a negative number.

    Example:
        >>> def twice(x, weight):
        ...     if torch.overrides.has_torch_function((x, weight)):
        ...         return torch.overrides.handle_torch_function(twice, (x, weight), x, weight)
        ...     return 2 * F.linear(x, weight)
        >>> leanbayes.rules.linear_in_weight(twice, "x weight", inputs="x", bias=None)
    """
    names = tuple(parameters.split())
    _FORMS[function] = LinearForm(names, tuple(inputs.split()), weight, bias, channel_dim)


def form_of(function: Callable[..., Any]) -> LinearForm:
    """Return how a function that is registered by `linear_in_weight` uses its weight."""
    return _FORMS[function]


def is_linear_in_weight(function: Callable[..., Any]) -> bool:
    """Whether a function is registered by `linear_in_weight`."""
    return function in _FORMS


_CONV = "input weight bias stride padding dilation groups"
_CONV_TRANSPOSE = "input weight bias stride padding output_padding groups dilation"
linear_in_weight(F.linear, "input weight bias")
linear_in_weight(F.bilinear, "input1 input2 weight bias", inputs="input1 input2")
for _dims in (1, 2, 3):
    linear_in_weight(getattr(F, f"conv{_dims}d"), _CONV, channel_dim=-1 - _dims)
    linear_in_weight(getattr(F, f"conv_transpose{_dims}d"), _CONV_TRANSPOSE, channel_dim=-1 - _dims)
for _matmul in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__):
    linear_in_weight(_matmul, "input other", weight="other", bias=None)
for _addmm in (torch.addmm, Tensor.addmm):
    linear_in_weight(_addmm, "input mat1 mat2", inputs="mat1", weight="mat2", bias="input")
linear_in_weight(
    F.embedding, "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse", inputs="", bias=None
)

_MULTIPLY = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_DIVIDE = {torch.div, Tensor.div, Tensor.__truediv__}


def _name(function: Callable[..., Any]) -> str:
    return torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))


def _random_weights(values: Iterable[Any]) -> Iterator["RandomWeight"]:
    for value in values:
        if isinstance(value, RandomWeight):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _random_weights(value)


def restart_noise(values: Iterable[Any]) -> None:
    """Restart the noise source that all random weights of a network share."""
    first = next(_random_weights(values), None)
    if first is not None:
        first.noise.restart()


def noise_position(values: Iterable[Any]) -> int:
    """Return how many noise streams the random weights of a network have used so far."""
    first = next(_random_weights(values), None)
    return 0 if first is None else first.noise.streams


def move_noise(values: Iterable[Any], position: int) -> None:
    """Continue with the noise stream after `position`."""
    first = next(_random_weights(values), None)
    if first is not None:
        first.noise.streams = position


class RandomWeight(TensorLike):
    """A weight with a mean `loc` and a noise part, in place of a layer's tensor.

    Subclasses define the noise part: a variance, or a perturbation.
    """

    rule: ClassVar[str]

    def __init__(self, loc: Tensor, noise_part: Tensor, noise: NoiseSource, name: str) -> None:
        self.loc, self.noise_part, self.noise, self.name = loc, noise_part, noise, name

    def apply(self, function: Callable[..., Tensor], use: LinearUse) -> Tensor:
        """Compute a function that is linear in this weight."""
        raise NotImplementedError  # abstract

    def scaled(self, factor: Tensor | float) -> Self:
        """Multiply by a constant."""
        raise NotImplementedError  # abstract

    def like(self, loc: Tensor, noise_part: Tensor) -> Self:
        """Return the same kind of weight with other values."""
        return type(self)(loc, noise_part, self.noise, self.name)

    def __repr__(self) -> str:
        return one_line(self, lambda: self.noise_part.sqrt(), name=self.name)

    T = property(lambda self: self.like(self.loc.T, self.noise_part.T))
    mT = property(lambda self: self.like(self.loc.mT, self.noise_part.mT))

    def __getitem__(self, index: Any) -> Self:
        return self._reshaped(Tensor.__getitem__, (self, index), {})

    def __mul__(self, factor: Tensor | float) -> Self:
        if isinstance(factor, RandomWeight):
            raise self._unsupported("a product with another random weight")
        result = self.scaled(factor)
        if result.numel() > self.numel():
            raise self._unsupported("copies of its values (a factor of a larger shape)")
        return result

    __rmul__ = __mul__

    def __truediv__(self, factor: Tensor | float) -> Self:
        if isinstance(factor, RandomWeight):
            raise self._unsupported("a division by another random weight")
        return self * (1 / factor)

    def __neg__(self) -> Self:
        return self * -1.0

    def __add__(self, other: Any) -> Self:
        raise self._unsupported("arithmetic other than a constant factor (such as weight standardization)")

    __radd__ = __sub__ = __rsub__ = __pow__ = __rtruediv__ = __add__

    def __matmul__(self, other: Tensor) -> Any:
        return torch.matmul(self, other)  # type: ignore[arg-type]

    def __rmatmul__(self, other: Tensor) -> Any:
        return torch.matmul(other, self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("_") or method is None:
            raise AttributeError(name)
        if method not in MOVING:
            raise self._unsupported(f"torch.Tensor.{name}")
        return lambda *args, **kwargs: self._reshaped(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            return multi_head_attention_forward(*args, **kwargs)
        self = next(_random_weights((*args, *kwargs.values())))
        if func in MOVING:
            return self._reshaped(func, args, kwargs)
        if func in _MULTIPLY:
            return self * (args[1] if args[0] is self else args[0])
        if func in _DIVIDE and args[0] is self:
            return self / args[1]
        form = _FORMS.get(func)
        if form is None:
            raise self._unsupported(_name(func))
        return self._apply_linear(func, form, args, kwargs)

    def _apply_linear(
        self, func: Callable[..., Any], form: LinearForm, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        arguments = {**dict(zip(form.parameters, args, strict=False)), **kwargs}
        for name, value in arguments.items():
            if isinstance(value, RandomWeight) and name != form.weight:
                raise self._unsupported(f"{_name(func)} with a random argument {name!r}")
        if arguments.get("max_norm") is not None:
            raise self._unsupported(f"{_name(func)} with max_norm")
        if form.bias == "input" and "alpha" in arguments:  # the factor of the product in addmm
            arguments[form.weight] = arguments[form.weight] * arguments.pop("alpha")
        return arguments[form.weight].apply(func, LinearUse(arguments, form))

    def _reshaped(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loc = func(*(a.loc if isinstance(a, RandomWeight) else a for a in args), **kwargs)
        noise_part = func(*(a.noise_part if isinstance(a, RandomWeight) else a for a in args), **kwargs)
        if isinstance(loc, Tensor):
            if copies_in(loc, func, self.loc, args[1:], kwargs):
                raise self._unsupported(f"copies of its values ({_name(func)})")
            return self.like(loc, noise_part)
        return tuple(self.like(mean, part) for mean, part in zip(loc, noise_part, strict=True))

    def _unsupported(self, operation: str) -> UnsupportedOperation:
        return UnsupportedOperation(
            f"The rule {self.rule!r} has no formula for {operation} on the Bayesian weight {self.name!r}: "
            'use bnn.using("sample"), leave the weight out with select=, '
            "or register the operation with leanbayes.rules.linear_in_weight."
        )
