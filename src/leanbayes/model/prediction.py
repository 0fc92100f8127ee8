"""The loop behind `BayesianModel.predict`."""

import contextlib
import functools
import math
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.counters import PeakMemory
from leanbayes.core.heap import keep_freed_memory
from leanbayes.core.network import call_with, check_readable, evaluation_mode, map_rows, output_tensor, tensors_of
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.model.compiled_passes import is_compiled
from leanbayes.model.pass_result import Summary, is_finite, summarized, whole
from leanbayes.rules import Moments, Rule

if TYPE_CHECKING:
    from leanbayes.model.bayesian import BayesianModel
    from leanbayes.model.draw import Draw

MOST_SAMPLES = 1_000_000
_CPU_BUDGET = 1 << 30  # bytes of activations, unless the user says otherwise
_UNMEASURED = 1 << 20  # bytes of inputs whose activations are not worth measuring


def predict(
    bnn: "BayesianModel",
    x: Any,
    samples: int | None,
    rule: str | Rule | None,
    generator: torch.Generator | None,
    memory_budget: int | None,
    keep_outputs: bool,
    compile: bool | None,
) -> Any:
    """Run the samples one after the other, each over the whole batch in as few passes as the memory allows."""
    rows, start = count_rows(x, "predict()"), time.perf_counter()
    if bnn.device.type == "cpu":
        keep_freed_memory()
    with torch.no_grad(), bnn.using(bnn.current_rule if rule is None else rule), evaluation_mode(bnn), _steady(bnn):
        clean = _are_clean(x, bnn.device)
        draws = passes_of(bnn, draws_of(bnn, samples, generator))
        summarize = bnn.current_rule.mean_rule is None and not keep_outputs
        chunks = _Chunks(bnn, x, rows, draws[0], memory_budget, compile, summarize)
        while True:
            with bnn.posterior.trusting() as unchanged:
                prediction, finite = _run(bnn, chunks, draws, rows, keep_outputs)
            checks = [clean & finite, *(check() for check in unchanged)]
            finite_now, *right = torch.stack(checks).tolist()  # once: it waits for the device
            if all(right):
                break
            bnn.posterior.forget()  # its parameters were written to behind the back of autograd
        _check_finite(finite_now, x, bnn.device)
        bnn.compiled_passes.add_time(time.perf_counter() - start)
        return replace(prediction, rule=bnn.method.text_of_rule(bnn.current_rule))


def _run(
    bnn: "BayesianModel", chunks: "_Chunks", draws: "list[Draw]", rows: int, keep_outputs: bool
) -> tuple[Any, Tensor]:
    """Return the prediction of all draws, and whether their outputs are finite, without waiting for the device."""
    used, outputs, finite = bnn.current_rule, [], torch.ones((), dtype=torch.bool, device=bnn.device)
    accumulator = bnn.likelihood.accumulator()
    for draw in draws:
        result = chunks.run(draw)
        if isinstance(result, Moments) and used.mean_rule is not None:
            with bnn.using(used.mean_rule):
                result = used.combined(result, chunks.run(draw), bnn.class_dim, bnn.moment_margins)
        if isinstance(result, Moments):
            loc, result = result.loc, summarized(bnn, result)
            if keep_outputs:
                result = result._replace(prediction=replace(result.prediction, outputs=loc.unsqueeze(0)))
        if isinstance(result, Summary):  # more passes would give the same
            return result
        finite = finite & is_finite(result)
        for member in result.unflatten(0, (rows, bnn.members)).unbind(1) if draw.joint else [result]:
            accumulator.update(member)
            if keep_outputs:
                outputs.append(member)
    kept = torch.stack(outputs) if keep_outputs else None
    return accumulator.finish(bnn.summed_members if draws[0].joint else len(draws), kept), finite


def count_rows(x: Any, caller: str) -> int:
    """Return the number of examples of a batch, or raise an error that names the function that got it."""
    tensors = list(tensors_of(x))
    if not tensors:
        convert = ": convert it with torch.as_tensor(x)" if hasattr(x, "__array__") else ""
        raise LeanBayesError(
            f"{caller} needs a tensor, or a tuple or dict of tensors, not {type(x).__name__}{convert}."
        )
    check_readable(x)
    if tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise LeanBayesError(f"{caller} got no examples: pass a batch with at least one.")
    return len(tensors[0])


def _are_clean(x: Any, device: torch.device) -> Tensor:
    """Return whether all inputs are numbers. On a GPU this is read together with whether the outputs are finite."""
    clean = torch.ones((), dtype=torch.bool, device=device)
    for tensor in tensors_of(x):
        if tensor.is_floating_point():
            clean = clean & (tensor < math.inf).all().to(device)  # -inf is a usual value of attention masks
    if device.type == "cpu" and not clean:
        raise _unclean()
    return clean


