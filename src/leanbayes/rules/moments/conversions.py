"""Moments through conversions of dtype and device, and functions with deterministic results, which use the means."""

from typing import Any

import torch
from torch import Tensor

from leanbayes.rules.moments.registry import moment_rule, named
from leanbayes.rules.moments.value import Moments, variance_dtype


def loc_of(value: Any) -> Any:
    """Return the mean of a value; a value without moments is its own mean."""
    return value.loc if isinstance(value, Moments) else value


def converted(x: Moments, loc: Tensor) -> Any:
    """Convert the other parts of a value to the device and precision of `loc`; integers have no noise."""
    if not loc.is_floating_point():
        return loc
    dtype = variance_dtype(loc.dtype)
    common = None if x.common is None else x.common.to(loc.device, dtype)
    return x.like(loc, x.rest.to(loc.device, dtype), common, x.grid)


def _conversion(name: str) -> None:
    @moment_rule(*named(name))
    def convert(input: Any, *args: Any, **kwargs: Any) -> Any:
        loc = getattr(loc_of(input), name)(*[loc_of(arg) for arg in args], **kwargs)
        # t.to(x) and t.type_as(x) convert a plain tensor; x.type() returns a name.
        return converted(input, loc) if isinstance(input, Moments) and isinstance(loc, Tensor) else loc


for _name in "to type type_as float half bfloat16 double long int bool cpu cuda contiguous".split():
    _conversion(_name)


@moment_rule(*named("clone"))
def clone(input: Moments, *, memory_format: torch.memory_format = torch.preserve_format) -> Moments:
    """Copy all parts."""
    common = None if input.common is None else input.common.clone()
    return input.like(input.loc.clone(memory_format=memory_format), input.rest.clone(), common, input.grid)


@moment_rule(*named("detach"))
def detach(input: Moments) -> Moments:
    """Detach all parts from the graph."""
    common = None if input.common is None else input.common.detach()
    return input.like(input.loc.detach(), input.rest.detach(), common, input.grid)


@moment_rule(*named("detach_"))
def detach_(input: Moments) -> Moments:
    """Detach all parts from the graph, in place."""
    return input.assign(detach(input))


@moment_rule(*named("requires_grad_"))
def requires_grad_(input: Moments, requires_grad: bool = True) -> Moments:
    """Require the gradient of the means."""
    input.loc.requires_grad_(requires_grad)
    return input


def _of_means(name: str) -> None:
    for function in named(name):

        def apply_to_means(*args: Any, _function: Any = function, **kwargs: Any) -> Any:
            return _function(*[loc_of(arg) for arg in args], **{key: loc_of(arg) for key, arg in kwargs.items()})

        moment_rule(function)(apply_to_means)


_NEW = "new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like empty_like rand_like randn_like"
_COMPARE = "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ equal not_equal less less_equal greater"
_COMPARE += " greater_equal isnan isfinite isinf isclose allclose argmax argmin argsort"
_METADATA = "numel nelement ndimension is_floating_point is_complex is_same_size element_size result_type data_ptr"
for _name in f"{_NEW} {_COMPARE} {_METADATA}".split():
    _of_means(_name)
