"""What one pass by moments costs beside one plain forward pass and 30 draws of the weights.

    python benchmarks/one_pass.py --network resnet18 --mode eager compiled --out benchmarks/results/one-pass.json

All variants predict the same fixed random batch, under bf16 autocast. They take turns, round after round, so that a
slow moment of the machine hits them all; times and ratios are medians over rounds. On a GPU, "busy" is the time that
its kernels take: where it is far below the pass's, the pass waits for Python.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import busy, machine_of, middle, milliseconds, write
from step import TABLE_HEAD, table_row
from torch import Tensor

import leanbayes as lb
from leanbayes.models import build
from leanbayes.rules import MomentPropagation, Rule

SHAPES = {"resnet18": (3, 32, 32), "vit-tiny": (3, 32, 32), "unet": (3, 128, 128), "lenet-5": (1, 28, 28)}
DRAWS = 30
Run = Callable[[], Any]


def by_rule(bnn: lb.BayesianModel, rule: str | Rule, x: Tensor, compiled: str | None) -> Run:
    """One pass by a rule, which is chosen once and for all."""
    bnn.rule = rule

    def forward(x: Tensor) -> Any:
        output = bnn(x)
        return (output.loc, output.variance) if isinstance(output, lb.Moments) else output

    call = torch.compile(forward, fullgraph=True, mode=compiled) if compiled else forward
    return lambda: call(x)


def variants(name: str, args: argparse.Namespace, mode: str) -> dict[str, Run]:
    """Every way to predict the batch."""
    device = torch.device(args.device)
    net = build(name, SHAPES[name], 10, seed=0).to(device).eval()
    x = torch.randn(args.batch, *SHAPES[name], device=device)
    if name != "vit-tiny":
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    compiled = {"eager": None, "compiled": "default", "cudagraphs": "reduce-overhead"}[mode]
    plain = torch.compile(net, fullgraph=True, mode=compiled) if compiled else net
    found: dict[str, Run] = {"plain network": lambda: plain(x)}
    for label, rule in (
        ("one pass", MomentPropagation()),
        ("one pass, independent", MomentPropagation(correlation="none")),
        ("one draw", "sample"),
    ):
        if label in args.variant:
            found[label] = by_rule(lb.bayesianize(net, lb.MeanField(init_std=0.01)).eval(), rule, x, compiled)
    if "one draw" in found:
        one = found["one draw"]
        found[f"{DRAWS} draws"] = lambda: [one() for _ in range(DRAWS)]
    return found


@torch.no_grad()
def measure(name: str, mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all variants in turns."""
    cuda = args.device == "cuda"
    runs = variants(name, args, mode)
    memory: dict[str, float] = {}
    for label, run in runs.items():
        for _ in range(3):
            run()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            memory[label] = (torch.cuda.max_memory_allocated() - before) / 1e6
        print(f"{name} {mode} {label}: ready", file=sys.stderr, flush=True)
    rounds = [
        {label: milliseconds(run, 1 if "draws" in label else args.passes, cuda) for label, run in runs.items()}
        for _ in range(args.repeats)
    ]
    rows = []
    for label, run in runs.items():
        rows.append({
            "network": name,
            "mode": mode,
            "variant": label,
            **middle([one[label] for one in rounds]),
            "time_ratio": statistics.median(one[label] / one["plain network"] for one in rounds),
            "busy_ms": busy(run) if cuda else None,
            "memory_mb": memory.get(label),
            # A CUDA graph has its memory from the start, and allocates none.
            "memory_ratio": memory[label] / memory["plain network"] if memory.get("plain network") else None,
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure every variant and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", default=["resnet18"], choices=list(SHAPES))
    parser.add_argument("--mode", nargs="+", default=["eager"], choices=["eager", "compiled", "cudagraphs"])
    parser.add_argument("--variant", nargs="*", default=["one pass", "one pass, independent", "one draw"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fp32", action="store_true", help="no bf16 autocast")
    parser.add_argument("--passes", type=int, default=10, help="passes in one round")
    parser.add_argument("--repeats", type=int, default=20, help="rounds")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
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
