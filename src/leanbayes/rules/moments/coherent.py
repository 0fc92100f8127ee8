"""Layers of coherent passes, whose outputs are maps: the noise of neighboring pixels counts as the same.

Pixels share the weights that their noise comes from, and neighbors have similar inputs, so the noise of a map is
smooth: a convolution adds it up over its window, and interpolation keeps it. As independent noise it would average
out, and in a U-Net a third of the std would be left. The noise of far pixels differs, but a map is not pooled.

So all noise is in the probes. Each of them has the noise and the slopes of one part of the image, so that channels that
are active in the same parts keep their correlation, and together they have the mean covariance of the channels. The
variance differs from pixel to pixel. With tangents t_rc and a kernel summed over its window, an output has the variance

    v̄_o = Σ_r (Σ_c W_oc t_rc)² + Σ_c σ²_oc·mean(m_c² + v_c)

on average, times a pattern. The pattern is Σ_c (ω_c v_c + ς_c (m_c² + v_c)) for all outputs, where ω and ς are sums of
W² and σ² over outputs, times a factor for each output and each cell q of 8 × 8 pixels: there some of the probes are
scaled to the std of the cell,

    v_oq = Σ_r (Σ_c W_oc t_rc √(v_cq / Σ_r t_rc²))² + Σ_c σ²_oc (m²_cq + v_cq).

A layer is so cheap on a map of cells, and which outputs have much noise depends on the place.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.buffers import stored
from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.layer import TRANSPOSED, Layer, Shares
from leanbayes.rules.moments.map_cells import Cells, at_probes, root, similarity
from leanbayes.rules.moments.shared_positions import InputStatistics, of_dim
from leanbayes.rules.moments.value import Moments, shrunk

_PROBES = 16  # that the cells use
_LEAST = 1e-18  # of a divisor, whose square has a reciprocal, so that gradients are finite
_FEW_OF_WINDOW, _FEW_OF_PIXEL = 4, 24  # up to so many outputs have patterns of their own, by the size of the kernel


class CoherentLayer(Layer):
    """One call of a function that is linear in its weight, in a coherent pass."""

    def shared(self) -> Moments:
        """Compute a layer whose positions share the weights and all of their noise."""
        x = self.inputs[0]
        if self.w_variance is None and not isinstance(x, Moments):  # only the bias is random
            return super().shared()
        x = x.settled(self.positions) if isinstance(x, Moments) else x
        mean, loc = loc_of(x).to(self.dtype), self._loc()
        shares = self._shares(mean.shape, loc.shape)
        cells = Cells.of(mean, self.window)
        squares = mean.square()
        of_squares = self._averages(cells, [squares], mean.shape)
        of_variance = None
        if isinstance(x, Moments):
            of_variance = self._averages(cells, x.variances_along(self.form.channel_dim), mean.shape)
        second = of_squares[0] if of_variance is None else of_squares[0] + of_variance[0]
        tangents = None if of_variance is None else self._tangents(x, *of_variance)
        average, common = self._on_average_of(tangents, second, shares, similarity(mean, self.window))
        if self.w_variance is not None:
            parts = (
                [(squares, of_squares)] if of_variance is None else [(squares, of_squares), (x.variance, of_variance)]
            )
            found = [self._at_probes(values, *averages) for values, averages in parts]
            at = sum(found[1:], found[0])
            common = self._with_own(common, self._compact(at, self._collapsed("variance", shares)))
        total = self._normalized(self._fine(x, InputStatistics(mean, squares, second, second, None))) * average
        if cells is not None and tangents is not None:
            assert of_variance is not None
            factor = self._by_cell(cells, of_squares[1], of_variance[1], tangents, shares)
            sizes = loc.shape[-self.window :]
            mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[self.window]
            total = total * F.interpolate(stored(factor), sizes, mode=mode, align_corners=False)
        if isinstance(self.bias, Moments):
            own = self.bias.variance.to(self.dtype)
            own = own.reshape(-1, *[1] * self.window) if self.window else own
            common = self._with_probes(common, own.expand(*[1] * (loc.dim() - 1 - self.window), *own.shape))
            total = total + own
        assert common is not None
        return self.like.like_total(loc, total.expand(loc.shape), common)

    def _averages(
        self, cells: Cells | None, parts: Sequence[Tensor], shape: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean of values over all positions, and over each cell. The parts follow along the channels."""
        dim, joined = self.form.channel_dim, []
        for part in parts:
            if cells is None:
                joined.append(self.within.mean(part, self.positions))
                continue
            sizes = list(shape)
            sizes[dim] = part.shape[dim]
            joined.append(cells.means(part.expand(sizes)))
        found = joined[0] if len(joined) == 1 else torch.cat(joined, dim)
        sizes = list(found.shape)
        sizes[dim] = shape[dim]  # it may be constant along the channels
        found = found.expand(sizes)
        return (found, None) if cells is None else (cells.mean(found), found)

    def _tangents(self, x: Moments, average: Tensor, of_cells: Tensor | None) -> Tensor:
        """Return the probes of the input, with its mean variance."""
        if x.common is None:
            return self._with_own(None, self._at_probes(x.variance, average, of_cells))
        common = x.common.expand(-1, *average.shape)
        return common * root(average / common.square().sum(0).clamp_min(_LEAST))

    def _at_probes(self, values: Tensor, average: Tensor, of_cells: Tensor | None) -> Tensor:
        """Return the mean of values at each probe, given that over all positions, and over the cells if there are."""
        if not self.window:
            return average.unsqueeze(0)
        return at_probes(values if of_cells is None else of_cells, self.window, self.within.probes, of_cells is None)

    def _with_own(self, common: Tensor | None, variance: Tensor) -> Tensor:
        """Add noise that is independent for each channel, given its variance at each probe, to common noise."""
        signs = self.within.next_signs(variance.shape[self.form.channel_dim]).to(variance)
        signs = signs.reshape(len(signs), *[1] * (variance.dim() - 2 - self.window), -1, *[1] * self.window)
        own = root(variance) * signs
        return own if common is None else common + own

    def _on_average_of(
        self, tangents: Tensor | None, second: Tensor, shares: Shares | None, alike: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean variance of each output, and its probes."""
        average, common = None, None
        if tangents is not None:
            found = [self._compact(tangents, kernel) for kernel in self._phases(shares)]
            squares = [part.square().sum(0) for part in found]
            average = sum(squares[1:], squares[0]) / len(found)
            common = sum(found[1:], found[0]) / len(found)
            if alike is not None and shares is not None:
                share = self._share_of_window(alike)
                apart = self._compact(tangents.square().sum(0), self._collapsed("squares", shares))
                average = share * average + (1 - share) * apart
                common = common * share.sqrt()
        if self.w_variance is not None:
            own = self._compact(second, self._collapsed("variance", shares))
            average = own if average is None else average + own
        assert average is not None
        return average, common

    def _share_of_window(self, alike: Tensor) -> Tensor:
        """Return the mean correlation between two places of the window."""
        total, taps = torch.ones_like(alike), 1
        for size in self.w.shape[-self.window :]:
            total = total * (size + sum([2 * (size - lag) * alike**lag for lag in range(1, size)]))
            taps *= size
        return (total - taps) / (taps * (taps - 1)) if taps > 1 else torch.ones_like(alike)

    def _phases(self, shares: Shares | None) -> list[Tensor]:
        """Return the kernel summed over its window; of a transposed convolution, over the taps of each output."""
        if shares is None or self.function not in TRANSPOSED:
            # The variance of a tap has its share of the positions, so its tangent has the root of that.
            return [self._collapsed("mean", shares, 0.5)]
        arguments, dims, dtype = self.use.arguments, range(-self.window, 0), self._dtype_of_products()
        steps = [(of_dim(arguments.get("stride", 1), dim), of_dim(arguments.get("dilation", 1), dim)) for dim in dims]

        def compute() -> Tensor:
            found = [self._kernel("mean")]
            for dim, (stride, dilation) in zip(dims, steps, strict=True):
                phases = torch.arange(found[0].shape[dim], device=self.w.device) * dilation % stride
                masks = [(phases == phase).view(-1, *[1] * (-1 - dim)) for phase in range(stride)]
                found = [(part * mask).sum(dim, keepdim=True) for part in found for mask in masks]
            return torch.stack(found).to(dtype)

        return list(self._once(("phases", *steps, dtype), compute).unbind(0))

    def _fine(self, x: Any, given: InputStatistics) -> Tensor:
        """Return the pattern of each output if there are few, else that of all, up to a factor."""
        if not self._has_few:
            return self._contributions(x, given)
        parts, squares = [], given.squares
        if isinstance(x, Moments):
            parts.append(self._product(x.variance, self._factor("squares")))
            squares = squares + shrunk(x.variance)
        if self.w_variance is not None:
            parts.append(self._product(squares, self._factor("variance")))
        return sum(parts[1:], parts[0])

    @property
    def _has_few(self) -> bool:
        """Whether there are so few outputs that products with a map of variances are cheap."""
        taps = math.prod(self.w.shape[-self.window :]) if self.window else 1
        return self._outputs <= (_FEW_OF_PIXEL if taps == 1 else _FEW_OF_WINDOW)

    def _by_cell(
        self, cells: Cells, squares: Tensor | None, variance: Tensor | None, tangents: Tensor, shares: Shares | None
    ) -> Tensor:
        """Return by how much the variance of an output in a cell exceeds what its pattern says there, (b, o, cells)."""
        assert squares is not None
        assert variance is not None
        few = tangents[:: max(1, len(tangents) // _PROBES)]  # from all parts of the image
        unit = few * few.square().sum(0).clamp_min(_LEAST).rsqrt()
        tangent = unit * root(variance)
        exact = sum([self._at_cells(tangent, kernel).square().sum(0) for kernel in self._phases(shares)])
        assert isinstance(exact, Tensor)
        if self._has_few:
            pattern = self._at_cells(variance, self._collapsed("squares", shares))
        else:
            pattern = self._over_channels(variance, self._mass("squares"))
        if self.w_variance is not None:
            second = squares + variance
            own = self._at_cells(second, self._collapsed("variance", shares))
            exact = exact / len(self._phases(shares)) + own
            pattern = pattern + (own if self._has_few else self._over_channels(second, self._mass("variance")))
        exact, pattern = (part / cells.mean(part).clamp_min(_LEAST) for part in (exact, pattern))
        return exact / pattern.clamp_min(_LEAST)

    def _at_cells(self, values: Tensor, kernel: Tensor) -> Tensor:
        """Multiply each cell by a kernel that is summed over its window."""
        outer, sizes = values.shape[: -1 - self.window], values.shape[-self.window :]
        if self.groups == 1:
            weight = kernel.flatten(1) if not self._inputs_first else kernel.flatten(1).T
            product = weight @ values.flatten(-self.window)
            return product.reshape(*outer, -1, *sizes).to(self.dtype)
        y = self.function(values.reshape(-1, *values.shape[-1 - self.window :]), kernel, groups=self.groups)
        return y.reshape(*outer, *y.shape[-1 - self.window :]).to(self.dtype)
