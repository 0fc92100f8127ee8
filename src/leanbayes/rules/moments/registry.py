"""The registry of rules, one for each function of torch that supports `Moments`."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from leanbayes.core.explained import scripted
from leanbayes.core.tensor_like import TensorLike
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.rules.random_weight import is_linear_in_weight, linear_in_weight

_RULES: dict[Callable[..., Any], Callable[..., Any]] = {}
Rule = TypeVar("Rule", bound=Callable[..., Any])


def moment_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register how functions transform `Moments`.

    The decorated rule is called in place of each function, with the same arguments, if one of them is a `Moments`. It
    replaces an earlier rule of the function.

    Args:
        functions: Functions of torch or torch.nn.functional, methods of torch.Tensor, or any other functions that
            support `torch.overrides.handle_torch_function`.

    Returns:
        A decorator that registers a rule and returns it unchanged.

    Raises:
        LeanBayesError: One of the arguments is not a function.

    Example:
        For x ~ N(m, v), the square x² has the mean m² + v, the slope 2m and the variance 4m²v + 2v²:

        >>> @lb.moment_rule(torch.square)
        ... def square(x):
        ...     m, v = x.loc, x.variance
        ...     return x.follow(m**2 + v, 2 * m, 4 * m**2 * v + 2 * v**2)
    """

    if not all(callable(function) for function in functions):
        raise LeanBayesError("moment_rule needs the functions themselves, for example @lb.moment_rule(torch.square).")

    def register(rule: Rule) -> Rule:
        for function in functions:
            _RULES[function] = rule
        return rule

    return register


_HOMES = (torch, torch.Tensor, torch.nn.functional)


def named(*names: str, modules: tuple[Any, ...] = _HOMES) -> list[Callable[..., Any]]:
    """Return the functions and methods of torch with given names."""
    found = (getattr(module, name, None) for name in names for module in modules)
    return [function for function in found if callable(function)]  # torch.cpu is a module


def call_rule(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the rule of a function."""
    rule = _RULES.get(function)
    if rule is not None:
        return rule(*args, **kwargs) if torch.compiler.is_compiling() else _checked(rule, function, args, kwargs)
    if isinstance(function, (torch.ScriptFunction, torch.ScriptMethod)):
        raise scripted(str(function.name), "it got Moments")
    if is_linear_in_weight(function):
        return _checked(partial(_RULES[linear_in_weight], function), function, args, kwargs)
    raise unsupported(name_of(function))


# Other exceptions are not about arguments: activation checkpointing ends a recomputation by one.
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _checked(rule: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a rule. If it fails where the function itself would not, these arguments have no formula."""
    try:
        return rule(*args, **kwargs)
    except (LeanBayesError, torch.OutOfMemoryError):
        raise
    except _MISTAKES as error:  # from torch, if the call is wrong, or from a rule that does not know the arguments
        if torch.compiler.is_compiling() or not _takes_means(function, args, kwargs):
            raise
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        remedy = f'{type(error).__name__}: {reason}. Use bnn.using("sample").'
        raise unsupported(f"these arguments of {name_of(function)}", remedy) from error


@torch.no_grad()
def _takes_means(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function works with copies of the means in place of `Moments`."""

    def means(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(means(part) for part in value)
        return value.loc.clone() if isinstance(value, TensorLike) else value

    try:
        result = function(*means(args), **{name: means(value) for name, value in kwargs.items()})
    except Exception:  # the call is wrong, whatever the error is
        return False
    return result is not NotImplemented


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function in torch."""
    return torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))


def unsupported(operation: str, remedy: str = "") -> UnsupportedOperation:
    """Return the error for an operation without a rule."""
    return UnsupportedOperation(
        f"The rule 'moments' has no formula for {operation}: "
        + (remedy or f'register one with @lb.moment_rule({operation}), or use bnn.using("sample").')
    )


def copied(where: str) -> UnsupportedOperation:
    """Return the error for a weight with copies of its elements."""
    remedy = 'use bnn.using("sample"), or leave the weight out with select=.'
    return unsupported(f"copies of the values of a Bayesian weight (in {where})", remedy)


def mixed(where: str) -> UnsupportedOperation:
    """Return the error for a weight that is computed from sums over the elements of a Bayesian weight."""
    remedy = 'use bnn.using("sample"), or leave the weight out with select=.'
    return unsupported(f"weight standardization (a sum over a Bayesian weight in the weight of {where})", remedy)
