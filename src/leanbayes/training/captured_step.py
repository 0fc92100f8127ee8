"""The whole optimizer step as a CUDA graph: Python prepares it once, and the GPU repeats it.

The first steps run operation by operation on a side stream, which compiles kernels and makes the optimizers' state.
Then the same code is captured. A replay reads its batch, learning rates and temperature from tensors that are filled
before it. Its noise is that of an ordinary step, because the counter of the model's keys is a tensor that the graph
advances. So is dropout, because a replay starts from the current seed of torch's generator. Learning rates are rounded
to float32.

What Python does in a step is done only once. So a network that counts its calls in Python, for example, must not be
captured. A step that waits for the GPU, or that draws random numbers on the CPU, is detected and not captured.
"""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from leanbayes.core.network import map_tensors, tensors_of
from leanbayes.model.method import Method, Training
from leanbayes.training.learning_rates import LearningRates
from leanbayes.training.optimizer_step import OptimizerStep, Part
from leanbayes.training.recipe import Recipe

WARM_UP = 3  # steps before a capture
PATIENCE = 30  # steps without a capture, or replays of a graph until its tensors change, below which it does not pay
_WAITS = "synchronizing CUDA operation"  # in torch's warning


def obstacle(recipe: Recipe, accelerator: Accelerator) -> str | None:
    """Return why the steps of a training cannot be captured, or None."""
    if accelerator.device.type != "cuda":
        return f"the device is {accelerator.device.type}"
    if accelerator.num_processes > 1:
        return "several processes exchange their gradients"
    if accelerator.scaler is not None:
        return "fp16 checks the gradients in each step (use bf16)"
    if recipe.accumulate > 1:
        return f"accumulate={recipe.accumulate} splits a batch into parts"
    return None


