"""How good one pass by moments is on a network of one's own: layer by layer, against many draws of the weights."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.bayesian import BayesianModel
from leanbayes.errors import LeanBayesError
from leanbayes.network import call_with, evaluation_mode, is_tensor_like, map_rows, output_tensor, tensors_of
from leanbayes.prediction import Running
from leanbayes.rules import Rule

_ROWS = 64  # examples that go through the network at once
_ELEMENTS = 2**18  # of a layer's output that are compared, evenly spread: torch.quantile takes 2^24 at most
_FLOOR = 1e-6  # of a layer's mean variance: elements below it, such as dead units, do not count
_LEAST_SPREAD = 1e-6  # of log variances: less is rounding
_QUANTILES = (0.05, 0.5, 0.95)

Take = Callable[[str, str, Any], None]  # is given the name of a call, the type of its module, and what it returned


@dataclass(frozen=True)
class LayerAccuracy:
    """One layer's mean m and std s from one pass, against m̂ and ŝ over draws, all over the elements of its output.

    ratio: median of s/ŝ; low and high: its 5 % and 95 % quantiles. log_correlation: Pearson's, of log s² and log ŝ².
    mean_error: median of |m - m̂|/ŝ. All are nan where the layer has no randomness.
    """

    name: str
    kind: str
    ratio: float
    low: float
    high: float
    log_correlation: float
    mean_error: float


def moment_accuracy(
    bnn: BayesianModel,
    x: Any,
    samples: int = 1000,
    rule: str | Rule = "moments",
    generator: torch.Generator | None = None,
) -> list[LayerAccuracy]:
    """Compare one pass with `samples` draws by the rule `sample`, in evaluation mode, in each layer and at the output.

    A layer is a module that calls no other module; of several outputs its first is taken, and the second call of the
    same module is named "NAME (call 2)". The last row, "output", is what the network returns, calibrated if it is.
    x: a batch (tensor, or tuple or dict of tensors), of any size: memory grows neither with it nor with the draws.
    """
    _check(bnn, samples)
    chunks = _chunks(x)
    layers: list[dict[str, _Layer]] = [{} for _ in chunks]
    kept = max(1, _ELEMENTS // len(chunks))
    with torch.no_grad(), evaluation_mode(bnn), _without_fused_layers():
        with bnn.using(rule):
            for chunk, seen in zip(chunks, layers, strict=True):
                draw = bnn.next_draw(torch.Generator())  # no noise is spent on a pass without any
                _pass(bnn, partial(bnn, _draw=draw), chunk, partial(_begin, seen, kept))
                if not seen[""].random:
                    raise LeanBayesError(f'The rule {bnn.rule!r} gives no variance: use rule="moments".')
        with bnn.using("sample"):
            for number in range(samples):
                with bnn.drawn(bnn.next_draw(generator, number)) as call:
                    for chunk, seen in zip(chunks, layers, strict=True):
                        _pass(bnn, call, chunk, partial(_go_on, seen))
    found = {name: [seen[name] for seen in layers if name in seen] for name in layers[0]}
    return [_joined(name or "output", parts) for name, parts in found.items() if parts[0].draws.count == samples]


def accuracy_of(
    name: str, kind: str, mean: Tensor, variance: Tensor, true_mean: Tensor, true_variance: Tensor
) -> LayerAccuracy:
    """Compare the moments of one pass with those of draws, all of one shape; of many elements some, evenly spread."""
    places = _spread(true_mean.numel(), _ELEMENTS).to(true_mean.device)
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
    """Write what `moment_accuracy` returns as a table of plain text, one line a layer."""
    head: tuple[str, ...] = ("layer", "type", "std ratio", "5 %", "95 %", "log corr.", "mean error")
    cells = [head]
    for row in rows:
        figures = (row.ratio, row.low, row.high, row.log_correlation, row.mean_error)
        cells.append((row.name, row.kind, *("-" if math.isnan(figure) else f"{figure:.3f}" for figure in figures)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(_line(line, widths) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts, figures = zip(cells[:2], widths[:2], strict=True), zip(cells[2:], widths[2:], strict=True)
    aligned = [text.ljust(width) for text, width in texts] + [figure.rjust(width) for figure, width in figures]
    return "  ".join(aligned)


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation, or nan where one of them does not vary."""
    if a.numel() < 2 or min(a.std(), b.std()) < _LEAST_SPREAD:
        return math.nan
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def _check(bnn: BayesianModel, samples: int) -> None:
    if bnn.members is not None:
        raise LeanBayesError(
            "An ensemble has members, and no moments of its weights: moment_accuracy needs mean-field weights."
        )
    if not bnn.layout.numel:
        raise LeanBayesError(
            f"{type(bnn.method).__name__} has no Bayesian weights, so there are no moments to judge: "
            "bayesianize the network with lb.MeanField() or lb.VDP()."
        )
    if samples < 2:
        raise LeanBayesError(f"samples={samples} must be at least 2: a variance needs as many.")