def _unclean() -> LeanBayesError:
    return LeanBayesError("The inputs contain NaN or infinity: clean them before predict().")


def _check_finite(finite: bool, x: Any, device: torch.device) -> None:
    if finite:
        return
    if not _are_clean(x, device):
        raise _unclean()
    if any(t.is_floating_point() and not t.isfinite().all() for t in tensors_of(x)):
        raise LeanBayesError("The outputs contain NaN or infinity, and so do the inputs: clean the inputs.")
    raise LeanBayesError("The outputs contain NaN or infinity: check the parameters for such values.")


def draws_of(bnn: "BayesianModel", samples: int | None, generator: torch.Generator | None) -> "list[Draw]":
    """Return the draws of a prediction. By default their number is the method's."""
    members = bnn.members
    if samples is None:
        samples = (members or bnn.method.samples) if bnn.current_rule.random else 1
    most = MOST_SAMPLES if members is None else members
    if not 1 <= samples <= most:
        limit = f"{most:,}" if members is None else f"{members}, the number of members"
        raise LeanBayesError(f"samples={samples} must be a whole number from 1 to {limit}.")
    _warn_of_rule_mismatch(bnn)
    return [bnn.next_draw(generator, number) for number in range(samples)]


def passes_of(bnn: "BayesianModel", draws: "list[Draw]") -> "list[Draw]":
    """Return the passes that draws take: one for all members if one pass computes them, and all are asked for."""
    return [draws[0]._replace(joint=True)] if bnn.joint and len(draws) == bnn.members else draws


def _steady(bnn: "BayesianModel") -> contextlib.AbstractContextManager[None]:
    """Let weight samples share the std of the posterior, if the rule draws any."""
    samples_weights = bnn.current_rule.random and not bnn.noise_per_example
    return bnn.posterior.steady() if samples_weights else contextlib.nullcontext()


def _warn_of_rule_mismatch(bnn: "BayesianModel") -> None:
    if bnn.trained_rule is None or not bnn.convolves:
        return
    trained, used = bnn.method.make_rule(bnn.trained_rule), bnn.current_rule
    if "mean" not in (trained.name, used.name) and trained.shared_noise != used.shared_noise:
        warnings.warn(
            f"This network was trained with the rule {trained.name!r} and predicts with {used.name!r}, whose noise in "
            "convolutions is different: expect worse accuracy, or train with the rule that you predict with.",
            RuleMismatchWarning,
            stacklevel=6,
        )


