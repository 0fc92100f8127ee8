"""`Moments`: a Gaussian value, tensor-like, that unmodified networks compute with in place of tensors.

The covariance of a value is kept in two parts. Write y for the value, p for positions (pixels, tokens), c for channels:

    y[c, p] = loc[c, p] + √independent[c, p] · ε[c, p] + Σ_r common[r, c] · ξ[r],      ε, ξ ~ N(0, 1).

`independent` is a variance with noise of its own everywhere. `common` is signed: `probes` directions of noise that all
positions share, because they share the weights the noise came from, and that keeps the correlation between channels
and between the branches of a network. It has a leading dimension of probes and, behind it, size 1 along the positions.

A value may be reshaped so that positions merge with channels, or with examples. Then `grid` is the finer shape that
`common` still broadcasts to: math.prod over its groups gives the shape of `loc`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from leanbayes.rules.moments.context import Pass
from leanbayes.rules.moments.registry import answer, unsupported
from leanbayes.rules.moving import KEEPING, copies_in
from leanbayes.tensor_like import TensorLike

Shape = tuple[int, ...]


def variance_dtype(dtype: torch.dtype) -> torch.dtype:
    """Variances are kept in single precision at least, however coarse the means are."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Moments(TensorLike):
    """A value with a mean and a variance; `Moments(loc, variance)` has noise of its own in every element."""

    def __init__(
        self,
        loc: Tensor,
        variance: Tensor | None = None,
        common: Tensor | None = None,
        *,
        total: Tensor | None = None,
        grid: Shape | None = None,
        within: Pass | None = None,
    ) -> None:
        # One of the two is given, the other follows from it and the common part when somebody asks.
        self._independent, self._total = variance, total
        self.loc, self.common = loc, common
        self.grid: Shape = tuple(loc.shape) if grid is None else grid
        self.within = Pass() if within is None else within  # what all values of one forward pass share
        self.copies: bool | Tensor | None = None  # of a weight: whether an element is in it more than once

    # -- its parts ----------------------------------------------------------------------------------------------------

    @property
    def independent(self) -> Tensor:
        """The variance that each element has to itself."""
        if self._independent is None:
            assert self._total is not None
            if self.common is None:
                return self._total
            independent = (shrunk(self._total) - self.common_variance()).clamp_min(0)
            self._independent = independent.expand(self.loc.shape)
        return self._independent

    @property
    def variance(self) -> Tensor:
        """The variance of each element, in all."""
        if self._total is None:
            assert self._independent is not None
            if self.common is None:
                return self._independent
            self._total = (shrunk(self._independent) + self.common_variance()).expand(self.loc.shape)
        return self._total

    @property
    def std(self) -> Tensor:
        """The standard deviation of each element."""
        return self.variance.sqrt()

    def common_variance(self) -> Tensor | float:
        """The variance of the common part, in a shape that broadcasts to that of `loc`."""
        if self.common is None:
            return 0.0
        variance = self.common.square().sum(0)
        if self.is_regular:
            return variance
        return variance.expand(self.grid).reshape(self.loc.shape)

    @property
    def is_regular(self) -> bool:
        """Whether `common` broadcasts to the shape of `loc` as it is."""
        return len(self.grid) == self.loc.dim() and all(a == b for a, b in zip(self.grid, self.loc.shape, strict=True))

    def like(self, loc: Tensor, independent: Tensor, common: Tensor | None = None, grid: Shape | None = None) -> Self:
        """Make a value of the same forward pass."""
        return type(self)(loc, independent, common, grid=grid, within=self.within)

    def like_total(self, loc: Tensor, total: Tensor, common: Tensor | None, grid: Shape | None = None) -> Self:
        """Make a value of the same forward pass, of whose variance the common part is a part."""
        return type(self)(loc, None, common, total=total, grid=grid, within=self.within)

    def plain(self) -> Self:
        """Return the same value with a `common` that broadcasts to `loc`, whatever that takes."""
        if self.is_regular:
            return self
        if self.common is None:
            return self.like(self.loc, self.independent)
        common = self.common.expand(-1, *self.grid).reshape(-1, *self.loc.shape)
        return self._like_own(self.loc, lambda own: own, common)

    def settled(self, dims: Iterable[int]) -> Self:
        """Keep of the common part its mean along some dimensions of `loc`; what differs from it becomes independent."""
        value = self.plain()
        if value.common is None:
            return value
        dims = [dim % value.loc.dim() for dim in dims]
        dims = [dim for dim in dims if value.common.shape[dim + 1] > 1]
        if not dims:
            return value
        common = value.common.mean([dim + 1 for dim in dims], keepdim=True)
        return value.like_total(value.loc, value.variance, common)

    # -- the ways through a function ----------------------------------------------------------------------------------

    def follow(self, loc: Tensor, slope: Tensor | float, variance: Tensor | None = None) -> Self:
        """Go through an elementwise function: its mean, its (mean) slope and, if it is not slope² · v, its variance.

        The common part takes the mean slope along its positions, and what deviates from that becomes independent.
        Without maps, a variance that was the same at all positions stays so.
        """
        if self.common is None:
            total = slope * slope * self.independent if variance is None else variance
            return self.like(loc, total.expand(loc.shape))
        if not isinstance(slope, Tensor):
            return self._like_own(loc, lambda own: own * slope**2, self.common * slope, self.grid)
        total = slope * slope * self.variance if variance is None else variance
        slope = slope.expand(loc.shape).reshape(self.grid)
        dims = [dim for dim, size in enumerate(self.common.shape[1:]) if size == 1 and self.grid[dim] != 1]
        mean = slope.mean(dims, keepdim=True) if dims else slope
        if dims and not self.within.maps and self.is_regular and not any([self._varies(dim) for dim in dims]):
            total = total.mean(dims, keepdim=True)
        return self.like_total(loc, total.expand(loc.shape), self.common * mean, self.grid)

    def _varies(self, dim: int) -> bool:
        return shrunk(self.variance).shape[dim] != 1

    def viewed(self, view: Callable[[Tensor], Any]) -> Any:
        """Apply a function that only moves elements about, such as an index or a permutation, to all parts."""
        value = self.plain()
        own, make = value._own()
        locs, owns = view(value.loc), view(own)
        commons: Any = None
        if value.common is not None:
            commons = torch.vmap(view)(value.common.expand(-1, *value.loc.shape))
        if isinstance(locs, Tensor):
            return make(locs, owns, None if commons is None else shrunk(commons))
        parts = zip(locs, owns, [None] * len(locs) if commons is None else commons, strict=True)
        return tuple(make(loc, v, None if u is None else shrunk(u)) for loc, v, u in parts)

    def reshaped(self, loc: Tensor) -> Self:
        """Take another shape, that of `loc`, which holds the same means; the common part is not spread out for it."""
        common, grid = (None, None) if self.common is None else _regroup(self.common, self.grid, tuple(loc.shape))
        return self._like_own(loc, lambda own: own.reshape(loc.shape), common, grid)

    def _own(self) -> tuple[Tensor, Callable[..., Self]]:
        """The variance that is at hand, and what makes a value of such a one."""
        if self._independent is not None:
            return self._independent, self.like
        return self.variance, self.like_total

    def _like_own(
        self, loc: Tensor, change: Callable[[Tensor], Tensor], common: Tensor | None, grid: Shape | None = None
    ) -> Self:
        own, make = self._own()
        return make(loc, change(own), common, grid)

    def assign(self, other: "Moments") -> Self:
        """Become another value, as in-place functions do."""
        self._independent, self._total = other._independent, other._total
        self.loc, self.common, self.grid = other.loc, other.common, other.grid
        return self

    # -- what networks ask of a tensor --------------------------------------------------------------------------------

    layout = property(lambda self: self.loc.layout)
    is_nested = property(lambda self: False)
    T = property(lambda self: self.permute(*reversed(range(self.dim()))))
    mT = property(lambda self: self.transpose(-2, -1))

    def is_floating_point(self) -> bool:
        """True: a Gaussian is real."""
        return True

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the means are."""
        return self.loc.is_contiguous(*args, **kwargs)

    def get_device(self) -> int:
        """Number of the device."""
        return self.loc.get_device()

    def stride(self, *args: Any) -> Any:
        """Strides of the means."""
        return self.loc.stride(*args)

    def __iter__(self) -> Iterator[Self]:
        return iter(self.unbind(0))

    def __bool__(self) -> bool:
        raise TypeError("A Moments value has no truth: compare its .loc.")

    def __repr__(self) -> str:
        return f"Moments(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _answer(func, tuple(args), dict(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(name)
        return lambda *args, **kwargs: _answer(method, (self, *args), kwargs)


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the rule of a function; where it only moves or scales the elements of a weight, they remain its elements."""
    result = answer(function, args, kwargs)
    first = args[0] if args else None
    if isinstance(first, Moments) and first.copies is not None and function in KEEPING:
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, Moments) and part is not first:
                part.copies = first.copies | copies_in(part.loc, function, first.loc, args[1:], kwargs)
    return result


