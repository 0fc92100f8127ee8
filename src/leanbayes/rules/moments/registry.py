"""Which function of torch does what to `Moments`: a rule for each, and a clear error for the rest."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.rules.weights import is_linear_in_weight, linear_in_weight

_RULES: dict[Callable[..., Any], Callable[..., Any]] = {}
Rule = TypeVar("Rule", bound=Callable[..., Any])


def moment_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Say what a function does to `Moments`: the decorated rule is called in its place, with the same arguments.

    @lb.moment_rule(torch.square)
    def square(x):
        return x.follow(x.loc**2 + x.variance, 2 * x.loc, 4 * x.loc**2 * x.variance + 2 * x.variance**2)

    The functions are those of torch, of torch.nn.functional, methods of torch.Tensor, or any that asks
    `torch.overrides.handle_torch_function`. A rule takes the place of an earlier one.
    """

    if not all(callable(function) for function in functions):
        raise LeanBayesError("moment_rule takes the functions themselves, such as @lb.moment_rule(torch.square).")

    def register(rule: Rule) -> Rule:
        for function in functions:
            _RULES[function] = rule
        return rule

    return register


_HOMES = (torch, torch.Tensor, torch.nn.functional)


def named(*names: str, modules: tuple[Any, ...] = _HOMES) -> list[Callable[..., Any]]:
    """Find functions and methods by their names, wherever torch has them, also those that end in _ (in place)."""
    found = (getattr(module, name, None) for name in names for module in modules)
    return [function for function in found if callable(function)]  # torch.cpu is a module


def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the rule of a function."""
    rule = _RULES.get(function)
    if rule is not None:
        return rule(*args, **kwargs)
    if is_linear_in_weight(function):
        return _RULES[linear_in_weight](function, *args, **kwargs)
    raise unsupported(name_of(function))


def name_of(function: Callable[..., Any]) -> str:
    """How torch calls a function."""
    return torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))


def unsupported(operation: str, remedy: str = "") -> UnsupportedOperation:
    """Make the error for an operation that moments cannot go through."""
    return UnsupportedOperation(
        f"The rule 'moments' has no formula for {operation}: "
        + (remedy or f'register one with @lb.moment_rule({operation}), or use bnn.using("sample").')
    )


def copied(where: str) -> UnsupportedOperation:
    """Make the error for a weight that meets its inputs more than once."""
    remedy = 'use bnn.using("sample"), or leave the weight out with select=.'
    return unsupported(f"copies of the values of a Bayesian weight (in {where})", remedy)
