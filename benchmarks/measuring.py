"""What the benchmarks share: taking times, memory and the record of a run."""

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
from leanbayes.cost import PeakMemory
from leanbayes.plain import json_text


def wait(cuda: bool) -> None:
    """Let a GPU finish what it was given."""
    if cuda:
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], Any], times: int, cuda: bool) -> float:
    """How long one of some runs takes."""
    wait(cuda)
    start = time.perf_counter()
    for _ in range(times):
        run()
    wait(cuda)
    return 1e3 * (time.perf_counter() - start) / times


def busy(run: Callable[[], Any], times: int = 5) -> float:
    """Milliseconds of a run in which the GPU is at work, but for the names that optimisers give to all of theirs."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.self_device_time_total for e in kernels if "Optimizer" not in e.name) / 1e3 / times


def middle(times: list[float]) -> dict[str, Any]:
    """Median and quartiles of what `milliseconds` found in several rounds."""
    times = sorted(times)
    return {"ms": statistics.median(times), "ms_quartiles": [times[len(times) // 4], times[3 * len(times) // 4]]}


class Trainer:
    """A model that is ready to take steps by SGD, and the memory that a step takes with all that is kept.

    loss: of one step. compiled: the mode of torch.compile, or None. autocast: whether to compute in bf16.
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
        """Warm up; `before` is the memory that was taken before the model was made."""
        self.model, self.device, self.autocast = model, device, autocast
        self.loss = torch.compile(loss, mode=compiled, fullgraph=fullgraph) if compiled else loss
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        for _ in range(warmup):
            last = self.step()
        assert torch.isfinite(last), "the training diverged"
        # On a CPU memory is counted operation by operation, which a compiled step does not show; on a GPU the pool of
        # CUDA graphs is not in the count.
        hidden = compiled if device.type == "cpu" else compiled == "reduce-overhead"
        self.memory = None if hidden else self._peak_memory() - before

    def step(self) -> Tensor:
        """One training step."""
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.loss()
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def time(self, steps: int) -> float:
        """Milliseconds a step."""
        return milliseconds(self.step, steps, self.device.type == "cuda")

    def _peak_memory(self) -> int:
        self.optimiser.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        state = [v for s in self.optimiser.state.values() for v in s.values() if isinstance(v, Tensor)]
        kept = sum(t.nbytes for t in [*self.model.parameters(), *self.model.buffers(), *state])
        with PeakMemory() as peak:
            self.step()
        return kept + peak.peak_bytes


def machine_of(device: str) -> str:
    """Name the machine that is measured."""
    return (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write what was measured as JSON, with the command and the versions, if there is a path."""
    if path is None:
        return
    command = "python " + shlex.join(sys.argv).partition(" --out")[0]
    whole = {"command": command, "leanbayes": lb.__version__, "torch": torch.__version__, **record}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(whole) + "\n")
