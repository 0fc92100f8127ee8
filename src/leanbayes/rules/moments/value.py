"""`Moments`: a tensor-like Gaussian value, which networks use in place of tensors.

The covariance of a value has two parts. For a value y with positions p (pixels, tokens) and channels c:

    y[c, p] = loc[c, p] + √independent[c, p] · ε[c, p] + Σ_r common[r, c] · ξ[r],      ε, ξ ~ N(0, 1).

`independent` is the variance of noise that is independent for each element. `common` has signed directions of noise,
one per probe, that all positions share, because they share the weights that the noise comes from. It keeps the
correlations between channels and between the branches of a network. Its first dimension counts the probes, and it has
size 1 along the positions.

A reshape may merge positions with channels or examples. Then `grid` is the finer shape that `common` still broadcasts
to: the products of its groups of dimensions are the shape of `loc`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from leanbayes.core.tensor_like import one_line
from leanbayes.rules.moments.context import Pass, Source
from leanbayes.rules.moments.map_cells import at_probes, root
from leanbayes.rules.moments.tensor_functions import TensorFunctions

Shape = tuple[int, ...]


def variance_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of variances for a dtype of means: at least single precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Moments(TensorFunctions):
    """A random tensor with a mean and a variance for each element.

    The rule `moments` gives the weights of a network as `Moments`, so that its activations and outputs are `Moments`
    too. They support the functions of torch that have a rule (see `lb.moment_rule`).

    Args:
        loc: The mean.
        variance: The variance of independent noise, in the shape of `loc`.
        common: Common noise, (probes, ...), in a shape that broadcasts to `loc` behind the first dimension. Each probe
            is a standard normal that all elements share, multiplied by these signed factors.
        total: The variance including common noise, in place of `variance`.
        grid: The finer shape that `common` broadcasts to, if that is not the shape of `loc`.
        within: The forward pass that the value belongs to; by default a pass without common noise.

    Attributes:
        loc: The mean.
        variance: The variance of each element, including common noise.
        stddev: The standard deviation of each element. (`std` is the method of tensors.)
        independent: The variance of the noise that is independent for each element.
        common: The common noise, or None.

    Example:
        >>> x = lb.Moments(torch.zeros(2, 3), torch.ones(2, 3))
        >>> y = torch.relu(2 * x)
        >>> y.loc, y.stddev
        >>> with bnn.using("moments"):
        ...     output = bnn(inputs)
        >>> output
        Moments(shape=(8, 10), dtype=torch.float32, device=cpu, mean_std=0.0563)
    """

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
        # One of the two is given. The other is computed from it and the common part on demand.
        self._independent, self._total = variance, total
        self._factors: tuple[Tensor, Tensor] | None = None  # whose product is `_independent`, until that is needed
        self.pieces: tuple[int, list[Tensor]] | None = None  # a dimension along which `independent` joins tensors
        self._common = common
        self._gain: Tensor | None = None  # a factor of the common part, until that is needed
        self._shared: Tensor | None = None  # the variance of the common part
        self.loc = loc
        self.grid: Shape = tuple(loc.shape) if grid is None else grid
        self.within = Pass() if within is None else within  # shared by all values of a forward pass
        self.copies: bool | Tensor | None = None  # for a weight: whether it contains an element more than once
        self.mixed = False  # whether it is computed from sums over the elements of a weight
        self.correction: Callable[[Moments, int], Moments] | None = None  # for a weight: that of its layer's output
        self.derived: dict[Any, Tensor] | None = None  # for a weight: what passes have computed from it, by any key
        self.averages: tuple[list[int], Tensor, Tensor] | None = None  # means of `loc` and its square, and over what
        self.source: Source | None = None  # what `loc` is computed from

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def independent(self) -> Tensor:
        """The variance of the noise that is independent for each element."""
        return self.rest.clamp_min(0) if self.within.coherent else self.rest

    @property
    def rest(self) -> Tensor:
        """The variance without that of common noise; in a coherent pass it is negative where there is less noise."""
        if self._factors is not None:
            (first, second), self._factors = self._factors, None
            self._independent = (first * second).expand(self.loc.shape)
        if self._independent is None:
            assert self._total is not None
            if not self.has_common:
                return self._total
            rest = shrunk(self._total) - self.common_variance()
            self._independent = (rest if self.within.coherent else rest.clamp_min(0)).expand(self.loc.shape)
        return self._independent

    @property
    def variance(self) -> Tensor:
        """The variance of each element, including common noise."""
        if self._total is None:
            if not self.has_common:
                return self.rest
            self._total = self._total_variance().expand(self.loc.shape)
        return self._total

    def _total_variance(self) -> Tensor:
        """Compute the variance in a shape that broadcasts to that of `loc`, without caching it."""
        if self._total is not None:
            return shrunk(self._total)
        return self._with_shared(shrunk, self.common_variance())

    def _with_shared(self, cut: Callable[[Tensor], Tensor], shared: Tensor | float) -> Tensor:
        """Add the variance of the common part to a part of the independent variance."""
        if self._factors is not None:
            first, second = map(cut, self._factors)
            return torch.addcmul(shared, first, second) if isinstance(shared, Tensor) else first * second
        assert self._independent is not None
        own = cut(self._independent)
        if not isinstance(shared, Tensor):
            return own
        return (own + shared).clamp_min(0) if self.within.coherent else own + shared

    def variance_of(self, index: tuple[slice, ...]) -> Tensor:
        """Return the variance of a part of the elements in a shape that broadcasts to it, without caching it."""
        if not index:
            return self._total_variance()

        def cut(part: Tensor) -> Tensor:
            part = shrunk(part)
            own = index[len(index) - part.dim() :]
            return part[tuple([slice(None) if size == 1 else one for one, size in zip(own, part.shape, strict=True)])]

        if self._total is not None:
            return cut(self._total)
        shared = self.common_variance()
        return self._with_shared(cut, cut(shared) if isinstance(shared, Tensor) else shared)

    def variances_along(self, dim: int) -> list[Tensor]:
        """Return the variance in shapes that broadcast, in pieces along a dimension if it is known to join them.

        A sum over pieces does not need them in one tensor, which compiled code would store.
        """
        dim = dim % self.loc.dim()
        pieces = [] if self.pieces is None or self.pieces[0] != dim else [shrunk(piece) for piece in self.pieces[1]]
        shared = self.common_variance()
        if not pieces or sum([piece.shape[dim] for piece in pieces]) != self.loc.shape[dim]:  # one is constant along it
            return [shrunk(self.variance)]
        if isinstance(shared, Tensor):
            parts = shared.expand(*shared.shape[:dim], self.loc.shape[dim], *shared.shape[dim + 1 :])
            parts = parts.split([piece.shape[dim] for piece in pieces], dim)
            pieces = [piece + part for piece, part in zip(pieces, parts, strict=True)]
        outer = pieces[0].shape[:dim]  # it may have size 1 for all examples
        return pieces if all([piece.shape[:dim] == outer for piece in pieces]) else [shrunk(self.variance)]

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of each element."""
        return self.variance.sqrt()

    def common_variance(self) -> Tensor | float:
        """Return the variance of the common part, in a shape that broadcasts to that of `loc`."""
        if not self.has_common:
            return 0.0
        if self._shared is None:
            assert self.common is not None
            variance = self.common.square().sum(0)
            self._shared = variance if self.is_regular else variance.expand(self.grid).reshape(self.loc.shape)
        return self._shared

    @property
    def common(self) -> Tensor | None:
        """The common noise, or None."""
        if self._gain is not None:
            assert self._common is not None
            self._common, self._gain = self._common * self._gain, None
        return self._common

    @common.setter
    def common(self, common: Tensor | None) -> None:
        self._common, self._gain, self._shared = common, None, None

    @property
    def has_common(self) -> bool:
        """Whether there is common noise."""
        return self._common is not None

    @property
    def is_regular(self) -> bool:
        """Whether `common` broadcasts to the shape of `loc`."""
        return len(self.grid) == self.loc.dim() and all(a == b for a, b in zip(self.grid, self.loc.shape, strict=True))

    def like(self, loc: Tensor, independent: Tensor, common: Tensor | None = None, grid: Shape | None = None) -> Self:
        """Return a value of the same forward pass."""
        return type(self)(loc, independent, common, grid=grid, within=self.within)

    def like_total(self, loc: Tensor, total: Tensor, common: Tensor | None, grid: Shape | None = None) -> Self:
        """Return a value of the same forward pass, given its variance including the common part."""
        return type(self)(loc, None, common, total=total, grid=grid, within=self.within)

    def like_product(self, loc: Tensor, factors: tuple[Tensor, Tensor], common: Tensor | None) -> "Moments":
        """Return a value of the same forward pass, whose independent variance is the product of two tensors."""
        value = Moments(loc, None, common, within=self.within)
        value._factors = factors
        return value

    def plain(self) -> Self:
        """Return the same value with a `common` that broadcasts to `loc`; this may need more memory."""
        if self.is_regular:
            return self
        if self.common is None:
            return self.like(self.loc, self.independent)
        common = self.common.expand(-1, *self.grid).reshape(-1, *self.loc.shape)
        return self._like_own(self.loc, lambda own: own, common)

    def settled(self, dims: Iterable[int]) -> Self:
        """Replace the common part by its mean along dimensions of `loc`; the deviation from it becomes independent."""
        value = self.plain()
        if value._common is None:
            return value
        dims = [dim % value.loc.dim() for dim in dims]
        dims = [dim for dim in dims if value._common.shape[dim + 1] > 1]
        if not dims:
            return value
        assert value.common is not None
        common = value.within.mean(value.common, [dim + 1 for dim in dims], lead=1)
        return value.like_total(value.loc, value.variance, common)

    # -- functions ----------------------------------------------------------------------------------------------------

    def follow(self, loc: Tensor, slope: Tensor | float, variance: Tensor | None = None) -> Self:
        """Return the moments of an elementwise function of this value.

        The common part is multiplied by the mean slope over its positions, and the deviation from it becomes
        independent. Without maps, a variance that is the same at all positions stays so. In a coherent pass positions
        count in the mean slope by their variance.

        Args:
            loc: The mean of the function.
            slope: The mean slope of the function.
            variance: The variance of the function; slope² · v if None.
        """
        if self.common is None:
            total = slope * slope * self.independent if variance is None else variance
            return self.like(loc, total.expand(loc.shape))
        if not isinstance(slope, Tensor):
            return self._like_own(loc, lambda own: own * slope**2, self.common * slope, self.grid)
        total = slope * slope * self.variance if variance is None else variance
        dims = self._shared_dims()
        if self.within.coherent and len(dims) == self._window and slope.dim() == loc.dim():
            return self._follow_by_probe(loc, slope.expand(loc.shape), total)
        if self.is_regular and slope.dim() == loc.dim() and all([slope.shape[dim] == 1 for dim in dims]):
            mean = slope
        else:
            slope = slope.expand(loc.shape).reshape(self.grid)
            mean = self.within.mean(slope, dims) if dims else slope
        if dims and not self.within.maps and self.is_regular and not self.varies(dims):
            total = self.within.mean(total, dims)
        result = self.like_total(loc, total.expand(loc.shape), self.common, self.grid)
        result._gain = mean
        if self._shared is not None and self.is_regular:
            result._shared = self._shared * mean.square()
        return result

    @property
    def _window(self) -> int:
        """The number of last dimensions along which the common part is constant; -1 if it is regular nowhere."""
        if self._common is None or not self.is_regular:
            return -1
        window = 0
        while window < self.loc.dim() and self._common.shape[-1 - window] == 1 != self.loc.shape[-1 - window]:
            window += 1
        return window or -1

    def _follow_by_probe(self, loc: Tensor, slope: Tensor, total: Tensor) -> Self:
        """Do the same in a coherent pass: each probe has the mean slope of its part of the image.

        What the variance there exceeds that of the slope times the noise is independent for each channel.
        """
        assert self.common is not None
        window, count = self._window, len(self.common)
        before = self._total_variance().expand(loc.shape)
        after = at_probes(total.expand(loc.shape), window, count)
        energy, own = at_probes(before * slope, window, count), at_probes(before, window, count)
        gain = energy / own.clamp_min(torch.finfo(own.dtype).tiny)
        rest = (after - gain * energy).clamp_min(0)
        signs = self.within.next_signs(loc.shape[-1 - window]).to(rest)
        signs = signs.reshape(count, *[1] * (loc.dim() - 1 - window), -1, *[1] * window)
        common = self.common * gain + signs * (root(rest))
        return self.like_total(loc, total.expand(loc.shape), common)

    def _shared_dims(self) -> list[int]:
        """Return the dimensions of the grid along which all elements have the same common noise."""
        assert self.common is not None
        return [dim for dim, size in enumerate(self.common.shape[1:]) if size == 1 and self.grid[dim] != 1]

    @property
    def positions(self) -> list[int]:
        """The dimensions that share common noise; none if examples share it too, or if a reshape has merged some."""
        dims = self._shared_dims() if self.common is not None and self.is_regular else []
        return [] if 0 in dims else dims

    def varies(self, dims: Iterable[int]) -> bool:
        """Whether the variance differs along one of some dimensions, if the common part does not."""
        own = self._independent if self._total is None else self._total
        parts = [shrunk(part) for part in self._factors or (own,) if part is not None]
        return any([part.shape[dim] != 1 for dim in dims for part in parts])

    def viewed(self, view: Callable[[Tensor], Any]) -> Any:
        """Apply a function that only moves elements, such as an index or a permutation, to all parts."""
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
        """Reshape to the shape of `loc`, which contains the same means, without expanding the common part."""
        common, grid = (None, None) if self.common is None else _regroup(self.common, self.grid, tuple(loc.shape))
        return self._like_own(loc, lambda own: own.reshape(loc.shape), common, grid)

    def _own(self) -> tuple[Tensor, Callable[..., Self]]:
        """Return the variance that is known, independent or total, and a function that makes a value from it."""
        if self._independent is not None or self._factors is not None:
            return self.rest, self.like
        return self.variance, self.like_total

    def _like_own(
        self, loc: Tensor, change: Callable[[Tensor], Tensor], common: Tensor | None, grid: Shape | None = None
    ) -> Self:
        own, make = self._own()
        return make(loc, change(own), common, grid)

    def assign(self, other: "Moments") -> Self:
        """Take over another value, as in-place functions do."""
        self._independent, self._total, self._factors = other._independent, other._total, other._factors
        self._common, self._gain, self._shared = other._common, other._gain, other._shared
        self.pieces, self.averages, self.source = other.pieces, other.averages, other.source
        self.loc, self.grid = other.loc, other.grid
        self.derived = None
        return self

    def __repr__(self) -> str:
        return one_line(self, lambda: self._total_variance().sqrt())


def shrunk(tensor: Tensor) -> Tensor:
    """Keep one entry along dimensions that are only expanded (stride 0)."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] != 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _regroup(common: Tensor, grid: Shape, shape: Shape) -> tuple[Tensor, Shape]:
    """Split dimensions of `grid` where the new shape splits them, and keep them where it merges them."""
    if 0 in shape:
        return common.new_zeros(len(common), *shape), shape
    sizes: list[int] = []  # of the new grid
    kept: list[int] = []  # of common along it
    old = [(size, own) for size, own in zip(grid, common.shape[1:], strict=True) if size != 1]
    rest, own = 1, 1  # the rest of the current dimension of `grid`
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
        sizes += [piece for piece, _ in pieces]  # several if positions merge with channels or examples
        kept += [own for _, own in pieces]
    return common.reshape(len(common), *kept), tuple(sizes)