# What torch has for these operators are wrappers in Python, which torch.compile does not find in the registry.
_SWAPPED = {"__rsub__": torch.sub, "__rtruediv__": torch.div, "__rmatmul__": torch.matmul}


def _operator(name: str) -> Callable[..., Any]:
    method = torch.pow if name == "__pow__" else _SWAPPED.get(name, getattr(Tensor, name))
    swapped = name in _SWAPPED

    def operate(self: Moments, *args: Any) -> Any:
        return _answer(method, (*args, self) if swapped else (self, *args), {})

    operate.__name__ = name
    return operate


def _operator_in_place(name: str) -> Callable[..., Any]:
    def operate(self: Moments, other: Any) -> Moments:
        return self.assign(getattr(self, name)(other))  # every other name of this value sees it too

    return operate


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Moments, *args: Any) -> Any:
        raise unsupported(f"Tensor.{name}", 'write it without, or use bnn.using("sample").')

    return refuse


# Python looks these up in the class, not through __getattr__.
for _name in (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __neg__ __matmul__ "
    "__rmatmul__ __getitem__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __abs__"
).split():
    setattr(Moments, _name, _operator(_name))
for _name, _plain in (
    ("__iadd__", "__add__"),
    ("__isub__", "__sub__"),
    ("__imul__", "__mul__"),
    ("__itruediv__", "__truediv__"),
):
    setattr(Moments, _name, _operator_in_place(_plain))
