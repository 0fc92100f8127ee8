"""Measure epochs of `lb.fit` against the time that their steps take as CUDA graphs.

    python benchmarks/captured_epoch.py --out benchmarks/results/captured-epoch.json

ResNet-18 trains in bf16 on random images of the size and number of CIFAR-10, with its augmentation. Each method trains
in three modes: eager, with torch.compile, and captured in a CUDA graph (`Recipe.compile`). An epoch is the wall time
from one end of an epoch to the next, with batches and log entries. The first epochs, which compile and capture, are not
counted. "overhead" is the time of an epoch over steps × the time of one replay; it is 1 if Python costs nothing.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from epoch import images
from measuring import machine_of, milliseconds, write

import leanbayes as lb
from leanbayes.data import Batches, Data
from leanbayes.methods import parse_method
from leanbayes.networks import build
from leanbayes.training.journal import Journal
from leanbayes.training.loop import Loop

WARM_UP = 2  # epochs that are not counted
REPLAYS = 200
MODES = ("eager", "compiled", "captured")
METHODS = (
    "deterministic",
    "mean-field:prior.scale=0.05,init_std=0.001,relative=false",
    "mean-field:engine=ivon",
)
TABLE_HEAD = """| method | mode | epoch s (lowest, highest) | replay ms | steps × replay s | overhead | memory MB |
|---|---|---|---|---|---|---|"""


def measure(method: str, mode: str, data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """Train one method in one mode, and return the seconds of its epochs and the milliseconds of a replay."""
    cuda = torch.cuda.is_available()
    ends: list[float] = []
    graphs: list[Any] = []
    said: list[str] = []
    result: dict[str, Any] = {"method": method, "mode": mode}
    end_epoch: Callable[..., None] = Loop._end_epoch
    replay: Callable[..., None] = torch.cuda.CUDAGraph.replay

    def timed_end(loop: Loop, epoch: int, started: float | None) -> None:
        end_epoch(loop, epoch, started)
        if cuda:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if epoch == args.epochs + WARM_UP and graphs:
            result["replay_ms"] = milliseconds(lambda: replay(graphs[0]), REPLAYS, cuda)

    def remembered(graph: Any) -> None:
        graphs[:] = [graph]
        replay(graph)

    torch._dynamo.reset()
    if cuda:
        torch.cuda.empty_cache()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Loop, "_end_epoch", timed_end))
        patches.enter_context(mock.patch.object(torch.cuda.CUDAGraph, "replay", remembered))
        patches.enter_context(mock.patch.object(Journal, "say", lambda journal, text: said.append(text)))
        if mode == "compiled":
            patches.enter_context(mock.patch("leanbayes.training.loop.obstacle", return_value="measured without"))
        train(method, mode, data, args, result)
    seconds = [end - start for start, end in itertools.pairwise(ends)][WARM_UP - 1 :]
    steps = args.examples // args.batch
    result |= {"epoch_seconds": seconds, "median": statistics.median(seconds), "steps": steps, "said": said}
    if mode == "captured" and "replay_ms" in result:
        result["replay_seconds"] = steps * result["replay_ms"] / 1e3
        result["overhead"] = result["median"] / result["replay_seconds"]
    return result


def train(method: str, mode: str, data: Data, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Call `fit`, and add the peak memory to the result."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    lb.fit(
        build(args.network, (3, 32, 32), 10, seed=0),
        parse_method(method),
        data,
        epochs=args.epochs + WARM_UP,
        batch_size=args.batch,
        temperature=0.01,
        optimizer="sgd",
        precision="bf16",
        compile=mode != "eager",
        channels_last=True,
        evaluate_every=0,
        refresh_batchnorm=False,
        progress=False,
    )
    if torch.cuda.is_available():
        result["memory_bytes"] = torch.cuda.max_memory_reserved()


def batch_seconds(data: Data, args: argparse.Namespace) -> float:
    """Return the seconds that the batches of an epoch take alone."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    batches = Batches(
        data.train, args.batch, device=device, augment=data.augment, normalize=data.normalize, channels_last=True
    )

    def run() -> None:
        for _ in batches.epoch(0):
            pass

    run()
    return milliseconds(run, 3, cuda) / 1e3


def row(result: dict[str, Any]) -> str:
    """Return one line of the table."""
    seconds = result["epoch_seconds"]
    extent = f"{result['median']:.3f} ({min(seconds):.3f}, {max(seconds):.3f})"
    known = {"replay_ms": "{:.3f}", "replay_seconds": "{:.3f}", "overhead": "{:.3f}"}
    cells = [form.format(result[name]) if name in result else "" for name, form in known.items()]
    memory = f"{result['memory_bytes'] / 1e6:.0f}" if "memory_bytes" in result else ""
    return f"| {' | '.join([result['method'], result['mode'], extent, *cells, memory])} |"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=list(METHODS), help="as in leanbayes compare")
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--network", default="resnet-18")
    parser.add_argument("--examples", type=int, default=45_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5, help="counted epochs per method and mode")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    data = images(args.examples)
    batches = batch_seconds(data, args)
    print(f"The batches of an epoch alone: {batches:.3f} s", flush=True)
    print(TABLE_HEAD, flush=True)
    results = []
    for method in args.method:
        for mode in args.mode:
            results.append(measure(method, mode, data, args))
            print(row(results[-1]), flush=True)
            for text in results[-1]["said"]:
                print(text, flush=True)
    settings = {"network": args.network, "examples": args.examples, "batch": args.batch, "precision": "bf16"}
    machine = machine_of("cuda" if torch.cuda.is_available() else "cpu")
    write(args.out, {**settings, "machine": machine, "batch_seconds": batches, "results": results})


if __name__ == "__main__":
    main()
