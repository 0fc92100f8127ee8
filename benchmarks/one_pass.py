"""Measure the time of one pass by moments against a plain forward pass and 30 Monte Carlo samples, per method.

    python benchmarks/one_pass.py --network resnet18 --mode eager compiled --out benchmarks/results/one-pass.json

All variants predict the same fixed random batch under bf16 autocast. They take turns, round after round, so that a slow
moment of the machine affects all; times and ratios are medians over rounds. On a GPU, "busy" is the time of its
kernels: if it is far below the time of the pass, the pass waits for Python. Mean and variance of the weights, which one
pass needs, are computed once for all passes; "weights_ms" is the time for that.
"""

import argparse
import contextlib
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import busy, machine_of, middle, milliseconds, write
from step import COMPILED, TABLE_HEAD, table_row
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.network import tensors_of
from leanbayes.networks import build
from leanbayes.rules import MomentPropagation

SHAPES = {"resnet18": (3, 32, 32), "vit-tiny": (3, 32, 32), "unet": (3, 128, 128), "lenet-5": (1, 28, 28)}
SAMPLES = 30
Run = Callable[[], Any]


@dataclass(frozen=True)
class Variant:
    """A way to predict the batch, and the computation of the weights if it is shared by all passes."""

    run: Run
    weights: Run | None = None


def sparse(net: nn.Module) -> lb.BayesianModel:
    """Return SSVI with 5 % of the weights."""
    return lb.bayesianize(net, lb.SSVI(density=0.05))


MODELS: dict[str, Callable[[nn.Module], lb.BayesianModel]] = {
    "mean-field": lambda net: lb.bayesianize(net, lb.MeanField(init_std=0.01)),
    "sparse": sparse,
    "partial": lambda net: lb.bayesianize(net, lb.PBN(rate=0.05, sensitivity="magnitude")),
    "shared": lambda net: lb.bayesianize(sparse(net), lb.WeightSharing(components=256)),
    "dropout": lambda net: lb.bayesianize(net, lb.MCDropout(rate=0.1)),
    "ensemble": lambda net: lb.bayesianize(net, lb.Ensemble(members=5)),
}


class Ways:
    """The ways to predict the batch x; `stack` closes contexts that stay open for many passes."""

    def __init__(self, x: Tensor, mode: str, stack: contextlib.ExitStack) -> None:
        self.x, self.compiled, self.stack = x, COMPILED[mode], stack

    def plain(self, network: Callable[[Tensor], Any]) -> Run:
        """Return a call of a network or a function."""
        call = torch.compile(network, fullgraph=True, mode=self.compiled) if self.compiled else network
        return lambda: call(self.x)

    def one_pass(self, bnn: lb.BayesianModel, correlation: Any = "common") -> Variant:
        """Return one pass by moments, with precomputed weights."""
        bnn.rule = MomentPropagation(correlation)
        draw = bnn.next_draw()
        call = self.stack.enter_context(bnn.drawn(draw))
        for value in bnn._values or ():
            for tensor in tensors_of(value if isinstance(value, Tensor) else vars(value)):
                torch._dynamo.mark_static_address(tensor)  # or CUDA graphs would copy them for every pass

        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            output = call(x)
            return output.loc, output.variance

        return Variant(self.plain(forward), lambda: bnn.current_rule.weights(bnn.posterior, draw.key, False))

    def samples(self, bnn: lb.BayesianModel, number: int = SAMPLES) -> Variant:
        """Return passes that each draw weights or dropout masks."""
        bnn.rule = "sample"
        one = self.plain(lambda x: bnn(x))
        return Variant(one if number == 1 else lambda: [one() for _ in range(number)])

    def members(self, bnn: lb.BayesianModel) -> Variant:
        """Return one pass through every network of an ensemble."""
        runs = [self.plain(network) for network in bnn.network.networks]  # type: ignore[union-attr]
        return Variant(lambda: [run() for run in runs])


