"""Ways to predict with one model, and what each says about each example: probabilities, and variances of the logits.

Classes are the last dimension. Dense predictions have one row per pixel, of some pixels of each image.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from mean_network import PIXELS
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.network import call_with, evaluation_mode, output_tensor
from leanbayes.deploy.layer_corrections import Layer, Sums, correct_layers
from leanbayes.model.pass_result import summarized
from leanbayes.rules import Moments, Rule
from leanbayes.rules.moments.correction import Correction

LEAST = 1e-30
CHUNK = 25  # samples whose logits are in memory at once

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Predicted:
    """What one predictor says, one row per example; the last two are None for predictors without a variance.

    Attributes:
        probs: The probabilities, (rows, classes).
        mutual_information: (rows,).
        variance: The variance of each logit, (rows, classes).
        margin: The variance of the difference of the two logits that are largest at the posterior mean, (rows,).
    """

    probs: Tensor
    mutual_information: Tensor
    variance: Tensor | None = None
    margin: Tensor | None = None

    def first(self, rows: int) -> "Predicted":
        """Return the first rows."""
        columns = (getattr(self, field.name) for field in fields(self))
        return Predicted(*(None if column is None else column[:rows] for column in columns))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence["Predicted"]) -> "Predicted":
        """Concatenate the rows."""
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


class Rows:
    """Cuts outputs and labels of one model into rows."""

    def __init__(self, bnn: lb.BayesianModel) -> None:
        assert isinstance(bnn.likelihood, lb.Categorical)
        self.class_dim = bnn.likelihood.class_dim

    def logits(self, values: Tensor) -> Tensor:
        """Return rows of values that have a dimension of classes: (rows, classes)."""
        values = values.movedim(self.class_dim, -1)
        return values if values.dim() == 2 else _some(values.flatten(1, -2))

    def others(self, values: Tensor) -> Tensor:
        """Return rows of values without classes, such as labels: (rows,)."""
        return values if values.dim() == 1 else _some(values.flatten(1))


def _some(pixels: Tensor) -> Tensor:
    """Return some pixels of each image, (images, pixels, ...), as rows."""
    step = -(-pixels.shape[1] // PIXELS) | 1  # odd, so that it covers all columns of images of common widths
    return pixels[:, ::step].flatten(0, 1)


class Set:
    """Some images: their batches on the device of the model, labels by row, and the two largest mean logits."""

    def __init__(self, bnn: lb.BayesianModel, batches: Sequence[Batch]) -> None:
        self.rows = Rows(bnn)
        self.inputs = [x for x, _ in batches]
        self.labels = torch.cat([self.rows.others(y) for _, y in batches]).cpu()
        self.images = sum(len(x) for x in self.inputs)
        plain = [bnn.predict(x, rule="mean", keep_outputs=True).outputs[0] for x in self.inputs]
        self.means = [self.rows.logits(output).double() for output in plain]
        self.pairs = [mean.topk(2, -1).indices for mean in self.means]

    def first(self, images: int) -> "Set":
        """Return the first images, in whole batches."""
        part: Set = object.__new__(Set)
        kept, part.images = 0, 0
        for x in self.inputs:
            if part.images >= images:
                break
            kept, part.images = kept + 1, part.images + len(x)
        part.rows, part.inputs = self.rows, self.inputs[:kept]
        part.means, part.pairs = self.means[:kept], self.pairs[:kept]
        part.labels = self.labels[: sum(len(mean) for mean in part.means)]
        return part


def by_rule(bnn: lb.BayesianModel, images: Set, rule: str | Rule) -> Predicted:
    """Predict without samples. A predictor of `Moments` also has variances."""
    parts = []
    for x, pair in zip(images.inputs, images.pairs, strict=True):
        variance, margin = None, None
        if rule == "mean":
            prediction = bnn.predict(x, rule=rule)
        else:
            output = _moments(bnn, x, rule)
            prediction = summarized(bnn, output).prediction  # as `predict` does, which would run the network again
            variance = images.rows.logits(output.variance).double()
            margin = _margin_variance(output, images.rows, pair)
        probs, information = images.rows.logits(prediction.probs), images.rows.others(prediction.mutual_information)
        parts.append(_on_cpu(probs, information, variance, margin))
    return Predicted.joined(parts)


def _moments(bnn: lb.BayesianModel, x: Tensor, rule: str | Rule) -> Moments:
    """Return the moments of the outputs that a prediction uses."""
    with torch.no_grad(), bnn.using(rule), evaluation_mode(bnn):
        used, output = bnn.current_rule, output_tensor(call_with(bnn, x))
        if used.mean_rule is None:
            return output
        with bnn.using(used.mean_rule):
            return used.combined(output, output_tensor(call_with(bnn, x)), bnn.class_dim, bnn.moment_margins)


def _margin_variance(output: Moments, rows: Rows, pair: Tensor) -> Tensor:
    """Return the variance of the difference of two logits: independent noise adds up, common noise may cancel."""
    output = output.plain()
    if output.within.coherent and output.common is not None:
        return _coherent_margin(output, rows, pair)
    variance = rows.logits(output.independent).double().gather(-1, pair).sum(-1)
    if output.common is not None:
        for probe in output.common:
            two = rows.logits(probe.expand_as(output.loc)).double().gather(-1, pair)
            variance = variance + (two[:, 0] - two[:, 1]).square()
    return variance


def _coherent_margin(output: Moments, rows: Rows, pair: Tensor) -> Tensor:
    """Return the same of a coherent pass, whose common noise has the correlation of the two."""
    assert output.common is not None
    stds = rows.logits(output.variance).double().gather(-1, pair).sqrt()
    sums = torch.zeros(3, len(pair), dtype=torch.float64, device=pair.device)
    for probe in output.common:
        first, second = rows.logits(probe.expand_as(output.loc)).double().gather(-1, pair).unbind(-1)
        sums += torch.stack([first * second, first.square(), second.square()])
    correlation = sums[0] / (sums[1] * sums[2]).sqrt().clamp_min(LEAST)
    return (stds.square().sum(-1) - 2 * correlation * stds.prod(-1)).clamp_min(0)


def _on_cpu(*parts: Tensor | None) -> Predicted:
    return Predicted(*(None if part is None else part.cpu() for part in parts))  # type: ignore[arg-type]


# -- samples ----------------------------------------------------------------------------------------------------------


class _Running:
    """Sums over samples of one batch, in double precision; logits are relative to those of the mean network."""

    def __init__(self, mean: Tensor, pair: Tensor) -> None:
        self.mean, self.pair, self.count = mean, pair, 0
        self.probs, self.logits, self.squares = (torch.zeros_like(mean) for _ in range(3))
        self.entropy, self.margin, self.margin_squares = (torch.zeros_like(mean[:, 0]) for _ in range(3))

    def add(self, logits: Tensor) -> None:
        """Add one sample, (rows, classes)."""
        logits = logits.double()
        probs, difference = logits.softmax(-1), logits - self.mean
        two = difference.gather(-1, self.pair)
        margin = two[:, 0] - two[:, 1]
        self.count += 1
        for total, value in (
            (self.probs, probs),
            (self.entropy, torch.special.entr(probs).sum(-1)),
            (self.logits, difference),
            (self.squares, difference.square()),
            (self.margin, margin),
            (self.margin_squares, margin.square()),
        ):
            total += value

    def predicted(self) -> Predicted:
        """Return the prediction from the samples so far."""
        probs, n = self.probs / self.count, self.count
        information = torch.special.entr(probs).sum(-1) - self.entropy / n
        variance = (self.squares - self.logits.square() / n) / (n - 1)
        margin = (self.margin_squares - self.margin.square() / n) / (n - 1)
        return _on_cpu(probs, information.clamp_min(0), variance.clamp_min(0), margin.clamp_min(0))


def by_samples(bnn: lb.BayesianModel, images: Set, counts: Sequence[int], seed: int) -> Iterator[tuple[int, Predicted]]:
    """Yield the predictions from increasing numbers of samples of one stream. All images share the samples."""
    sums = [_Running(mean, pair) for mean, pair in zip(images.means, images.pairs, strict=True)]
    done = 0
    for count in counts:
        while done < count:
            samples = min(CHUNK, count - done)
            for x, running in zip(images.inputs, sums, strict=True):
                generator = torch.Generator().manual_seed(1_000_003 * seed + done)
                outputs = bnn.predict(x, rule="sample", samples=samples, generator=generator, keep_outputs=True).outputs
                for output in outputs:
                    running.add(images.rows.logits(output))
            done += samples
        yield count, Predicted.joined([running.predicted() for running in sums])


# -- rivals -----------------------------------------------------------------------------------------------------------


class _OneScalar(Layer):
    """One factor of the variance for a whole layer, as CVP has it; the mean stays as it is."""

    def add(self, part: Sums) -> Correction:
        """Add one part of the inputs, and return its own factor."""
        super().add(part)
        return _one_factor(part)

    def correction(self) -> Correction:
        """Return the factor of all parts."""
        assert self._sums is not None
        return _one_factor(self._sums)


def _one_factor(sums: Sums) -> Correction:
    ratio = sums.values["tv"].sum() / sums.values["ss"].sum().clamp_min(1e-30)
    zeros = torch.zeros_like(sums.values["ss"])
    return sums.correction_of(zeros.sum() + 1, zeros, zeros + ratio.clamp_min(1e-30).log())


def one_scalar_per_layer(
    bnn: lb.BayesianModel, batches: Sequence[Any], samples: int, inputs: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Fit one factor of the variance per layer to samples, without labels, from the first layer to the last."""
    with torch.no_grad(), evaluation_mode(bnn):
        return correct_layers(bnn, batches, samples, inputs, generator, kind=_OneScalar)


