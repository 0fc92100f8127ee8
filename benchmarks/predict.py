"""Measure `predict` as a user calls it: one pass by moments and 30 samples against a plain forward pass.

    python benchmarks/predict.py --network resnet-20 vit-tiny --out benchmarks/results/predict-cpu.json

All ways predict the same random batch, after a warm-up. They take turns, round after round; times and ratios are
medians over rounds. On a CPU, time is CPU time of one thread, so that other programs on the machine matter little, and
memory is the peak of activations. On a GPU, time is wall time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import machine_of, middle, wait, write
from step import TABLE_HEAD, table_row

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.networks import build

SHAPES = {"resnet-18": (3, 32, 32), "resnet-20": (3, 32, 32), "vit-tiny": (3, 32, 32), "unet": (3, 64, 64)}
PLAIN = "plain network"


def milliseconds(run: Callable[[], Any], cuda: bool) -> float:
    """Return the milliseconds of one call."""
    clock = time.perf_counter if cuda else time.process_time
    wait(cuda)
    start = clock()
    run()
    wait(cuda)
    return 1e3 * (clock() - start)


def peak(run: Callable[[], Any], cuda: bool) -> float:
    """Return the peak memory of one call in MB, without what exists before it."""
    if not cuda:
        with PeakMemory() as memory:
            run()
        return memory.peak_bytes / 1e6
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


@torch.no_grad()
def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all ways to predict one batch."""
    cuda = args.device == "cuda"
    net = build(name, SHAPES[name], 10, seed=0).to(args.device).eval()
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.01)).eval()
    x = torch.randn(args.batch, *SHAPES[name], generator=torch.Generator().manual_seed(0)).to(args.device)
    runs: dict[tuple[str, str], Callable[[], Any]] = {
        ("eager", PLAIN): lambda: net(x),
        ("eager", "one pass"): lambda: bnn.predict(x, rule="moments", compile=False),
        ("eager", "30 samples"): lambda: bnn.predict(x, 30, compile=False),
    }
    if args.compile:
        runs["compiled", "one pass"] = lambda: bnn.predict(x, rule="moments", compile=True)
    for run in runs.values():
        run()
        run()
    memory = {way: peak(run, cuda) for way, run in runs.items() if way[0] == "eager"}
    rounds = [{way: milliseconds(run, cuda) for way, run in runs.items()} for _ in range(args.repeats)]
    plain = ("eager", PLAIN)
    return [
        {
            "network": name,
            "mode": way[0],
            "variant": way[1],
            **middle([one[way] for one in rounds]),
            "time_ratio": statistics.median(one[way] / one[plain] for one in rounds),
            "memory_mb": memory.get(way),
            "memory_ratio": memory[way] / memory[plain] if way in memory else None,
        }
        for way in runs
    ]


def main() -> None:
    """Measure every way and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", default=["resnet-20", "vit-tiny"], choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="also with compile=True, which takes minutes")
    parser.add_argument("--repeats", type=int, default=7, help="number of rounds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    print(TABLE_HEAD)
    rows = []
    for name in args.network:
        rows += measure(name, args)
        for row in rows[-4 if args.compile else -3 :]:
            print(table_row(row), flush=True)
    write(args.out, {"machine": machine_of(args.device), "precision": "fp32", "batch": args.batch, "rows": rows})


if __name__ == "__main__":
    main()
