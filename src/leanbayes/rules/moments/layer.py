"""Layers: functions that are linear in a weight, with noise in the weight, in the input, or in both.

For independent elements this is exact:

    m_y = W m + b,      v_y = W² v + σ² (m² + v),      σ² the variance of the weight.

If many positions (pixels, tokens) share a weight, they share its noise. At output channel o the noise of the weight
has the variance t = Σ σ²(m² + v), and its mean over the positions has the variance c = Σ σ²(x̄² + ...), where x̄ is the
mean of an input channel. So at least c is common. The rest is not independent either, because neighboring positions are
similar: √(c·t̄) is treated as common, the geometric mean of c and the total. It is distributed over signed probes. Noise
that comes in through the probes is multiplied by W like any tangent, which keeps correlations between channels and
branches.

So v_y does not need its own convolutions for each channel at each pixel: its mean over the positions, from products of
means, times one pattern of positions for all channels is as good (docs/one_pass.md) and cheap. If a network pools its
pixels, it does not even need the pattern (`Pass.maps`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.buffers import exact_products, spent
from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.map_cells import root
from leanbayes.rules.moments.registry import copied, mixed, name_of
from leanbayes.rules.moments.shared_positions import InputStatistics, common_variance, count_inside, of_dim
from leanbayes.rules.moments.value import Moments, shrunk, variance_dtype
from leanbayes.rules.random_weight import LinearUse

TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_HALVED = {F.linear, F.conv1d, F.conv2d, F.conv3d, *TRANSPOSED}  # functions whose arguments autocast rounds
_GEOMETRY = {"stride", "padding", "dilation", "output_padding"}
Shares = tuple[tuple[float, ...], ...]  # for each dimension of a kernel, one share of the positions per tap
Variance = Tensor | tuple[Tensor, Tensor]  # or two factors of it
_FEW = 4  # up to so many output channels per group, the variance is computed pixel by pixel


class Layer:
    """One call of a function that is linear in its weight."""

    def __init__(self, function: Callable[..., Any], use: LinearUse, positions: list[int] | None = None) -> None:
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
        if isinstance(self.weight, Moments) and self.weight.mixed:
            raise mixed(name_of(function))
        self.w_variance = self.weight.variance if isinstance(self.weight, Moments) else None
        self.window = -1 - use.form.channel_dim  # number of dimensions of a kernel
        self.groups = int(use.arguments.get("groups", 1))
        self.positions = self._positions() if positions is None else positions

    def _positions(self) -> list[int]:
        """Return the dimensions of an input along which the weight is shared, except for the examples."""
        if self.within.correlation == "none" or not self.inputs:
            return []
        dims = self.inputs[0].dim()
        if self.window:
            return list(range(dims - self.window, dims))
        return [dim for dim in range(dims - 1) if dim != self.within.batch_dim(self.inputs[0].shape)]

    # -- products -----------------------------------------------------------------------------------------------------

    def _loc(self) -> Tensor:
        weight = self.w if self._dtype_of_products() == self.dtype else self._factor("mean")
        return self.use.call(self.function, self.use.inputs, weight, bias=True)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Call the function with another input and weight, without the bias."""
        return self.use.call(self.function, [x], weight, bias=False).to(self.dtype)

    def _product_of_probes(self, common: Tensor) -> Tensor:
        weight = self._factor("mean")
        if not self.window:
            return self._product(common, weight)
        return self._product(common.flatten(0, 1), weight).unflatten(0, (len(common), -1))

    def _compact(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply a value that is the same at all positions by a kernel that is summed over its window."""
        if self.groups == 1:
            x = x.flatten(-1 - self.window) if self.window else x
            y = F.linear(x, weight.flatten(1).T if self._inputs_first else weight.flatten(1)).to(self.dtype)
            return y.reshape(*y.shape, *[1] * self.window) if self.window else y
        outer = x.shape[: -1 - self.window]
        x = x.reshape(-1, *x.shape[-1 - self.window :])
        y = self.function(x, weight, groups=self.groups).to(self.dtype)
        return y.reshape(*outer, *y.shape[-1 - self.window :])

    def _collapsed(self, kind: str, shares: Shares | None, power: float = 1.0) -> Tensor:
        """Sum a kernel ("mean", "squares" of the mean, or "variance") over its window, as a factor of products.

        Each tap is weighted by a power of its share of the positions. Passes share the result.
        """
        if shares is None:
            return self._factor(kind)
        shares = tuple([tuple([share**power for share in along]) for along in shares])
        dtype = self._dtype_of_products()
        return self._once((kind, shares, dtype), lambda: self._weighted(self._kernel(kind), shares).to(dtype))

    def _factor(self, kind: str) -> Tensor:
        """Return a kernel in the precision of products. Passes share it unless it is there already."""
        dtype = self._dtype_of_products()
        if dtype == self.dtype and kind != "squares":
            return self._kernel(kind)
        return self._once((kind, dtype), lambda: self._kernel(kind).to(dtype))

    def _dtype_of_products(self) -> torch.dtype:
        device = self.w.device.type
        if self.function in _HALVED and self.dtype == torch.float32 and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.dtype

    def _kernel(self, kind: str) -> Tensor:
        if kind == "variance":
            assert self.w_variance is not None
            return self.w_variance
        return self.w.to(self.dtype).square() if kind == "squares" else self.w.to(self.dtype)

    def _weighted(self, kernel: Tensor, shares: Shares) -> Tensor:
        for dim, along in zip(range(-self.window, 0), shares, strict=True):
            if any(share != 1 for share in along):
                factors = torch.tensor(along, dtype=self.dtype, device=self.w.device)
                kernel = kernel * factors.reshape(-1, *[1] * (-1 - dim))
        return kernel.sum(list(range(-self.window, 0)), keepdim=True)

    def _once(self, key: Any, compute: Callable[[], Tensor]) -> Tensor:
        """Return what passes share as long as the weight does not change; `compute` it if no pass has so far.

        Compiled code reads what eager passes have computed (`compiled_passes`).
        """
        known = self.weight.derived if isinstance(self.weight, Moments) else None
        if known is None or torch.is_grad_enabled():
            return compute()
        if key not in known:
            if torch.compiler.is_compiling():
                return compute()
            known[key] = compute()
        return known[key]

    @property
    def _inputs_first(self) -> bool:
        """Whether the input dimension of the weight comes before its output dimension."""
        return self.function in TRANSPOSED or self.form.weight == "other"

    @property
    def _outputs(self) -> int:
        """The number of outputs per group."""
        return self.w.shape[1] if self._inputs_first else self.w.shape[0] // self.groups

    def _mass(self, kind: str) -> Tensor:
        """Sum a kernel over all elements that multiply an input channel, (channels,)."""

        def compute() -> Tensor:
            weight = self._kernel(kind)
            if self._inputs_first:
                return weight.flatten(1).sum(1)
            if self.window:
                return weight.unflatten(0, (self.groups, -1)).flatten(3).sum((1, 3))
            return weight.sum(0)

        return self._once((kind, self._inputs_first, self.groups), compute).reshape(-1)

    # -- the kinds of layers ------------------------------------------------------------------------------------------

    def look_up(self) -> Moments:
        """Look up rows of a weight, each with its own noise."""
        variance = self.use.call(self.function, [], self.weight.independent, bias=False)
        return self.like.like(self._loc(), variance)

    def bilinear(self) -> Moments:
        """Compute Σ_ij x_i W_ij y_j of independent values: each input alone, both together, and the weight."""
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
        """Compute a layer with separate weights for each output, or with independent noise."""
        x = self.inputs[0]
        loc, variance, common = self._loc(), None, None
        if isinstance(x, Moments):
            variance = self._product(x.independent, self._factor("squares"))
            if x.common is not None:
                common = self._fold(x)
        if self.w_variance is not None:
            second = loc_of(x).to(self.dtype).square()
            if isinstance(x, Moments):
                second = second + x.variance
            own = self._product(second, self._factor("variance"))
            variance = own if variance is None else variance + own
        return self._with_bias(loc, variance, common)

    def _fold(self, x: Moments) -> Tensor:
        """Multiply the common part by the weight; if it repeats inside the input channels, sum the weight instead."""
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
        """Compute a layer whose positions share the weights and a part of their noise."""
        x = self.inputs[0]
        x = x.settled(self.positions) if isinstance(x, Moments) else x
        given = InputStatistics.of(x, self.positions, self.dtype, self.within, self.form.channel_dim)
        loc = self._loc()
        shares = self._shares(given.mean.shape, loc.shape)
        few = self._outputs <= _FEW  # then products pixel by pixel are cheap
        variance, kept = self._by_position(x, given, shares) if few else self._on_average(x, given, shares)
        channels = given.mean.shape[self.form.channel_dim]
        del given  # it is large
        common: Tensor | None = None
        if isinstance(x, Moments) and x.common is not None:
            sizes = list(x.common.shape)
            sizes[self.form.channel_dim] = channels  # if it is constant along them
            common = self._compact(x.common.expand(sizes), self._collapsed("mean", shares))
        if kept is not None:
            common = self._with_probes(common, kept)
        return self._with_bias(loc, variance, common)

    def _by_position(self, x: Any, given: InputStatistics, shares: Shares | None) -> tuple[Tensor, Tensor | None]:
        """Return the independent variance of each output, and the common variance of the weights' noise."""
        parts, kept = [], None
        if isinstance(x, Moments):
            parts.append(self._product(x.independent, self._factor("squares")))
        if self.w_variance is not None:
            squares = given.squares + shrunk(x.variance) if isinstance(x, Moments) else given.squares
            each = self._product(squares, self._factor("variance"))
            of_mean = self._compact(given.first, self._collapsed("variance", shares))
            kept = common_variance(of_mean, self.within.mean(each, self.positions))
            parts.append((each - kept).clamp_min(0))
        return sum(parts[1:], parts[0]), kept

    def _on_average(self, x: Any, given: InputStatistics, shares: Shares | None) -> tuple[Variance, Tensor | None]:
        """Return the same from means over positions: one variance per channel, and as a factor the noise's pattern."""
        averages, kept = [], None
        if given.alone is not None:
            averages.append(self._compact(given.alone, self._collapsed("squares", shares)))
        if self.w_variance is not None:
            both = torch.stack([given.second, given.first])
            total, of_mean = self._compact(both, self._collapsed("variance", shares)).unbind(0)
            kept = common_variance(of_mean, total)
            averages.append(total - kept)
        average = sum(averages[1:], averages[0])
        flat = bool(self.window) and not self.within.maps
        return (average if flat else (average, self._pattern(x, given))), kept

    def _pattern(self, x: Any, given: InputStatistics) -> Tensor:
        """Return the pattern of a layer's noise over positions, with a mean of 1."""
        return self._normalized(self._contributions(x, given))

    def _normalized(self, pattern: Tensor) -> Tensor:
        return pattern / self.within.mean(pattern, self.positions).clamp_min(torch.finfo(self.dtype).tiny)

    def _contributions(self, x: Any, given: InputStatistics) -> Tensor:
        """Return the sum of the contributions of all inputs to the variance of all outputs, at each position."""
        parts = []
        if self.w_variance is not None:
            parts.append(self._over_channels(given.squares, self._mass("variance")))
        if isinstance(x, Moments):
            mass = self._mass("squares")
            mass = mass if self.w_variance is None else mass + self._mass("variance")
            variances = x.variances_along(self.form.channel_dim)
            if len(variances) == 1:  # which may be constant along the channels
                parts.append(self._over_channels(variances[0], mass))
            else:
                masses = mass.split([piece.shape[self.form.channel_dim] for piece in variances])
                parts += [self._over_channels(*pair) for pair in zip(variances, masses, strict=True)]
        sizes = list(given.mean.shape)
        sizes[self.form.channel_dim] = 1
        pattern = sum(parts[1:], parts[0]).expand(sizes)
        if self.window:
            window = torch.ones((1, 1, *self.w.shape[-self.window :]), dtype=self.dtype, device=self.w.device)
            geometry = {name: value for name, value in self.use.arguments.items() if name in _GEOMETRY}
            pattern = self.function(pattern, window, **geometry).to(self.dtype)
        return pattern

    def _over_channels(self, values: Tensor, factors: Tensor) -> Tensor:
        """Sum values over their channels, each with its own factor."""
        sizes = list(values.shape)
        sizes[self.form.channel_dim] = len(factors)  # if they are constant along them
        values = values.expand(sizes)
        if torch.compiler.is_compiling():
            # The compiler computes the values inside of this sum. A matrix product would need them in memory.
            factors = factors.reshape(-1, *[1] * self.window)
            return (values * factors).sum(self.form.channel_dim, keepdim=True)
        with exact_products(values):
            if not self.window:
                return (values @ factors).unsqueeze(-1)
            sums = factors.reshape(1, -1) @ values.flatten(-self.window)
            return sums.unflatten(-1, values.shape[-self.window :])

    def _with_probes(self, common: Tensor | None, variance: Tensor) -> Tensor:
        """Add noise of a given variance, independent for each channel, to common noise, distributed over its probes."""
        signs = self.within.next_signs(variance.shape[self.form.channel_dim]).to(variance)
        signs = signs.reshape(len(signs), *[1] * (variance.dim() - 1 - self.window), -1, *[1] * self.window)
        std = root(variance)
        if common is None:
            return std * signs
        sizes = zip(reversed(variance.shape), reversed(common.shape), strict=False)
        fits = variance.dim() < common.dim() and all([own in (1, size) for own, size in sizes])
        return torch.addcmul(common, std, signs, out=spent(common) if fits else None)

    def _with_bias(self, loc: Tensor, variance: Variance | None, common: Tensor | None) -> Moments:
        if isinstance(self.bias, Moments):
            own = self.bias.variance.to(self.dtype)
            own = own.reshape(-1, *[1] * self.window) if self.window else own
            if self.positions:  # all positions share the bias
                common = self._with_probes(common, own.expand(*[1] * (loc.dim() - 1 - self.window), *own.shape))
            else:
                assert not isinstance(variance, tuple)
                variance = own if variance is None else variance + own
        if isinstance(variance, tuple):
            return self.like.like_product(loc, variance, common)
        variance = loc.new_zeros((), dtype=self.dtype) if variance is None else variance
        return self.like.like(loc, variance.expand(loc.shape), common)

    def _shares(self, inputs: Sequence[int], outputs: Sequence[int]) -> Shares | None:
        """Return the fraction of the output positions at which each tap of a kernel has an input, not padding."""
        if not self.window:
            return None
        settings = self.use.arguments
        transposed = self.function in TRANSPOSED
        shares = []
        for dim in range(-self.window, 0):
            stride, dilation = of_dim(settings.get("stride", 1), dim), of_dim(settings.get("dilation", 1), dim)
            taps = self.w.shape[dim]
            padding = settings.get("padding", 0)
            if isinstance(padding, str):
                padding = 0 if padding == "valid" else dilation * (taps - 1) // 2
            padding = of_dim(padding, dim)
            ends = (inputs[dim], outputs[dim]) if transposed else (outputs[dim], inputs[dim])
            counts = [count_inside(tap * dilation - padding, stride, *ends) for tap in range(taps)]
            shares.append(tuple(count / outputs[dim] for count in counts))
        return tuple(shares)