def suq(bnn: lb.BayesianModel) -> Callable[[Set], Predicted] | str:
    """Return the predictor of the package suq, or why it does not run: it knows MLPs, and one form of ViT."""
    network = bnn.to_deterministic().eval()
    layers = [layer for layer in network if not isinstance(layer, nn.Flatten)] if _is_mlp(network) else []
    if not layers:
        return "SUQ 0.1.0 has layers for MLPs and for its own ViT only"
    if importlib.util.find_spec("suq") is None:
        return "the package suq is not installed"
    for missing in ("suq.utils", "suq.utils.utils"):  # suq 0.1.0 was published without them; only its fit uses them
        sys.modules.setdefault(missing, types.ModuleType(missing)).__dict__.setdefault("torch_dataset", None)
    from suq import streamline_mlp  # type: ignore[import-not-found, unused-ignore]

    slots = zip(bnn.layout, bnn.layout.split(bnn.posterior.variance().detach()), strict=True)
    known = {slot.name: part for slot, part in slots}
    variance = torch.cat([known.get(name, 0 * p).detach().flatten() for name, p in network.named_parameters()])
    with contextlib.redirect_stdout(sys.stderr):
        model = streamline_mlp(nn.Sequential(*layers), variance, "diag", "classification")

    def predicted(images: Set) -> Predicted:
        parts = []
        for x, pair in zip(images.inputs, images.pairs, strict=True):
            with torch.enable_grad():  # of the activation functions
                probs = model(x.flatten(1)).detach()
                _, v = model.forward_latent(x.flatten(1))
            v = v.detach().double()
            parts.append(_on_cpu(probs, torch.zeros(len(x)), v, v.gather(-1, pair).sum(-1)))
        return Predicted.joined(parts)

    return predicted


def _is_mlp(network: nn.Module) -> bool:
    known = (nn.Flatten, nn.Linear, nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU)
    return isinstance(network, nn.Sequential) and all(isinstance(layer, known) for layer in network)
