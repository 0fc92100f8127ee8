"""Timing, memory and output files of the benchmarks."""

import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import leanbayes as lb
from leanbayes.core.counters import Cost, CostCounter, PeakMemory
from leanbayes.core.json_values import json_text


def wait(cuda: bool) -> None:
    """Wait for the GPU."""
    if cuda:
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], Any], times: int, cuda: bool) -> float:
    """Return the mean milliseconds of a call."""
    wait(cuda)
    start = time.perf_counter()
    for _ in range(times):
        run()
    wait(cuda)
    return 1e3 * (time.perf_counter() - start) / times


def busy(run: Callable[[], Any], times: int = 5) -> float:
    """Return the milliseconds of GPU kernels per call, without the profiler ranges of optimizers."""
    return busy_kernels(run, times)["milliseconds"]


def busy_kernels(run: Callable[[], Any], times: int = 5, shown: int = 12) -> dict[str, Any]:
    """Return number and milliseconds of GPU kernels per call, and those that took most of the time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    found = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in found if "Optimizer" not in e.name]
    names: dict[str, list[float]] = {}
    for kernel in kernels:
        names.setdefault(kernel.name[:100], []).append(kernel.self_device_time_total / 1e3)
    most = sorted(names.items(), key=lambda item: -sum(item[1]))[:shown]
    return {
        "number": len(kernels) / times,
        "milliseconds": sum(map(sum, names.values())) / times,
        "most": {name: {"number": len(each) / times, "milliseconds": sum(each) / times} for name, each in most},
    }


def count_cost(function: Callable[[], Any]) -> Cost:
    """Call a function, and return the bytes that it moved and the kernels that it ran."""
    with CostCounter() as counter:
        function()
    return counter.cost


def middle(times: list[float]) -> dict[str, Any]:
    """Return median and quartiles of times."""
    times = sorted(times)
    return {"ms": statistics.median(times), "ms_quartiles": [times[len(times) // 4], times[3 * len(times) // 4]]}


class Trainer:
    """Takes SGD steps, and measures the peak memory of a step with parameters and optimizer state.

    Args:
        model: The model to train.
        loss: Computes the loss of one step.
        device: The device of the model.
        before: The allocated memory before the model was built.
        lr: The learning rate.
        warmup: The number of steps before any measurement.
        compiled: The mode of torch.compile, or None.
        fullgraph: Whether to compile without graph breaks.
        autocast: Whether to compute in bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[], Tensor],
        device: torch.device,
        before: int,
        *,
        lr: float,
        warmup: int,
        compiled: str | None = None,
        fullgraph: bool = True,
        autocast: bool = False,
    ) -> None:
        self.model, self.device, self.autocast = model, device, autocast
        self.loss = torch.compile(loss, mode=compiled, fullgraph=fullgraph) if compiled else loss
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        for _ in range(warmup):
            last = self.step()
        assert torch.isfinite(last), "the training diverged"
        # On a CPU memory is counted per operation, which is impossible in a compiled step; on a GPU the count does not
        # include the pool of CUDA graphs.
        hidden = compiled if device.type == "cpu" else compiled == "reduce-overhead"
        self.memory = None if hidden else self._peak_memory() - before

    def step(self) -> Tensor:
        """Take one training step and return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def time(self, steps: int) -> float:
        """Return milliseconds per step."""
        return milliseconds(self.step, steps, self.device.type == "cuda")

    def _peak_memory(self) -> int:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        kept = sum(t.nbytes for t in [*self.model.parameters(), *self.model.buffers(), *state])
        with PeakMemory() as peak:
            self.step()
        return kept + peak.peak_bytes


def machine_of(device: str) -> str:
    """Return the name of the GPU, or the processor and its threads."""
    return (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write results with command and versions as JSON, if a path is given."""
    if path is None:
        return
    words = list(sys.argv)
    if "--out" in words:  # where the results are is not what they depend on
        place = words.index("--out")
        del words[place : place + 2]
    command = "python " + shlex.join(words)
    whole = {"command": command, "leanbayes": lb.__version__, "torch": torch.__version__, **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(whole) + "\n")