for _name in "__setitem__ __floordiv__ __mod__ __rpow__ __float__ __int__".split():
    setattr(Moments, _name, _refused(_name))
Moments.__hash__ = object.__hash__  # type: ignore[method-assign]


def shrunk(tensor: Tensor) -> Tensor:
    """Keep one entry along dimensions that a view has only repeated (they have stride 0)."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] != 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _regroup(common: Tensor, grid: Shape, shape: Shape) -> tuple[Tensor, Shape]:
    """Split dimensions of `grid` where the new shape does, and keep the finer one where it merges; no element moves."""
    if 0 in shape:
        return common.new_zeros(len(common), *shape), shape
    sizes: list[int] = []  # of the new grid
    kept: list[int] = []  # of common along it
    old = [(size, own) for size, own in zip(grid, common.shape[1:], strict=True) if size != 1]
    rest, own = 1, 1  # what is left of the dimension of `grid` at hand
    for size in shape:
        missing, pieces = size, []
        while missing != 1:
            if rest == 1:
                rest, own = old.pop(0)
            if missing % rest and rest % missing:  # sizes that neither split nor merge, such as (6, 4) to (4, 6)
                return common.expand(-1, *grid).reshape(-1, *shape), shape
            piece = min(missing, rest)
            pieces.append((piece, min(piece, own)))
            missing, rest = missing // piece, rest // piece
        if all([own == 1 for _, own in pieces]) or all([own == piece for piece, own in pieces]):
            pieces = [(size, math.prod([own for _, own in pieces]))]
        sizes += [piece for piece, _ in pieces]  # several where positions merge with something else
        kept += [own for _, own in pieces]
    return common.reshape(len(common), *kept), tuple(sizes)
