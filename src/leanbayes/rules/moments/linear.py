"""Layers: functions that are linear in a weight, with noise in the weight, in what comes in, or in both.

With independent elements, exactly:

    m_y = W m + b,      v_y = W² v + σ² (m² + v),      σ² the variance of the weight.

Where many positions share the weight (pixels, tokens), so do they its noise. The noise of a layer's own weight has at
output channel o the variance t = Σ σ²(m² + v), and its mean over the positions has c = Σ σ²(x̄² + ...), with x̄ the mean
of an input channel: that much is surely common. The rest is no independent noise either, since neighbours resemble each
other: √(c·t̄) is taken as common, halfway between c and all of it. It is spread over signed probes; noise that came in
by them goes through W as any tangent does, so that correlations between channels and branches are kept.

Then v_y need not be known for each channel at each pixel by convolutions of its own: its mean over the positions, by
products of the means, times one pattern of positions for all channels, is as good (docs/one_pass.md), and costs little.
Where a network pools its pixels, even the pattern can go (`Pass.maps`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.registry import copied, moment_rule, name_of, unsupported
from leanbayes.rules.moments.value import Moments, shrunk, variance_dtype
from leanbayes.rules.weights import LinearUse, form_of, linear_in_weight

_TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_GEOMETRY = {"stride", "padding", "dilation", "output_padding"}
_FEW = 4  # output channels of a group for which the variance is computed pixel by pixel


@moment_rule(linear_in_weight)
def linear(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Answer any function that `linear_in_weight` names."""
    form = form_of(function)
    arguments = {**dict(zip(form.parameters, args, strict=False)), **kwargs}
    if form.weight == "other" and arguments["other"].dim() != 2:
        from leanbayes.rules.moments.products import matmul

        return matmul(arguments["input"], arguments["other"])
    if arguments.get("max_norm") is not None:
        raise unsupported("an embedding with max_norm", "leave max_norm out.")
    if any(arguments.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        raise unsupported("torch.addmm with alpha or beta", "write it as a product and a sum.")
    layer = _Layer(function, LinearUse(arguments, form))
    if not form.inputs:
        return layer.look_up()
    if function is F.bilinear:
        return layer.bilinear()
    return layer.shared() if layer.positions else layer.apart()


class _Given(NamedTuple):
    """The input of a layer whose positions share their weights."""

    mean: Tensor
    squares: Tensor  # E x², at each position
    second: Tensor  # its mean along the positions
    first: Tensor  # E x̄², of the mean along the positions
    alone: Tensor | None  # the mean of the variance that each position has to itself

    @classmethod
    def of(cls, x: Any, positions: list[int], dtype: torch.dtype) -> "_Given":
        """Take the means that the formulas need."""
        mean = loc_of(x).to(dtype)
        squares, first = mean.square(), mean.mean(positions, keepdim=True).square()
        # Means are added, and not sums averaged: the variance may be a mean along the positions already.
        second = squares.mean(positions, keepdim=True)
        if not isinstance(x, Moments):
            return cls(mean, squares, second, first, None)
        variance = shrunk(x.variance)
        average = variance.mean(positions, keepdim=True)
        shared = x.common_variance()
        alone = average if x.common is None else (average - shared).clamp_min(0)
        first = first + shared + alone / math.prod([mean.shape[dim] for dim in positions])
        return cls(mean, squares + variance, second + average, first, alone)


class _Layer:
    """One call of such a function, taken apart."""

    def __init__(self, function: Callable[..., Any], use: LinearUse) -> None:
        self.function, self.form = function, use.form
        self.weight, self.bias = use.arguments[use.form.weight], use.arguments.get(use.form.bias or "")
        self.inputs = use.inputs
        self.use = LinearUse({name: loc_of(value) for name, value in use.arguments.items()}, use.form)
        values = [v for v in (self.weight, self.bias, *self.inputs) if isinstance(v, Moments)]
        self.like = values[0]
        self.within = values[0].within
        self.dtype = variance_dtype(values[0].dtype)
        self.w = loc_of(self.weight)
        if isinstance(self.weight, Moments) and self.weight.copies:
            raise copied(name_of(function))
        self.w_variance = self.weight.independent if isinstance(self.weight, Moments) else None
        self.window = -1 - use.form.channel_dim  # how many dimensions a kernel has
        self.groups = int(use.arguments.get("groups", 1))
        self.positions = self._positions()

    def _positions(self) -> list[int]:
        """The dimensions of an input along which the weight is shared, but for the examples."""
        if self.within.correlation == "none" or not self.inputs:
            return []
        dims = self.inputs[0].dim()
        if self.window:
            return list(range(dims - self.window, dims))
        return [dim for dim in range(dims - 1) if dim != self.within.batch_dim(self.inputs[0].shape)]

    # -- products -----------------------------------------------------------------------------------------------------

    def _loc(self) -> Tensor:
        return self.use.call(self.function, self.use.inputs, self.w, bias=True)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same function with another input and weight, and no bias."""
        return self.use.call(self.function, [x], weight, bias=False).to(self.dtype)

    def _product_of_probes(self, common: Tensor) -> Tensor:
        if not self.window:
            return self._product(common, self.w.to(self.dtype))
        return self._product(common.flatten(0, 1), self.w.to(self.dtype)).unflatten(0, (len(common), -1))

    def _compact(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of a value that is the same at all positions, for a kernel that was summed over its window."""
        if self.groups == 1:
            x = x.flatten(-1 - self.window) if self.window else x
            y = F.linear(x, weight.flatten(1).T if self._inputs_first else weight.flatten(1)).to(self.dtype)
            return y.reshape(*y.shape, *[1] * self.window)
        outer = x.shape[: -1 - self.window]
        x = x.reshape(-1, *x.shape[-1 - self.window :])
        y = self.function(x, weight, groups=self.groups).to(self.dtype)
        return y.reshape(*outer, *y.shape[-1 - self.window :])

    def _collapse(self, weight: Tensor, shares: Tensor | None) -> Tensor:
        """Sum a kernel over its window, each tap by its share of the positions."""
        if shares is None:
            return weight
        return (weight * shares).sum(list(range(-self.window, 0)), keepdim=True)

    @property
    def _inputs_first(self) -> bool:
        """Whether the weight has its inputs in front of its outputs."""
        return self.function in _TRANSPOSED or self.form.weight == "other"

    @property
    def _outputs(self) -> int:
        """How many outputs a group has."""
        return self.w.shape[1] if self._inputs_first else self.w.shape[0] // self.groups

    def _mass(self, weight: Tensor) -> Tensor:
        """Sum a weight over all that an input channel meets, in a shape that broadcasts to the input."""
        if self._inputs_first:
            mass = weight.flatten(1).sum(1)
        elif self.window:
            mass = weight.unflatten(0, (self.groups, -1)).flatten(3).sum((1, 3))
        else:
            mass = weight.sum(0)
        return mass.reshape(-1, *[1] * self.window)

    # -- the kinds of layers ------------------------------------------------------------------------------------------

    def look_up(self) -> Moments:
        """Rows of a weight: each has its own noise."""
        variance = self.use.call(self.function, [], self.weight.independent, bias=False)
        return self.like.like(self._loc(), variance)

    def bilinear(self) -> Moments:
        """Σ_ij x_i W_ij y_j with all independent: each input alone, both together, and the weight."""
        x, y = ((loc_of(v).to(self.dtype), v.variance if isinstance(v, Moments) else None) for v in self.inputs)
        w = self.w.to(self.dtype)
        terms = []
        if self.w_variance is not None:
            first, second = (m.square() if v is None else m.square() + v for m, v in (x, y))
            terms.append(F.bilinear(first, second, self.w_variance))
        if x[1] is not None:
            terms.append((torch.einsum("oij,...j->...oi", w, y[0]).square() @ x[1].unsqueeze(-1)).squeeze(-1))
        if y[1] is not None:
            terms.append((torch.einsum("oij,...i->...oj", w, x[0]).square() @ y[1].unsqueeze(-1)).squeeze(-1))
        if x[1] is not None and y[1] is not None:
            terms.append(F.bilinear(x[1], y[1], w.square()))
        return self._with_bias(self._loc(), sum(terms[1:], terms[0]) if terms else None, None)

    def apart(self) -> Moments:
        """Every output has its own weights, or noise is taken to be independent."""
        x = self.inputs[0]
        loc, variance, common = self._loc(), None, None
        squares = self.w.to(self.dtype).square()
        if isinstance(x, Moments):
            variance = self._product(x.independent, squares)
            if x.common is not None:
                common = self._fold(x)
        if self.w_variance is not None:
            second = loc_of(x).to(self.dtype).square()
            if isinstance(x, Moments):
                second = second + x.variance
            own = self._product(second, self.w_variance)
            variance = own if variance is None else variance + own
        return self._with_bias(loc, variance, common)

    def _fold(self, x: Moments) -> Tensor:
        """Take the common part through; where it repeats inside the input's channels, the weight is summed instead."""
        assert x.common is not None
        outer = x.loc.dim() - 1
        if x.is_regular or self.window or self.form.weight == "other" or x.grid[:outer] != tuple(x.shape[:outer]):
            return self._product_of_probes(x.plain().common.expand(-1, *x.shape))  # type: ignore[union-attr]
        inner, own = x.grid[outer:], x.common.shape[1 + outer :]
        repeated = [dim - len(inner) for dim, size in enumerate(own) if size == 1 and inner[dim] != 1]
        weight = self.w.to(self.dtype).unflatten(-1, inner)
        weight = weight.sum(repeated, keepdim=True) if repeated else weight
        return F.linear(x.common.flatten(1 + outer), weight.flatten(1)).to(self.dtype)

    def shared(self) -> Moments:
        """Positions share the weights and their noise, of which a part is the same at all of them."""
        x = self.inputs[0]
        x = x.settled(self.positions) if isinstance(x, Moments) else x
        given, loc = _Given.of(x, self.positions, self.dtype), self._loc()
        shares = self._shares(given.mean.shape, loc.shape)
        common: Tensor | None = None
        if isinstance(x, Moments) and x.common is not None:
            channels = list(x.common.shape)
            channels[self.form.channel_dim] = given.mean.shape[self.form.channel_dim]  # if they have shared one so far
            common = self._compact(x.common.expand(channels), self._collapse(self.w.to(self.dtype), shares))
        few = self._outputs <= _FEW  # then products pixel by pixel cost nothing
        variance, kept = self._by_position(x, given, shares) if few else self._on_average(x, given, shares)
        if kept is not None:
            own = self._probes(kept)
            common = own if common is None else common + own
        return self._with_bias(loc, variance, common)

    def _by_position(self, x: Any, given: "_Given", shares: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the independent variance of each output, and how much of the weights' noise is in common."""
        parts, kept = [], None
        if isinstance(x, Moments):
            parts.append(self._product(x.independent, self.w.to(self.dtype).square()))
        if self.w_variance is not None:
            each = self._product(given.squares, self.w_variance)
            surely = self._compact(given.first, self._collapse(self.w_variance, shares))
            kept = _in_common(surely, each.mean(self.positions, keepdim=True))
            parts.append((each - kept).clamp_min(0))
        return sum(parts[1:], parts[0]), kept

    def _on_average(self, x: Any, given: "_Given", shares: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the same from means along positions: one variance a channel, times where the layer's noise is."""
        averages, masses, kept = [], [], None
        flat = bool(self.window) and not self.within.maps
        if given.alone is not None:
            squares = self.w.to(self.dtype).square()
            averages.append(self._compact(given.alone, self._collapse(squares, shares)))
            if not flat:
                masses.append(x.variance * self._mass(squares))
        if self.w_variance is not None:
            both = torch.stack([given.second, given.first])
            total, surely = self._compact(both, self._collapse(self.w_variance, shares)).unbind(0)
            kept = _in_common(surely, total)
            averages.append(total - kept)
            if not flat:
                masses.append(given.squares * self._mass(self.w_variance))
        average = sum(averages[1:], averages[0])
        return (average if flat else average * self._pattern(sum(masses[1:], masses[0]))), kept

    def _pattern(self, mass: Tensor) -> Tensor:
        """Where a layer's noise is: what its input channels contribute, under the window, with a mean of 1."""
        channel = self.form.channel_dim
        pattern = mass.sum(channel, keepdim=True)
        if self.window:
            window = torch.ones((1, 1, *self.w.shape[-self.window :]), dtype=self.dtype, device=self.w.device)
            how = {name: value for name, value in self.use.arguments.items() if name in _GEOMETRY}
            pattern = self.function(pattern, window, **how).to(self.dtype)
        return pattern / pattern.mean(self.positions, keepdim=True).clamp_min(torch.finfo(self.dtype).tiny)

    def _probes(self, variance: Tensor) -> Tensor:
        """Spread noise of a known variance, independent from channel to channel, over the probes."""
        signs = self.within.next_signs(variance.shape[self.form.channel_dim]).to(variance)
        std = _power(variance, 0.5)
        return std * signs.reshape(len(signs), *[1] * (variance.dim() - 1 - self.window), -1, *[1] * self.window)

    def _with_bias(self, loc: Tensor, variance: Tensor | None, common: Tensor | None) -> Moments:
        if isinstance(self.bias, Moments):
            own = self.bias.variance.to(self.dtype)
            own = own.reshape(-1, *[1] * self.window) if self.window else own
            if self.positions:  # all positions share it
                own = self._probes(own.expand(*[1] * (loc.dim() - 1 - self.window), *own.shape))
                common = own if common is None else common + own
            else:
                variance = own if variance is None else variance + own
        zero = loc.new_zeros((), dtype=self.dtype)
        return self.like.like(loc, (zero if variance is None else variance).expand(loc.shape), common)

    def _shares(self, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor | None:
        """The share of the output positions at which each tap of a kernel meets an input, not padding."""
        if not self.window:
            return None
        settings = self.use.arguments
        transposed = self.function in _TRANSPOSED
        shares = None
        for dim in range(-self.window, 0):
            stride, dilation = _of_dim(settings.get("stride", 1), dim), _of_dim(settings.get("dilation", 1), dim)
            taps = self.w.shape[dim]
            padding = settings.get("padding", 0)
            if isinstance(padding, str):
                padding = 0 if padding == "valid" else dilation * (taps - 1) // 2
            padding = _of_dim(padding, dim)
            ends = (inputs[dim], outputs[dim]) if transposed else (outputs[dim], inputs[dim])
            meets = [_meetings(tap * dilation - padding, stride, *ends) / outputs[dim] for tap in range(taps)]
            along = torch.tensor(meets, dtype=self.dtype, device=self.w.device).reshape(-1, *[1] * (-1 - dim))
            shares = along if shares is None else shares * along
        return shares


def _meetings(start: int, stride: int, steps: int, size: int) -> int:
    """How many of start, start + stride, ... (so many steps) lie in 0 ... size - 1."""
    first = max(0, -(start // stride)) if start < 0 else 0
    last = min(steps - 1, (size - 1 - start) // stride)
    return max(0, last - first + 1)


def _of_dim(setting: int | Sequence[int], dim: int) -> int:
    if isinstance(setting, int):
        return setting
    return setting[dim] if len(setting) > 1 else setting[0]


def _in_common(surely: Tensor, total: Tensor) -> Tensor:
    """How much of a variance all positions share: √(c·t), which is more than the c of their mean alone."""
    return torch.minimum(_power(surely * total, 0.5), total)


def _power(x: Tensor, exponent: float) -> Tensor:
    """x^exponent for x ≥ 0, with a gradient of 0, not infinity, at 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0) ** exponent, 0.0)
