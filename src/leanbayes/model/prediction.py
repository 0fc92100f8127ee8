"""The loop behind `BayesianModel.predict`."""

import contextlib
import math
import time
import warnings
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leanbayes.core import noise
from leanbayes.core.counters import PeakMemory
from leanbayes.core.network import call_with, evaluation_mode, map_rows, tensors_of
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.model.compiled_passes import is_compiled
from leanbayes.rules import Moments, Rule, moments_of

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
    rows = _count_rows(x)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise LeanBayesError(f"generator={generator!r} must be a torch.Generator: torch.Generator().manual_seed(0).")
    if compile not in (None, True, False):
        raise LeanBayesError(f"compile={compile!r} must be True, False or None.")
    outputs, start = [], time.perf_counter()
    with torch.no_grad(), bnn.using(rule or bnn.current_rule), evaluation_mode(bnn), _steady(bnn):
        draws = draws_of(bnn, samples, generator)
        chunks = _Chunks(bnn, x, rows, draws[0], memory_budget, compile)
        accumulator, finite = bnn.likelihood.accumulator(), torch.ones((), dtype=torch.bool, device=bnn.device)
        for draw in draws:
            output = moments_of(chunks.run(draw))
            if isinstance(output, Moments) and bnn.current_rule.mean_rule is not None:
                with bnn.using(bnn.current_rule.mean_rule):
                    output = Moments(moments_of(chunks.run(draw)).loc, output.variance)
            parts = (output.loc, output.variance) if isinstance(output, Moments) else (output,)
            for part in parts:
                finite = finite & part.isfinite().all()
            if isinstance(output, Moments):  # more passes would give the same
                _check_finite(finite, x)
                bnn.compiled_passes.add_time(time.perf_counter() - start)
                prediction = bnn.likelihood.predict_moments(output)
                return replace(prediction, outputs=output.loc.unsqueeze(0)) if keep_outputs else prediction
            accumulator.update(output)
            if keep_outputs:
                outputs.append(output)
        _check_finite(finite, x)  # once, because it waits for the device
        bnn.compiled_passes.add_time(time.perf_counter() - start)
        return accumulator.finish(len(draws), torch.stack(outputs) if keep_outputs else None)


def _count_rows(x: Any) -> int:
    tensors = list(tensors_of(x))
    if not tensors:
        convert = ": convert it with torch.as_tensor(x)" if hasattr(x, "__array__") else ""
        raise LeanBayesError(
            f"predict() needs a tensor, or a tuple or dict of tensors, not {type(x).__name__}{convert}."
        )
    if tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise LeanBayesError("predict() got no examples: pass a batch with at least one.")
    # -inf is a usual value of attention masks.
    if any(t.is_floating_point() and (t.isnan() | t.isposinf()).any() for t in tensors):
        raise LeanBayesError("The inputs contain NaN or infinity: clean them before predict().")
    return len(tensors[0])


def _check_finite(finite: Tensor, x: Any) -> None:
    if finite:
        return
    if any(t.is_floating_point() and not t.isfinite().all() for t in tensors_of(x)):
        raise LeanBayesError("The outputs contain NaN or infinity, and so do the inputs: clean the inputs.")
    raise LeanBayesError("The outputs contain NaN or infinity: check the parameters for such values.")


def draws_of(bnn: "BayesianModel", samples: int | None, generator: torch.Generator | None) -> "list[Draw]":
    """Return the draws of a prediction. By default their number is the method's."""
    members = bnn.members
    if samples is None:
        samples = (members or bnn.method.samples) if bnn.current_rule.random else 1
    most = MOST_SAMPLES if members is None else members
    try:
        count = 0 if isinstance(samples, bool) else index(samples)
    except TypeError:
        count = 0
    if not 1 <= count <= most:
        limit = f"{most:,}" if members is None else f"{members}, the number of members"
        raise LeanBayesError(f"samples={samples!r} must be a whole number from 1 to {limit}.")
    _warn_of_rule_mismatch(bnn)
    return [bnn.next_draw(generator, number) for number in range(count)]


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
            stacklevel=5,
        )


