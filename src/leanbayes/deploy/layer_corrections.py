"""Corrections of single layers in one-pass prediction, measured without labels against samples of the weights.

After each layer, one pass has a mean m and a std s, and samples have m̂ and ŝ. Its correction, m -> a·m + δ·s and
s² -> f·s², has one a for the layer, and one δ and f per channel. With sums over examples and positions:

    a = the slope of m̂ on m, given s, by least squares over all channels,
    δ = Σ (m̂ - a·m) / Σ s,      f = Σ ŝ² / Σ s².

So the mean and the variance of each channel, averaged over the inputs, are those of the samples. The layers are
corrected in the order in which they run: a layer is measured after all earlier layers of the pass are corrected, so
that no error is corrected twice.

The inputs go through the network in small parts, each with its own samples of the weights, because the noise of one
sample is the same for all inputs. Each part corrects its own pass, and the sums over all parts give the result. What
differs between the parts is noise. By its share of the variance between the channels, δ and log f are moved to their
means over the layer, and a to 1 (James and Stein 1961), so that a layer whose moments are right stays as it is. Memory
holds the outputs of the layers for one part, and sums per channel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leanbayes.core.network import call_with, inputs_of, map_rows, tensors_of
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.accumulators import Running
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import MomentPropagation, Moments, PassContext
from leanbayes.rules.moments.correction import Correction
from leanbayes.rules.multi_head_attention import multi_head_attention_forward
from leanbayes.rules.random_weight import form_of, is_linear_in_weight

_LARGEST_PART, _PARTS = 32, 8  # most inputs that share their samples of the weights, and least number of parts
_LEAST = 1e-30

Progress = Callable[[int, int], None]  # gets the number of inputs that are done, and of all inputs


@torch.no_grad()
def correct_layers(
    bnn: BayesianModel,
    batches: Iterable[Any],
    samples: int,
    inputs: int,
    generator: torch.Generator | None,
    progress: Progress | None = None,
    kind: "type[Layer] | None" = None,
) -> dict[str, Tensor]:
    """Measure the correction of each layer on the first inputs, by the names of the weights; the model is unchanged.

    `kind` is the form of the corrections: `Layer`, or a subclass.
    """
    made = bnn.method.make_rule("moments")
    assert isinstance(made, MomentPropagation)
    parts = list(small_parts(list(batches), inputs, bnn.batch_first))
    layers: dict[int, Layer] = {}
    done, total = 0, sum(rows for _, rows in parts)
    for x, rows in parts:
        rule = _Measuring(made.correlation, made.activations, made.maps)
        rule.measure(_sampled(bnn, x, samples, generator), layers, kind or Layer)
        with bnn.using(rule), bnn.frozen(0):
            call_with(bnn, x)
        done += rows
        if progress is not None:
            progress(done, total)
    names = [slot.name for slot in bnn.layout]
    found = {names[number]: layers[number].correction().stacked().float() for number in sorted(layers)}
    if any(not correction.isfinite().all() for correction in found.values()):
        raise LeanBayesError("The outputs of a layer contain NaN or infinity: clean the inputs of calibrate().")
    return found


def small_parts(batches: Sequence[Any], inputs: int, batch_first: bool) -> Iterator[tuple[Any, int]]:
    """Yield the first inputs of the batches in small parts, with the number of inputs in each.

    Batches whose first dimension may be time are not cut.
    """
    xs = [inputs_of(batch) for batch in batches]
    sizes = [_count(x) for x in xs]
    left = min(inputs, sum(sizes))
    if not batch_first:
        yield from zip(xs, sizes, strict=True)
        return
    part = min(_LARGEST_PART, -(-left // _PARTS))
    for x, rows in zip(xs, sizes, strict=True):
        for start in range(0, min(rows, left), part):
            count = min(part, min(rows, left) - start)
            yield map_rows(partial(_rows, start, count), x, rows), count
        left -= min(rows, left)


def _count(x: Any) -> int:
    first = next(tensors_of(x), None)
    return 0 if first is None or first.dim() == 0 else len(first)


def _rows(start: int, count: int, tensor: Tensor) -> Tensor:
    return tensor[start : start + count]


# -- samples ----------------------------------------------------------------------------------------------------------


def _sampled(
    bnn: BayesianModel, x: Any, samples: int, generator: torch.Generator | None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return mean and variance over samples of the output of each layer that runs once, by the slot of its weight."""
    layers: dict[int, Running] = {}
    with bnn.using("sample"):
        for number in range(samples):
            with bnn.drawn(bnn.next_draw(generator, number)) as call, _Watching(bnn.values) as watching:
                call_with(call, x)
            for slot, outputs in watching.outputs.items():
                if len(outputs) == 1:  # a weight that is used twice belongs to two layers
                    layers.setdefault(slot, Running()).update(outputs[0])
    return {slot: (layer.mean, layer.squares / (samples - 1)) for slot, layer in layers.items()}