VARIANTS: dict[str, tuple[str, Callable[[Ways, lb.BayesianModel], Variant]]] = {
    "one pass": ("mean-field", Ways.one_pass),
    "one pass, independent": ("mean-field", lambda ways, bnn: ways.one_pass(bnn, "none")),
    "one sample": ("mean-field", lambda ways, bnn: ways.samples(bnn, 1)),
    f"{SAMPLES} samples": ("mean-field", Ways.samples),
    "one pass, sparse": ("sparse", Ways.one_pass),
    f"{SAMPLES} samples, sparse": ("sparse", Ways.samples),
    "one pass, partial": ("partial", Ways.one_pass),
    f"{SAMPLES} samples, partial": ("partial", Ways.samples),
    "one pass, shared": ("shared", Ways.one_pass),
    f"{SAMPLES} samples, shared": ("shared", Ways.samples),
    f"{SAMPLES} samples, dropout": ("dropout", Ways.samples),
    "ensemble of 5": ("ensemble", Ways.members),
}
PLAIN = "plain network"
USUAL = ("one pass", "one pass, independent", "one sample", f"{SAMPLES} samples")


def variants(name: str, chosen: Sequence[str], ways: Ways) -> dict[str, Variant]:
    """Build the plain network and the chosen variants."""
    x = ways.x
    net = build(name, SHAPES[name], 10, seed=0).to(x.device).eval()
    if name != "vit-tiny":
        net = net.to(memory_format=torch.channels_last)
    made = {kind: MODELS[kind](net).eval() for kind in dict.fromkeys(VARIANTS[label][0] for label in chosen)}
    found = {PLAIN: Variant(ways.plain(net))}
    for label in chosen:
        kind, way = VARIANTS[label]
        found[label] = way(ways, copy.deepcopy(made[kind]))
    return found


@torch.no_grad()
def measure(name: str, mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all variants in turns."""
    cuda = args.device == "cuda"
    x = torch.randn(args.batch, *SHAPES[name], device=args.device)
    if name != "vit-tiny":
        x = x.to(memory_format=torch.channels_last)
    with contextlib.ExitStack() as stack:
        ready = variants(name, args.variant, Ways(x, mode, stack))
        memory: dict[str, float] = {}
        for label, one in ready.items():
            for _ in range(3):
                one.run()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                one.run()
                memory[label] = (torch.cuda.max_memory_allocated() - before) / 1e6
            print(f"{name} {mode} {label}: ready", file=sys.stderr, flush=True)
        rounds = [
            {label: milliseconds(one.run, passes_of(label, args.passes), cuda) for label, one in ready.items()}
            for _ in range(args.repeats)
        ]
        rows = []
        for label, one in ready.items():
            weights = one.weights and [milliseconds(one.weights, args.passes, cuda) for _ in range(args.repeats)]
            rows.append({
                "network": name,
                "mode": mode,
                "variant": label,
                **middle([of[label] for of in rounds]),
                "time_ratio": statistics.median(of[label] / of[PLAIN] for of in rounds),
                "busy_ms": busy(one.run) if cuda else None,
                "weights_ms": statistics.median(weights) if weights else None,  # eager in every mode
                "memory_mb": memory.get(label),
                # A CUDA graph reserves its memory at the start and allocates none.
                "memory_ratio": memory[label] / memory[PLAIN] if memory.get(PLAIN) else None,
            })  # fmt: skip
    return rows


def passes_of(label: str, passes: int) -> int:
    """Return how often a variant runs per round; variants of many passes run once."""
    return 1 if "samples" in label or "ensemble" in label else passes


def main() -> None:
    """Measure every variant and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", default=["resnet18"], choices=list(SHAPES))
    parser.add_argument("--mode", nargs="+", default=["eager"], choices=["eager", "compiled", "cudagraphs"])
    parser.add_argument(
        "--variant", nargs="*", default=list(USUAL), choices=list(VARIANTS), help="variants besides the plain network"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fp32", action="store_true", help="without bf16 autocast")
    parser.add_argument("--passes", type=int, default=10, help="passes per round")
    parser.add_argument("--repeats", type=int, default=20, help="number of rounds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    machine, precision = machine_of(args.device), "fp32" if args.fp32 else "bf16"
    print(f"torch {torch.__version__}, {machine}, {precision}, batch {args.batch}")
    print(TABLE_HEAD)
    rows: list[dict[str, Any]] = []
    with torch.autocast(args.device, torch.bfloat16, enabled=not args.fp32):
        for name in args.network:
            for mode in args.mode:
                torch.compiler.reset()
                fresh = measure(name, mode, args)
                for row in fresh:
                    print(table_row(row), flush=True)
                rows += fresh
    write(args.out, {"machine": machine, "precision": precision, "batch": args.batch, "rows": rows})


if __name__ == "__main__":
    main()
