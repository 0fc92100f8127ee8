"""The accuracy of one-pass prediction (`moments`) on a network, per layer, against many Monte Carlo samples."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.core.network import call_with, evaluation_mode, is_tensor_like, map_rows, output_tensor, tensors_of
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.accumulators import Running
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Rule

_ROWS = 64  # examples that go through the network at once
_ELEMENTS = 2**18  # of the output of a layer that are compared; torch.quantile accepts at most 2^24
_FLOOR = 1e-6  # of the mean variance of a layer: elements below it, such as dead units, are ignored
_MIN_STD = 1e-6  # of log variances: less is rounding
_QUANTILES = (0.05, 0.5, 0.95)

Take = Callable[[str, str, Any], None]  # gets the name of a call, the type of its module, and its output


@dataclass(frozen=True)
class LayerAccuracy:
    """Mean m and std s of a layer's output from one pass, against m̂ and ŝ over samples. All nan if not random.

    Attributes:
        name: Name of the layer, or "output" for the network.
        kind: Class of the module.
        ratio: Median of s/ŝ over the elements of the output.
        low: 5 % quantile of s/ŝ.
        high: 95 % quantile of s/ŝ.
        log_correlation: Pearson correlation of log s² and log ŝ².
        mean_error: Median of |m - m̂|/ŝ.
    """

    name: str
    kind: str
    ratio: float
    low: float
    high: float
    log_correlation: float
    mean_error: float


@checked()
def moment_accuracy(
    bnn: BayesianModel,
    x: Any,
    samples: int = 1000,
    rule: str | Rule = "moments",
    generator: torch.Generator | None = None,
) -> list[LayerAccuracy]:
    """Compare one-pass prediction with Monte Carlo samples of the weights, in each layer and at the output.

    A layer is a module that calls no other module. If it returns several tensors, the first one counts. The second call
    of a module is named "NAME (call 2)". The network is in evaluation mode. Memory grows with neither the batch nor
    the number of samples.

    Args:
        bnn: The model, with Bayesian weights.
        x: A batch: a tensor, or a tuple or dict of tensors.
        samples: Number of Monte Carlo samples to compare with, at least 2.
        rule: The one-pass rule to check.
        generator: Source of the samples. None means the model's own random stream.

    Returns:
        One `LayerAccuracy` per layer. The last one, "output", is the output of the network, with its calibration if it
        has one.

    Raises:
        LeanBayesError: If the model has no Bayesian weights or is an ensemble, the batch is empty, samples is less than
            2, or the rule gives no variance.

    Example:
        >>> from leanbayes.evaluation import accuracy_table, moment_accuracy
        >>> print(accuracy_table(moment_accuracy(bnn, x)))
    """
    _check(bnn, samples)
    chunks = _chunks(x, bnn.batch_first)
    layers: list[dict[str, _Layer]] = [{} for _ in chunks]
    kept = max(1, _ELEMENTS // len(chunks))
    with torch.no_grad(), evaluation_mode(bnn), _without_fused_layers():
        with bnn.using(rule):
            for chunk, seen in zip(chunks, layers, strict=True):
                draw = bnn.next_draw(torch.Generator())  # uses no noise: do not advance the random stream
                _pass(bnn, partial(bnn, _draw=draw), chunk, partial(_begin, seen, kept))
                if not seen[""].random:
                    raise LeanBayesError(f'The rule {bnn.rule!r} gives no variance: use rule="moments".')
        with bnn.using("sample"):
            for number in range(samples):
                with bnn.drawn(bnn.next_draw(generator, number)) as call:
                    for chunk, seen in zip(chunks, layers, strict=True):
                        _pass(bnn, call, chunk, partial(_continue, seen))
    found = {name: [seen[name] for seen in layers if name in seen] for name in layers[0]}
    return [_joined(name or "output", parts) for name, parts in found.items() if parts[0].samples.count == samples]


def accuracy_of(
    name: str, kind: str, mean: Tensor, variance: Tensor, true_mean: Tensor, true_variance: Tensor
) -> LayerAccuracy:
    """Compare the moments of one pass with those of samples, all of one shape; of many elements, a random subset."""
    places = _subset(true_mean.numel(), _ELEMENTS).to(true_mean.device)
    every = (part.expand_as(true_mean).reshape(-1)[places].double() for part in (mean, variance, true_variance))
    (mean, variance, true_variance), true_mean = every, true_mean.reshape(-1)[places].double()
    floor = _FLOOR * true_variance.mean()
    counted = true_variance > floor
    if not counted.any():
        return LayerAccuracy(name, kind, *[math.nan] * 5)
    mean, variance, true_mean, true_variance = (part[counted] for part in (mean, variance, true_mean, true_variance))
    std = true_variance.sqrt()
    quantiles = torch.tensor(_QUANTILES, dtype=std.dtype, device=std.device)
    low, ratio, high = torch.quantile(variance.sqrt() / std, quantiles).tolist()
    error = torch.quantile((mean - true_mean).abs() / std, 0.5).item()
    both = variance > floor
    return LayerAccuracy(
        name, kind, ratio, low, high, _correlation(variance[both].log(), true_variance[both].log()), error
    )


def accuracy_table(rows: Sequence[LayerAccuracy]) -> str:
    """Format the result of `moment_accuracy` as a plain-text table, one line per layer.

    Args:
        rows: What `moment_accuracy` returned.

    Returns:
        The table, with a header line. Values of layers without randomness are "-".

    Example:
        >>> print(accuracy_table(moment_accuracy(bnn, x)))
    """
    head: tuple[str, ...] = ("layer", "type", "std ratio", "5 %", "95 %", "log corr.", "mean error")
    cells = [head]
    for row in rows:
        values = (row.ratio, row.low, row.high, row.log_correlation, row.mean_error)
        cells.append((row.name, row.kind, *("-" if math.isnan(value) else f"{value:.3f}" for value in values)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(_line(line, widths) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts, values = zip(cells[:2], widths[:2], strict=True), zip(cells[2:], widths[2:], strict=True)
    aligned = [text.ljust(width) for text, width in texts] + [value.rjust(width) for value, width in values]
    return "  ".join(aligned)


def _correlation(a: Tensor, b: Tensor) -> float:
    """Return the Pearson correlation, or nan if one of the two is constant."""
    if a.numel() < 2 or min(a.std(), b.std()) < _MIN_STD:
        return math.nan
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def _check(bnn: BayesianModel, samples: int) -> None:
    if bnn.members is not None:
        raise LeanBayesError(
            "The weights of an ensemble have no moments: use a method with Bayesian weights, such as lb.MeanField()."
        )
    if not bnn.layout.numel:
        raise LeanBayesError(
            f"{type(bnn.method).__name__} has no Bayesian weights, so there are no moments to compare: "
            "bayesianize the network with lb.MeanField() or lb.VDP()."
        )
    if samples < 2:
        raise LeanBayesError(f"samples={samples} must be at least 2, to estimate a variance.")


def _chunks(x: Any, batch_first: bool) -> list[Any]:
    """Cut a batch into chunks of examples, unless its first dimension may be time."""
    tensors = list(tensors_of(x))
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    if not rows:
        raise LeanBayesError("moment_accuracy() got no examples: pass a batch with at least one.")
    if rows <= _ROWS or not batch_first:
        return [x]
    return [map_rows(partial(_rows_from, start), x, rows) for start in range(0, rows, _ROWS)]


def _rows_from(start: int, tensor: Tensor) -> Tensor:
    return tensor[start : start + _ROWS]


def _subset(count: int, limit: int) -> Tensor:
    """Choose at most `limit` of `count` indices, one at random per interval: a fixed step may hit few columns."""
    number = min(count, limit)
    step = count // max(number, 1)
    within = torch.randint(max(step, 1), (number,), generator=torch.Generator().manual_seed(0), device="cpu")
    return torch.arange(number, device="cpu") * step + within


class _Layer:
    """Some elements of the output of a layer: their moments from one pass, and from the samples so far."""

    def __init__(self, kind: str, value: Any, limit: int) -> None:
        self.kind, self.random, self.samples = kind, not isinstance(value, Tensor), Running()
        loc, variance = (value.loc, value.variance) if self.random else (value, torch.zeros_like(value))
        self._places = _subset(loc.numel(), limit).to(loc.device)
        self.mean, self.variance = self._some(loc), self._some(variance.expand_as(loc))

    def _some(self, output: Tensor) -> Tensor:
        return output.reshape(-1)[self._places].double()

    def add(self, output: Tensor) -> None:
        """Add one sample."""
        self.samples.update(self._some(output))


def _begin(seen: dict[str, _Layer], limit: int, name: str, kind: str, value: Any) -> None:
    seen[name] = _Layer(kind, value, limit)


def _continue(seen: dict[str, _Layer], name: str, kind: str, value: Any) -> None:
    if name in seen:
        seen[name].add(value)


def _joined(name: str, parts: Sequence[_Layer]) -> LayerAccuracy:
    means, variances = torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])
    true_means = torch.cat([part.samples.mean for part in parts])
    true_variances = torch.cat([part.samples.squares / (part.samples.count - 1) for part in parts])
    return accuracy_of(name, parts[0].kind, means, variances, true_means, true_variances)


def _pass(bnn: BayesianModel, call: Callable[..., Any], x: Any, take: Take) -> None:
    """Call the network, and pass on the outputs of its layers and, under the name "", its own output."""
    with _watched(bnn.network, take):
        output = output_tensor(call_with(call, x))
    take("", type(bnn.network).__name__, output)


@contextlib.contextmanager
def _watched(network: nn.Module, take: Take) -> Iterator[None]:
    """Pass on the float outputs of all modules that call no others."""
    calls: Counter[str] = Counter()
    calls_others: list[bool] = []  # one per module that is running

    def enter(module: nn.Module, args: Any) -> None:
        if calls_others:
            calls_others[-1] = True
        calls_others.append(False)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        value = None if calls_others.pop() else _first_floats(output)
        if value is not None:
            calls[name] += 1
            take(name if calls[name] == 1 else f"{name} (call {calls[name]})", type(module).__name__, value)

    handles = []
    try:
        for name, module in network.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(partial(leave, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_floats(output: Any) -> Any:
    """Return the first float tensor (or tensor-like object) in the output of a module, or None."""
    if is_tensor_like(output):
        return output if output.dtype.is_floating_point else None
    if not isinstance(output, (tuple, list, Mapping)):
        return None
    parts = output.values() if isinstance(output, Mapping) else output
    return next((found for part in parts if (found := _first_floats(part)) is not None), None)


@contextlib.contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Disable fused transformer layers, so that their parts are called one by one."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
