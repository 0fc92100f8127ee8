"""Measure one training step by each engine: forward, backward and the update of all parameters.

    python benchmarks/engines.py --network resnet-18 --out benchmarks/results/engines-resnet-18.json

Variants: plain SGD, mean-field by Bayes by Backprop (SGD for the means, Adam for the stds), mean-field by IVON, and the
published IVON on the plain network (`ivon-opt`, if it is installed). The loss is compiled, and all but the published
optimizer are captured in a CUDA graph on a GPU. Variants take turns, round after round; times and ratios are medians
over rounds. Bytes are those of parameters, gradients and optimizer state, per weight.
"""

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import machine_of, write
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.networks import build

NUM_DATA = 50_000
Step = Callable[[], None]
Sizes = dict[str, tuple[tuple[int, int, int], int, int]]
NETWORKS: Sizes = {  # input shape, classes, batch size
    "resnet-18": ((3, 32, 32), 10, 256),
    "resnet-50": ((3, 224, 224), 1000, 128),
    "vit-base": ((3, 224, 224), 1000, 128),
    "small-cnn": ((1, 28, 28), 10, 64),
}


class Variant:
    """One way to train a network.

    Args:
        loss: Returns the loss of the batch.
        optimizers: The optimizers.
        parameters: All parameters.
        sampled: A context in which gradients are computed, for optimizers that need one.
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        optimizers: list[torch.optim.Optimizer],
        parameters: list[nn.Parameter],
        sampled: Callable[[], Any] | None = None,
    ) -> None:
        self.loss, self.optimizers, self.parameters, self.sampled = loss, optimizers, parameters, sampled
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """Take a step."""
        if self.graph is not None:
            self.graph.replay()
        elif self.sampled is None:
            self._plain()
        else:
            with self.sampled():
                self.loss().backward()
            self._update()

    def _plain(self) -> None:
        self.loss().backward()
        self._update()

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def capture(self) -> None:
        """Capture the step in a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._plain()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._plain()
        self.graph = graph

    def bytes_per_weight(self) -> dict[str, float]:
        """Return the bytes of parameters and gradients, and of optimizer state, for each parameter of the network."""
        # The published optimizer has vectors of all parameters in its groups, others a state for each parameter.
        states = [s for o in self.optimizers for s in (*o.state.values(), *o.param_groups) if isinstance(s, dict)]
        state = [t for one in states for t in one.values() if isinstance(t, Tensor)]
        stored = sum(p.numel() * p.element_size() for p in self.parameters)
        kept = sum(t.numel() * t.element_size() for t in state)
        return {"parameters": stored, "gradients": stored, "optimizer": kept}


def variants(name: str, size: int, device: torch.device, lr: Tensor | float) -> dict[str, Variant]:
    """Return all variants of a network."""
    shape, classes, _ = NETWORKS[name]
    x = torch.randn(size, *shape, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(classes, (size,), device=device)
    fused = device.type == "cuda"

    def network() -> nn.Module:
        net = build(name, shape, classes, seed=0).to(device)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def compiled(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        fast = torch.compile(loss)

        def call() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return fast()

        return call

    def plain() -> Variant:
        net = network()
        sgd = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused)
        return Variant(compiled(lambda: F.cross_entropy(net(x), y)), [sgd], list(net.parameters()))

    def ours(engine: str) -> Variant:
        bnn = lb.bayesianize(network(), lb.MeanField(engine=engine))  # type: ignore[arg-type]
        optimizers: list[torch.optim.Optimizer]
        if engine == "ivon":
            optimizers = [lb.IVON(bnn, lr=lr, num_data=NUM_DATA)]
        else:
            means = torch.optim.SGD(bnn.mean_parameters(), lr=lr, momentum=0.9, nesterov=True, fused=fused)
            stds = torch.optim.Adam(bnn.scale_parameters(), lr=lr, fused=fused, capturable=fused)
            optimizers = [means, stds]
        temperature = torch.ones((), device=device)
        loss = lambda: lb.elbo_loss(bnn, x, y, num_data=NUM_DATA, temperature=temperature, check=False)  # noqa: E731
        return Variant(compiled(loss), optimizers, list(bnn.parameters()))

    def published() -> Variant:
        import ivon  # type: ignore[import-untyped]

        net = network()
        optimizer = ivon.IVON(net.parameters(), lr=float(lr), ess=NUM_DATA, hess_init=0.5, weight_decay=1e-3)
        loss = compiled(lambda: F.cross_entropy(net(x), y))
        return Variant(loss, [optimizer], list(net.parameters()), lambda: optimizer.sampled_params(train=True))

    made = {"sgd": plain(), "ivon": ours("ivon"), "backprop": ours("backprop")}
    if importlib.util.find_spec("ivon") is not None:
        made["ivon-opt"] = published()
    return made


def time_of(step: Step, steps: int, device: torch.device) -> float:
    """Return the milliseconds of a step, over several in a row."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return 1000 * (time.perf_counter() - started) / steps
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--network", choices=NETWORKS, default="resnet-18")
    parser.add_argument("--batch-size", type=int, help="default: that of the network")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps of a variant in a row")
    parser.add_argument("--variants", nargs="+", default=["sgd", "ivon", "backprop", "ivon-opt"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    size = args.batch_size or NETWORKS[args.network][2]
    lr = torch.tensor(1e-3, device=device)
    made = {name: v for name, v in variants(args.network, size, device, lr).items() if name in args.variants}
    gc.collect()
    numel = sum(p.numel() for p in made["sgd"].parameters)
    rows: dict[str, Any] = {}
    for name, variant in made.items():
        for _ in range(3):
            variant.step()
        captured = device.type == "cuda" and variant.sampled is None
        if captured:
            variant.capture()
        stored = {part: value / numel for part, value in variant.bytes_per_weight().items()}
        rows[name] = {"captured": captured, "bytes_per_weight": stored, "times": []}
    for _ in range(args.rounds):
        for name, variant in made.items():
            rows[name]["times"].append(time_of(variant.step, args.steps, device))
    plain = statistics.median(rows["sgd"]["times"])
    for name, row in rows.items():
        row["milliseconds"] = statistics.median(row["times"])
        row["ratio"] = row["milliseconds"] / plain
        stored = sum(row["bytes_per_weight"].values())
        cost = f"{row['milliseconds']:8.2f} ms  {row['ratio']:5.3f}x  {stored:5.1f} bytes per weight"
        print(f"{args.network:10} {name:10} {cost}")
    write(args.out, {"machine": machine_of(args.device), "network": args.network, "batch_size": size, "rows": rows})


if __name__ == "__main__":
    main()