class _Chunks:
    """A batch, cut into chunks of examples if it would take too much memory.

    Without a memory budget it is cut only if it has to be: on a CPU if large inputs would take more than 1 GiB of
    activations, on a GPU if memory runs out.
    """

    def __init__(
        self, bnn: "BayesianModel", x: Any, rows: int, draw: "Draw", budget: int | None, compile: bool | None
    ) -> None:
        self._bnn, self._x, self._rows, self._compile = bnn, x, rows, compile
        self._obstacle = _obstacle(bnn)
        self._step = rows
        if budget is not None:
            if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
                raise LeanBayesError(f"memory_budget={budget!r} must be a positive number of bytes.")
            if rows > 1 and self._obstacle:
                raise LeanBayesError(f"memory_budget cannot be kept, because {self._obstacle}: pass smaller batches.")
            self._step = self._within(budget, draw, 1)
        elif bnn.device.type == "cpu" and not self._obstacle and not is_compiled(bnn):  # measured, it would run eagerly
            size = sum(tensor.nbytes for tensor in tensors_of(x))
            if size > _UNMEASURED:
                self._step = self._within(_CPU_BUDGET, draw, max(1, rows * _UNMEASURED // size))

    def run(self, draw: "Draw") -> Any:
        """Return the output of one sample for the whole batch."""
        while True:
            try:
                return self._run(draw)
            except torch.OutOfMemoryError:
                if self._step == 1 or self._obstacle:
                    raise
                self._step = math.ceil(self._step / 2)
                torch.cuda.empty_cache()

    def _run(self, draw: "Draw") -> Any:
        bnn, starts = self._bnn, range(0, self._rows, self._step)
        chunks = (self._cut(start, start + self._step) for start in starts)
        if bnn.noise_per_example:  # each chunk has its own noise
            keys = (noise.of_chunk(draw.key, number) for number in range(len(starts)))
            passes = zip(chunks, keys, strict=True)
            outputs = [self._pass(chunk, draw._replace(key=key)) for chunk, key in passes]
        else:  # one weight sample serves all chunks
            with bnn.drawn(draw):
                outputs = [self._pass(chunk, None) for chunk in chunks]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _pass(self, chunk: Any, draw: "Draw | None") -> Any:
        rows = len(next(tensors_of(chunk)))
        return self._bnn.compiled_passes.run(self._bnn, draw, chunk, rows, self._compile)

    def _cut(self, start: int, end: int) -> Any:
        if end - start >= self._rows:
            return self._x
        return map_rows(lambda tensor: tensor[start:end], self._x, self._rows)

    def _within(self, budget: int, draw: "Draw", rows: int) -> int:
        """Return how many examples fit the budget, given the peak memory of a few."""
        if self._rows == 1:
            return 1
        return max(1, min(self._rows, rows * budget // max(self._measured(draw, rows), 1)))

    def _measured(self, draw: "Draw", rows: int) -> int:
        """Return the peak memory of a few examples. It is measured once per kind of input, because it costs a pass."""
        bnn = self._bnn
        inputs = tuple((tensor.dtype, tensor.shape[1:]) for tensor in tensors_of(self._x))
        model = tuple({parameter.dtype: None for parameter in bnn.parameters()})
        key = (rows, bnn.current_rule, bnn.device, torch.is_autocast_enabled(bnn.device.type), model, inputs)
        if key not in bnn.row_memory:
            with bnn.drawn(draw) as call, PeakMemory() as memory:
                call_with(call, self._cut(0, rows))
            bnn.row_memory[key] = memory.peak_bytes
        return bnn.row_memory[key]


def _obstacle(bnn: "BayesianModel") -> str | None:
    """Return why a batch cannot be cut into chunks of examples, or None if it can."""
    if not bnn.batch_first:
        return "the network has layers with batch_first=False"
    for module in bnn.network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return "the network has BatchNorm layers without running statistics"
    return None
