"""The value that the rule `covariance` propagates, and the table of its formulas."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from leanbayes.core.tensor_like import TensorLike, one_line
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.rules.moments.registry import name_of
from leanbayes.rules.moments.value import Moments

GIB = 2**30
LIMIT = 8 * GIB  # bytes of the largest covariance that is allowed

FORMULAS: dict[Callable[..., Any], Callable[..., Any]] = {}


def formula(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function for functions of torch."""

    def register(formula: Callable[..., Any]) -> Callable[..., Any]:
        FORMULAS.update(dict.fromkeys(functions, formula))
        return formula

    return register


def unsupported(operation: str) -> UnsupportedOperation:
    """Return the error for an operation without a formula."""
    return UnsupportedOperation(
        f"The rule 'covariance' has no formula for {operation}: it is a baseline for networks of the size of LeNet, "
        'so use bnn.using("moments") for this one.'
    )


def check_memory(shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise an error if a covariance of this shape would take more than `LIMIT` bytes."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size > LIMIT:
        raise LeanBayesError(
            f"The rule 'covariance' would need {size / GIB:,.1f} GiB for a covariance of shape {tuple(shape)}, "
            f'more than {LIMIT / GIB:.0f} GiB: use bnn.using("moments"), smaller batches or a smaller network.'
        )


class Covariances(TensorLike):
    """A tensor-like Gaussian value: vectors with their covariance, or maps with the covariance of each channel."""

    def __init__(self, loc: Tensor, covariance: Tensor) -> None:
        expected = covariance_shape(loc.shape)
        if tuple(covariance.shape) != expected:
            raise LeanBayesError(
                f"A value of shape {tuple(loc.shape)} needs a covariance of shape {expected}, "
                f"not {tuple(covariance.shape)}."
            )
        self.loc, self.covariance = loc, covariance

    @property
    def variance(self) -> Tensor:
        """The variance of each element, in the shape of `loc`."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).reshape(self.loc.shape).clamp_min(0)

    def moments(self) -> Moments:
        """Return the mean and variance of each element, without covariances."""
        return Moments(self.loc, self.variance)

    def assign(self, other: "Covariances") -> Self:
        """Take over another value, as in-place functions do."""
        self.loc, self.covariance = other.loc, other.covariance
        return self

    def __repr__(self) -> str:
        return one_line(self, lambda: self.variance.sqrt())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in FORMULAS:
            raise unsupported(name_of(func))
        return FORMULAS[func](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.__torch_function__(method, (), (self, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    return lambda self, *args: self.__torch_function__(method, (), (self, *args))


# Python looks these up in the class, not through __getattr__.
for _name in (
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __neg__ __matmul__ "
    "__rmatmul__ __getitem__"
).split():
    setattr(Covariances, _name, _operator(_name))


def covariance_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the covariance of a value: (B, n, n) for vectors, (B, C, HW, HW) for maps."""
    if len(shape) == 2:
        return (*shape, shape[1])
    if len(shape) == 4:
        return (*shape[:2], shape[2] * shape[3], shape[2] * shape[3])
    raise unsupported(f"a value of shape {tuple(shape)} (only batches of vectors and images)")