class _Watching(TorchFunctionMode):
    """Collect the outputs of functions that are linear in one of the given weights."""

    def __init__(self, weights: Sequence[Any]) -> None:
        super().__init__()
        self._slots = {id(weight): number for number, weight in enumerate(weights)}
        self.outputs: dict[int, list[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # its parts use the weights
            with self:
                return multi_head_attention_forward(*args, **kwargs)
        output = func(*args, **kwargs)
        if is_linear_in_weight(func):
            form = form_of(func)
            arguments = {**dict(zip(form.parameters, args, strict=False)), **kwargs}
            slot = self._slots.get(id(arguments[form.weight]))
            if slot is not None:
                self.outputs.setdefault(slot, []).append(output)
        return output


# -- one pass ---------------------------------------------------------------------------------------------------------


class Sums:
    """Sums over examples and positions, (channels,) each, of m, m̂, s, s², ŝ² and products."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values

    @classmethod
    def of(cls, y: Moments, mean: Tensor, variance: Tensor, channel_dim: int) -> "Sums":
        """Sum the output of a layer: its moments, and its mean and variance over samples."""
        m, v = y.loc.double(), y.variance.double().expand_as(y.loc)
        t, s = mean.double(), v.sqrt()
        terms = {"m": m, "t": t, "s": s, "ss": v, "tv": variance.double()}
        terms |= {"mm": m * m, "mt": m * t, "ms": m * s, "ts": t * s}
        return cls({name: term.movedim(channel_dim, -1).flatten(0, -2).sum(0) for name, term in terms.items()})

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums over both."""
        return Sums({name: value + other.values[name] for name, value in self.values.items()})

    @property
    def random(self) -> Tensor:
        """Whether each channel has a variance, by one pass and by samples."""
        return (self.values["ss"] > _LEAST) & (self.values["tv"] > _LEAST)

    def gain(self) -> Tensor:
        """Return the slope of m̂ on m, given s, by least squares over all channels."""
        v, ss = self.values, self.values["ss"].clamp_min(_LEAST)
        slope = torch.where(self.random, v["mt"] - v["ms"] * v["ts"] / ss, 0.0).sum()
        power = torch.where(self.random, v["mm"] - v["ms"].square() / ss, 0.0).sum()
        return torch.where(power > _LEAST, slope / power.clamp_min(_LEAST), 1.0)

    def shift(self, gain: Tensor) -> Tensor:
        """Return the shift of each channel, given the gain."""
        shift = (self.values["t"] - gain * self.values["m"]) / self.values["s"].clamp_min(_LEAST)
        return torch.where(self.random, shift, 0.0)

    def log_factor(self) -> Tensor:
        """Return the logarithm of the factor of each channel."""
        ratio = self.values["tv"].clamp_min(_LEAST) / self.values["ss"].clamp_min(_LEAST)
        return torch.where(self.random, ratio.log(), 0.0)

    def correction(self) -> Correction:
        """Return the correction that matches these sums; channels without variance are left alone."""
        gain = self.gain()
        return self.correction_of(gain, self.shift(gain), self.log_factor())

    def correction_of(self, gain: Tensor, shift: Tensor, log_factor: Tensor) -> Correction:
        """Return a correction with these values for the channels that have a variance."""
        gains = torch.where(self.random, gain, torch.ones_like(shift))
        return Correction(gains, torch.where(self.random, shift, 0.0), torch.where(self.random, log_factor, 0.0).exp())


class Layer:
    """One layer: the sums over all parts of the inputs, and how much its correction varies between the parts."""

    def __init__(self) -> None:
        self._sums: Sums | None = None
        self._gains, self._shifts, self._logs = Running(), Running(), Running()

    def add(self, part: Sums) -> Correction:
        """Add one part of the inputs, and return the correction of this part."""
        self._sums = part if self._sums is None else self._sums.plus(part)
        gain = part.gain()
        values = gain, part.shift(gain), part.log_factor()
        for running, value in zip((self._gains, self._shifts, self._logs), values, strict=True):
            running.update(value)
        return part.correction_of(*values)

    def correction(self) -> Correction:
        """Return the correction from all parts."""
        assert self._sums is not None
        found = self._sums.gain() - 1
        gain = 1 + found * _signal(found.square(), _noise(self._gains))
        shift, logs = self._sums.shift(gain), self._sums.log_factor()
        return self._sums.correction_of(gain, self._shrunk(shift, self._shifts), self._shrunk(logs, self._logs))

    def _shrunk(self, values: Tensor, parts: Running) -> Tensor:
        """Move the values of the channels to their mean, by the share of their variance that is noise."""
        assert self._sums is not None
        random = self._sums.random
        if random.sum() <= 1:
            return values
        mean = values[random].mean()
        return mean + (values - mean) * _signal(values[random].var(), _noise(parts).expand_as(values)[random].mean())


def _noise(parts: Running) -> Tensor:
    """Return the variance of the mean over parts, or 0 if there is only one."""
    return parts.squares / max(1, parts.count - 1) / parts.count


def _signal(total: Tensor, noise: Tensor) -> Tensor:
    """Return the share of a variance that is not noise."""
    return (1 - noise / total.clamp_min(_LEAST)).clamp_min(0)


class _Measuring(MomentPropagation):
    """Moment propagation that compares each layer with samples, and corrects it before the next one."""

    _sampled: dict[int, tuple[Tensor, Tensor]]
    _layers: dict[int, Layer]
    _kind: type[Layer]

    def measure(self, sampled: dict[int, tuple[Tensor, Tensor]], layers: dict[int, Layer], kind: type[Layer]) -> None:
        """Compare the next pass with the mean and variance of samples, and add it to the layers."""
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_sampled", sampled)
        object.__setattr__(self, "_layers", layers)

    def begin(self, values: Sequence[Any], context: PassContext) -> None:
        super().begin(values, context)
        for slot, value in enumerate(values):
            if isinstance(value, Moments) and slot in self._sampled:
                value.correction = partial(self._corrected, slot)

    def _corrected(self, slot: int, y: Moments, channel_dim: int) -> Moments:
        part = Sums.of(y, *self._sampled[slot], channel_dim)
        return self._layers.setdefault(slot, self._kind()).add(part)(y, channel_dim)
