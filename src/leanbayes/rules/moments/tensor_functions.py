"""What makes `Moments` tensor-like: operators, methods and functions of torch go to their rules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from leanbayes.core.tensor_like import TensorLike
from leanbayes.errors import UnsupportedOperation
from leanbayes.rules.moments.registry import call_rule, unsupported
from leanbayes.rules.moving import KEEPING, MIXING, copies_in

# Properties of tensors that are those of the means.
_PROPERTIES = "grad_fn is_leaf itemsize nbytes is_cpu is_meta is_mps is_xla is_xpu is_sparse is_quantized".split()


class TensorFunctions(TensorLike):
    """Base class of `Moments`: the interface of a tensor.

    Attributes:
        copies: For a weight, whether it contains an element more than once, for each element or for all; else None.
        mixed: Whether it is computed from sums over the elements of a weight.
    """

    copies: bool | Tensor | None
    mixed: bool

    def assign(self, other: Any) -> Self:
        """Take over another value, as in-place functions do."""
        raise NotImplementedError  # abstract

    layout = property(lambda self: self.loc.layout)
    is_nested = property(lambda self: False)
    T = property(lambda self: self.permute(*reversed(range(self.dim()))))
    mT = property(lambda self: self.transpose(-2, -1))
    data = property(lambda self: self.detach())

    def is_floating_point(self) -> bool:
        """Return True."""
        return True

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the means are contiguous."""
        return self.loc.is_contiguous(*args, **kwargs)

    def get_device(self) -> int:
        """Return the number of the device."""
        return self.loc.get_device()

    def stride(self, *args: Any) -> Any:
        """Return the strides of the means."""
        return self.loc.stride(*args)

    def __iter__(self) -> Iterator[Self]:
        return iter(self.unbind(0))

    def __pos__(self) -> Self:
        return self

    def __bool__(self) -> bool:
        raise TypeError("Moments cannot be converted to a bool: compare their means (.loc).")

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, tuple(args), dict(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or method is None:
            raise AttributeError(name)
        if name in _PROPERTIES:
            return getattr(self.loc, name)
        if not callable(method):
            raise _MissingAttribute(str(unsupported(f"Tensor.{name}", 'use its mean (.loc), or bnn.using("sample").')))
        return lambda *args, **kwargs: _dispatch(method, (self, *args), kwargs)


class _MissingAttribute(UnsupportedOperation, AttributeError):
    """Also an AttributeError, so that `hasattr` is False."""


def _dispatch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the rule of a function, and track copies and sums of the elements of a weight."""
    result = call_rule(function, args, kwargs)
    _track_sums(result, function, args, kwargs)
    first = args[0] if args else None
    if isinstance(first, TensorFunctions) and first.copies is not None and function in KEEPING:
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, TensorFunctions) and part is not first:
                part.copies = first.copies | copies_in(part.loc, function, first.loc, args[1:], kwargs)
    return result


def _track_sums(result: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark results that are computed only from weights, and from sums over the elements of at least one."""
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, TensorFunctions)]
    if not values or not all([value.copies is not None or value.mixed for value in values]):
        return
    sums = function in MIXING and args and args[0] is values[0]
    sums = sums or (function is torch.einsum and len(args) == 2)  # of one value
    if sums or any([value.mixed for value in values]):
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, TensorFunctions):
                part.mixed = True


# In torch these operators are Python wrappers, which torch.compile does not find in the registry.
_SWAPPED = {"__rsub__": torch.sub, "__rtruediv__": torch.div, "__rmatmul__": torch.matmul}


def _operator(name: str) -> Callable[..., Any]:
    method = torch.pow if name == "__pow__" else _SWAPPED.get(name, getattr(Tensor, name))
    swapped = name in _SWAPPED

    def operate(self: TensorFunctions, *args: Any) -> Any:
        return _dispatch(method, (*args, self) if swapped else (self, *args), {})

    operate.__name__ = name
    return operate


def _operator_in_place(name: str) -> Callable[..., Any]:
    def operate(self: TensorFunctions, other: Any) -> Any:
        return self.assign(getattr(self, name)(other))  # all references to this value change

    return operate


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: TensorFunctions, *args: Any) -> Any:
        raise unsupported(f"Tensor.{name}", 'rewrite the network without it, or use bnn.using("sample").')

    return refuse


# Python looks these up in the class, not through __getattr__.
for _name in (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __neg__ __matmul__ "
    "__rmatmul__ __getitem__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __abs__"
).split():
    setattr(TensorFunctions, _name, _operator(_name))
for _name, _plain in (
    ("__iadd__", "__add__"),
    ("__isub__", "__sub__"),
    ("__imul__", "__mul__"),
    ("__itruediv__", "__truediv__"),
):
    setattr(TensorFunctions, _name, _operator_in_place(_plain))
for _name in (
    "__setitem__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __rpow__ __ipow__ __float__ "
    "__int__ __complex__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ __contains__ __array__"
).split():
    setattr(TensorFunctions, _name, _refused(_name))
TensorFunctions.__hash__ = object.__hash__  # type: ignore[method-assign]