def _chunks(x: Any) -> list[Any]:
    tensors = list(tensors_of(x))
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    if not rows:
        raise LeanBayesError("moment_accuracy() got no examples: pass a batch with at least one.")
    if rows <= _ROWS:
        return [x]
    return [map_rows(partial(_rows_from, start), x, rows) for start in range(0, rows, _ROWS)]


def _rows_from(start: int, tensor: Tensor) -> Tensor:
    return tensor[start : start + _ROWS]


def _spread(count: int, limit: int) -> Tensor:
    """Choose at most `limit` of `count` places, one at random from each stretch: a fixed step may meet few columns."""
    number = min(count, limit)
    step = count // max(number, 1)
    within = torch.randint(max(step, 1), (number,), generator=torch.Generator().manual_seed(0), device="cpu")
    return torch.arange(number, device="cpu") * step + within


class _Layer:
    """Some elements of one layer's output: what one pass says of them, and what the draws so far do."""

    def __init__(self, kind: str, value: Any, limit: int) -> None:
        self.kind, self.random, self.draws = kind, not isinstance(value, Tensor), Running()
        loc, variance = (value.loc, value.variance) if self.random else (value, torch.zeros_like(value))
        self._places = _spread(loc.numel(), limit).to(loc.device)
        self.mean, self.variance = self._some(loc), self._some(variance.expand_as(loc))

    def _some(self, output: Tensor) -> Tensor:
        return output.reshape(-1)[self._places].double()

    def add(self, output: Tensor) -> None:
        """Take in one draw."""
        self.draws.update(self._some(output))


def _begin(seen: dict[str, _Layer], limit: int, name: str, kind: str, value: Any) -> None:
    seen[name] = _Layer(kind, value, limit)


def _go_on(seen: dict[str, _Layer], name: str, kind: str, value: Any) -> None:
    if name in seen:
        seen[name].add(value)


def _joined(name: str, parts: Sequence[_Layer]) -> LayerAccuracy:
    means, variances = torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])
    true_means = torch.cat([part.draws.mean for part in parts])
    true_variances = torch.cat([part.draws.squares / (part.draws.count - 1) for part in parts])
    return accuracy_of(name, parts[0].kind, means, variances, true_means, true_variances)


def _pass(bnn: BayesianModel, call: Callable[..., Any], x: Any, take: Take) -> None:
    """Call the network, and hand on what its layers return, and at last what it returns itself, under the name ""."""
    with _watched(bnn.network, take):
        output = output_tensor(call_with(call, x))
    take("", type(bnn.network).__name__, output)


@contextlib.contextmanager
def _watched(network: nn.Module, take: Take) -> Iterator[None]:
    """Hand on the floats that modules return inside the block, but for modules that call others."""
    calls: Counter[str] = Counter()
    calls_others: list[bool] = []  # for each module that is at work

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
    """Find the first tensor of floats, or what stands for one, in what a module returns; None where there is none."""
    if is_tensor_like(output):
        return output if output.dtype.is_floating_point else None
    if not isinstance(output, (tuple, list, Mapping)):
        return None
    parts = output.values() if isinstance(output, Mapping) else output
    return next((found for part in parts if (found := _first_floats(part)) is not None), None)


@contextlib.contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Have the parts of a transformer's layers called one by one: torch fuses them where it may."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