class CapturedStep:
    """Takes the steps of an `OptimizerStep` by a CUDA graph. What the graph cannot do runs operation by operation.

    Args:
        step: The step to capture. Its obstacles are known to be absent.
        rates: The learning rates, which become tensors.
        training: The training, with the model and its optimizers.
        method: The method of the stage. If its hook replaces tensors of the model or of an optimizer, the step is
            captured again.
        say: Prints a sentence.
    """

    def __init__(
        self,
        step: OptimizerStep,
        rates: LearningRates,
        training: Training,
        method: Method,
        say: Callable[[str], None],
    ) -> None:
        self._step, self._rates, self._training, self._say = step, rates, training, say
        self._has_hook = getattr(method.after_step, "__func__", None) is not Method.after_step
        self._device = step.loss_sum.device
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Any = None  # the batch that the graph reads
        self._addresses: list[Any] = []  # where the graph finds the tensors of model and optimizers
        self._warm, self._shapes = 0, None  # steps that were taken on batches of these shapes
        self._waited = 0  # steps since the last graph
        self._replays = 0
        self._given_up = False

    def take(self, parts: Iterator[Part], seeds: Sequence[int]) -> None:
        """Take a step on the next part, with the one seed."""
        if self._given_up:
            self._step.take(parts, seeds)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._rates.to_tensors(self._device)
        self._training.batch = batch = next(parts)
        torch.manual_seed(*seeds)
        if self._graph is not None and self._has_hook and self._addresses != self._current_addresses():
            self._drop_graph()
        if self._graph is None and self._warm == WARM_UP and self._shapes == _shapes(batch):
            self._capture(batch)
        if self._given_up:
            self._step.run(batch)
        elif self._graph is not None and self._shapes == _shapes(batch):
            for mine, given in zip(tensors_of(self._inputs), tensors_of(batch), strict=True):
                mine.copy_(given)
            self._graph.replay()
            self._replays += 1
        elif self._graph is not None:
            self._run_aside(batch)  # another shape, such as that of a smaller last batch
        else:
            self._warm_up(batch)

    # -- before a capture ---------------------------------------------------------------------------------------------

    def _warm_up(self, batch: Part) -> None:
        """Take a step as the graph will, and in the last one look for what cannot be captured."""
        shapes = _shapes(batch)
        if shapes != self._shapes:
            self._warm, self._shapes = 0, shapes
        self._warm, self._waited = min(self._warm + 1, WARM_UP), self._waited + 1
        if self._warm < WARM_UP:
            self._run_aside(batch)
            if self._waited >= PATIENCE:
                self._give_up("batches have different shapes")
            return
        with _watched() as found:
            self._run_aside(batch)
        if found:
            self._give_up(found[0])

    def _run_aside(self, batch: Part) -> None:
        """Take a step on the side stream. Gradients must not be tied to the main stream when they are captured."""
        assert self._stream is not None
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            self._step.run(batch)
        main.wait_stream(self._stream)

    # -- the graph ----------------------------------------------------------------------------------------------------

    def _capture(self, batch: Part) -> None:
        """Record a step, which is not executed."""
        self._inputs = map_tensors(torch.clone, batch)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        main = torch.cuda.current_stream(self._device)
        try:
            # A failed capture leaves its stream as the current one, hence the outer context. Other threads, such as
            # those that read data, may use the GPU during the capture.
            with (
                self._rates.capturable(),
                torch.cuda.stream(main),
                torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
            ):
                self._step.run(self._inputs)
        except Exception as error:  # the network is the user's, and may raise anything
            recover(self._device, pool, self._training.optimizers)
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            self._give_up(f"{type(error).__name__}: {reason}" if reason else type(error).__name__)
            return
        self._graph, self._addresses = graph, self._current_addresses()
        self._waited = self._replays = 0

    def _drop_graph(self) -> None:
        """Start again after a hook has replaced tensors."""
        self._graph, self._inputs, self._warm = None, None, 0
        if self._replays < PATIENCE:
            self._give_up("the method often replaces tensors")

    def _give_up(self, reason: str) -> None:
        self._given_up, self._graph, self._inputs = True, None, None
        self._rates.to_numbers()
        self._say(not_captured(reason))

    def _current_addresses(self) -> list[Any]:
        """Return where the tensors are that a step reads and writes."""
        model, optimizers = self._training.model, self._training.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        values = [value for one in (*groups, *states) for value in one.values() if isinstance(value, Tensor)]
        return [(tensor.data_ptr(), tensor.shape) for tensor in (*model.parameters(), *model.buffers(), *values)]


def recover(device: torch.device, pool: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Remove what a failed capture leaves behind, so that training can go on."""
    for optimizer in optimizers:
        optimizer.zero_grad()  # gradients that were never computed
    generator: Any = torch.cuda.default_generators[device.index]
    seed = generator.initial_seed()
    generator.graphsafe_set_state(torch.Generator(device))  # the old state waits for the end of the capture
    generator.manual_seed(seed)
    with contextlib.suppress(RuntimeError):  # torch 2.12 and later do this themselves
        torch._C._cuda_endAllocateToPool(device.index, pool)


def not_captured(reason: str) -> str:
    """Return the log line of a training whose steps are not captured."""
    return f"The training step is not captured in a CUDA graph: {reason}."


def _shapes(batch: Part) -> Any:
    """Return what all batches of one graph must have in common."""
    describe: Any = lambda tensor: (tensor.shape, tensor.stride(), tensor.dtype)  # noqa: E731
    return map_tensors(describe, batch)


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Yield a list, to which the end of the block adds what it did that a graph cannot repeat."""
    found: list[str] = []
    before, mode = _host_randomness(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if any(_WAITS in str(warning.message) for warning in caught):
        found.append("it waits for the GPU")
    if _host_randomness() != before:
        found.append("the network draws random numbers on the CPU")


def _host_randomness() -> tuple[Any, ...]:
    """Return the state of all global generators on the CPU."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, np.asarray(keys).tobytes(), *rest