class _Chunks:
    """A batch, cut into chunks of examples if it would take too much memory.

    Without a memory budget it is cut only if it has to be: on a CPU if large inputs would take more than 1 GiB of
    activations, on a GPU if memory runs out. It is not cut if the outputs would be different.
    """

    def __init__(
        self,
        bnn: "BayesianModel",
        x: Any,
        rows: int,
        draw: "Draw",
        budget: int | None,
        compile: bool | None,
        summarize: bool,
    ) -> None:
        self._bnn, self._x, self._rows, self._draw = bnn, x, rows, draw
        self._compile, self._summarize = compile, summarize
        self._step = rows
        if budget is not None:
            if budget <= 0:
                raise LeanBayesError(f"memory_budget={budget!r} must be a positive number of bytes.")
            obstacle = self._cut_to(budget, 1)
            if obstacle is not None:
                raise LeanBayesError(f"memory_budget cannot be kept, because {obstacle}: pass smaller batches.")
        elif bnn.device.type == "cpu" and not is_compiled(bnn):
            size = sum(tensor.nbytes for tensor in tensors_of(x))
            if size > _UNMEASURED:
                self._cut_to(_CPU_BUDGET, max(1, rows * _UNMEASURED // size))

    def run(self, draw: "Draw") -> Any:
        """Return the result of one sample for the whole batch."""
        while True:
            try:
                return self._run(draw)
            except torch.OutOfMemoryError as error:
                full = error.with_traceback(None)  # which would keep the activations
            torch.cuda.empty_cache()
            if self._step == 1 or self._obstacle() is not None:
                raise full
            self._step = math.ceil(self._step / 2)

    def _run(self, draw: "Draw") -> Any:
        bnn, starts = self._bnn, range(0, self._rows, self._step)
        chunks = (self._cut(slice(start, start + self._step)) for start in starts)
        if bnn.noise_per_example:  # each chunk has its own noise
            keys = (noise.of_chunk(draw.key, number) for number in range(len(starts)))
            passes = zip(chunks, keys, strict=True)
            outputs = [self._pass(chunk, draw._replace(key=key)) for chunk, key in passes]
        else:  # one weight sample serves all chunks
            with bnn.drawn(draw):
                outputs = [self._pass(chunk, None) for chunk in chunks]
        return whole(outputs)

    def _pass(self, chunk: Any, draw: "Draw | None") -> Any:
        rows = len(next(tensors_of(chunk)))
        are_separate = functools.partial(self._are_separate, chunk, rows)
        passes = self._bnn.compiled_passes
        return passes.run(self._bnn, draw, chunk, rows, self._compile, are_separate, self._summarize)

    def _are_separate(self, chunk: Any, rows: int) -> bool:
        """Whether examples may be added to a chunk. A batch of one example does not say."""
        counts = [
            sum(tensor.dim() > 0 and len(tensor) == size for tensor in tensors_of(inputs))
            for inputs, size in ((self._x, self._rows), (chunk, rows))
        ]
        known = self._rows > 1 or self._kind() in self._bnn.obstacles
        return counts[0] == counts[1] and known and self._obstacle() is None

    def _cut(self, rows: slice) -> Any:
        if len(range(*rows.indices(self._rows))) == self._rows:
            return self._x
        return map_rows(lambda tensor: tensor[rows], self._x, self._rows)

    def _cut_to(self, budget: int, rows: int) -> str | None:
        """Cut the batch to fit a budget, given the peak memory of a few rows. Return why it cannot be cut, or None."""
        if self._rows == 1:
            return None
        obstacle = _static_obstacle(self._bnn)
        if obstacle is not None:
            return obstacle
        try:
            measured = self._measured(rows)
        except Exception as error:  # a network may accept batches of one size only
            return _fails(error)
        step = max(1, min(self._rows, rows * budget // max(measured, 1)))
        obstacle = self._obstacle() if step < self._rows else None
        self._step = step if obstacle is None else self._rows
        return obstacle

    def _measured(self, rows: int) -> int:
        """Return the peak memory of a few examples. It is measured once per kind of input, because it costs a pass."""
        bnn, key = self._bnn, (rows, self._bnn.current_rule, *self._kind())
        if key not in bnn.row_memory:
            with _eager(bnn), bnn.drawn(self._draw) as call, PeakMemory() as memory:
                call_with(call, self._cut(slice(rows)))
            bnn.row_memory[key] = memory.peak_bytes
        return bnn.row_memory[key]

    def _obstacle(self) -> str | None:
        """Return why the batch cannot be cut, or None. It is found once per kind of input."""
        bnn, key = self._bnn, self._kind()
        if key not in bnn.obstacles:
            bnn.obstacles[key] = _static_obstacle(bnn) or self._difference()
        return bnn.obstacles[key]

    def _difference(self) -> str | None:
        """Return whether the first and the last example have other outputs in one batch than each in its own."""
        bnn, last = self._bnn, self._rows - 1
        both, singles = slice(0, None, last), (slice(1), slice(last, None))
        try:
            with _eager(bnn), bnn.using("mean" if bnn.members is None else "sample"), bnn.drawn(self._draw) as call:
                together, *apart = [output_tensor(call_with(call, self._cut(rows))) for rows in (both, *singles)]
        except Exception as error:
            return _fails(error)
        found = torch.cat(apart)
        if found.shape != together.shape or not (found - together).abs().max() <= _tolerance(bnn, together):
            return "the outputs of an example depend on the other examples of its batch"
        return None

    def _kind(self) -> tuple[Any, ...]:
        """Return what the memory of an example, and whether it can be computed alone, depends on."""
        bnn = self._bnn
        inputs = tuple(
            (tensor.dtype, tensor.shape[1:], tensor.dim() and len(tensor) == self._rows)
            for tensor in tensors_of(self._x)
        )
        model = tuple({parameter.dtype: None for parameter in bnn.parameters()})
        return bnn.device, torch.is_autocast_enabled(bnn.device.type), model, inputs


def _fails(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"the network cannot compute a part of the batch ({lines[0]})"


def _tolerance(bnn: "BayesianModel", output: torch.Tensor) -> torch.Tensor:
    """Return how much outputs of different batch sizes may differ by rounding."""
    kinds = {output.dtype, *(parameter.dtype for parameter in bnn.parameters())}
    if torch.is_autocast_enabled(bnn.device.type):
        kinds.add(torch.get_autocast_dtype(bnn.device.type))
    return output.abs().max() * max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point) ** 0.5


def _eager(bnn: "BayesianModel") -> contextlib.AbstractContextManager[Any]:
    """Run compiled parts of a network eagerly in a block. What is traced inside of it would stay eager."""
    return torch.compiler.set_stance("force_eager") if is_compiled(bnn) else contextlib.nullcontext()


def _static_obstacle(bnn: "BayesianModel") -> str | None:
    """Return which layer does not allow to cut a batch into chunks of examples, or None."""
    if not bnn.batch_first:
        return "the network has layers with batch_first=False"
    for module in bnn.network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return "the network has BatchNorm layers without running statistics"
    return None
