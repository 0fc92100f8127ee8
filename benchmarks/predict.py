"""Measure `predict` as a user calls it: one pass by moments and 30 samples against a plain forward pass.

    python benchmarks/predict.py --network resnet-20 vit-tiny --out benchmarks/results/predict-cpu.json
    sh benchmarks/predict_gpu.sh

Convolutions in half precision are fastest on a GPU in channels-last order, which the plain network has too.
All ways predict the same random batch, after a warm-up; on a CPU the last one only calls torch's generator, which
30 samples need in addition to 30 passes. They take turns, round after round; times and ratios are
medians over rounds. On a CPU, time is CPU time of one thread, so that other programs on the machine matter little, and
memory is the peak of activations. On a GPU, time is wall time, the plain network is compiled with CUDA graphs, memory
of a compiled way is that of its graph, and waits are the operations of one prediction for which Python waits.
A way that fails, or that is not ready when its network's time is over, has a row that says why.
"""

import argparse
import gc
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measuring import machine_of, middle, wait, write
from torch import Tensor

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.networks import build

SIDES = {"resnet-18": 32, "resnet-20": 32, "resnet-50": 224, "unet": 256, "vit-base": 224, "vit-tiny": 32}
PLAIN, ONE_PASS, SAMPLES = "plain network", "one pass", "30 samples"
NOISE = "noise of 30 samples"
TABLE_HEAD = """| network | mode | variant | ms (quartiles) | × eager | × compiled | memory MB | memory × | waits |
|---|---|---|---|---|---|---|---|---|"""
MEASURING = 0.2  # share of the time of a network that is kept for the rounds
ROUND = 0.05  # seconds of one way in one round on a GPU
Way = tuple[str, str]
Run = Callable[[], Any]


def table_row(row: dict[str, Any]) -> str:
    """Format the results of one way."""
    cells = [row["network"], row["mode"], row["variant"]]
    if "error" in row:
        cells += [row["error"].replace("|", "/"), "", "", "", "", ""]
        return f"| {' | '.join(cells)} |"
    low, high = row["ms_quartiles"]
    cells.append(f"{row['ms']:.2f} ({low:.2f} to {high:.2f})")
    forms = {"time_ratio": ".2f", "compiled_ratio": ".2f", "memory_mb": ".0f", "memory_ratio": ".2f", "waits": "d"}
    for name, form in forms.items():
        value = row.get(name)
        cells.append("" if value is None else format(value, form))
    return f"| {' | '.join(cells)} |"


# -- ways to predict --------------------------------------------------------------------------------------------------


def inputs_of(name: str, args: argparse.Namespace) -> Tensor:
    """Return a batch of random images."""
    side = args.side or SIDES[name]
    x = torch.randn(args.batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(args.device)
    return x.to(memory_format=torch.channels_last) if args.channels_last else x


def ways_of(name: str, x: Tensor, args: argparse.Namespace) -> dict[Way, Run]:
    """Return what is timed, the most important first."""
    classes = 1000 if SIDES[name] == 224 else 10
    net = build(name, tuple(x.shape[1:]), classes, seed=0).to(args.device).eval()
    if args.channels_last:
        net = net.to(memory_format=torch.channels_last)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.01)).eval()
    runs: dict[Way, Run] = {
        ("eager", PLAIN): lambda: net(x),
        ("eager", ONE_PASS): lambda: bnn.predict(x, rule="moments", compile=False),
        ("eager", SAMPLES): lambda: bnn.predict(x, 30, compile=False),
    }
    if args.device == "cpu":  # a GPU makes the noise in the kernel that draws the weights
        noise, generator = torch.empty(bnn.layout.numel), torch.Generator()
        runs["eager", NOISE] = lambda: [noise.normal_(generator=generator.manual_seed(seed)) for seed in range(30)]
    if args.compile:
        compiled = torch.compile(net, mode="reduce-overhead" if args.device == "cuda" else None)
        runs["compiled", PLAIN] = lambda: compiled(x)
        runs["compiled", ONE_PASS] = lambda: bnn.predict(x, rule="moments", compile=True)
        runs["compiled", SAMPLES] = lambda: bnn.predict(x, 30, compile=True)
    return {way: in_precision(run, args) for way, run in runs.items()}


def in_precision(run: Run, args: argparse.Namespace) -> Run:
    """Return a call without gradients in a block of autocast, which casts weights once per block."""

    def call() -> Any:
        with torch.no_grad(), torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            return run()

    return call


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise a TimeoutError inside the block after some seconds.

    Python drops errors inside callbacks such as those of weak references, so it is raised again every second.
    """

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- measurements -----------------------------------------------------------------------------------------------------


def milliseconds(run: Run, cuda: bool, times: int) -> float:
    """Return the mean milliseconds of a call."""
    clock = time.perf_counter if cuda else time.process_time
    wait(cuda)
    start = clock()
    for _ in range(times):
        run()
    wait(cuda)
    return 1e3 * (clock() - start) / times


def peak(run: Run, cuda: bool) -> float:
    """Return the peak memory of one call in MB, without what exists before it."""
    if not cuda:
        with PeakMemory() as memory:
            run()
        return memory.peak_bytes / 1e6
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    wait(cuda)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def graph_pools(cuda: bool) -> dict[Any, float]:
    """Return the MB of each memory pool of CUDA graphs."""
    pools: dict[Any, float] = {}
    for segment in torch.cuda.memory_snapshot() if cuda else []:
        pool = tuple(segment["segment_pool_id"])
        if pool != (0, 0):
            pools[pool] = pools.get(pool, 0.0) + segment["total_size"] / 1e6
    return pools


def waits(run: Run, cuda: bool) -> int | None:
    """Return how many operations of one call make Python wait for the GPU."""
    if not cuda:
        return None
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)


def warm_up(way: Way, run: Run, cuda: bool) -> dict[str, Any]:
    """Call a way until it is ready, and return what is measured once: memory, waits, and seconds of the first call."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    pools, start = graph_pools(cuda), time.perf_counter()
    run()
    wait(cuda)
    found: dict[str, Any] = {"first_call_s": time.perf_counter() - start, "memory_mb": None}
    for _ in range(1 if way[1] == SAMPLES else 5 if cuda else 2):  # predict() compares the first compiled passes
        run()
    if way[0] == "eager":
        found["memory_mb"] = peak(run, cuda)
    else:  # a pool that has not grown was large enough, so the way's own need is not known
        grown = [size for pool, size in graph_pools(cuda).items() if size != pools.get(pool)]
        found["memory_mb"] = sum(grown) or None
    return {**found, "waits": waits(run, cuda)}


def reason_of(error: BaseException) -> str:
    """Return the first line of an error and of those that caused it, or that time is over."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return "not ready in time"
        lines.append(f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0][:200]}")
        cause = cause.__cause__ or cause.__context__
    return "; ".join(lines)


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all ways to predict one batch."""
    cuda, start = args.device == "cuda", time.perf_counter()
    x = inputs_of(name, args)
    runs = ways_of(name, x, args)
    found: dict[Way, dict[str, Any]] = {}
    for way, run in runs.items():
        left = None if args.seconds is None else (1 - MEASURING) * args.seconds - (time.perf_counter() - start)
        try:
            with limited(left):
                found[way] = warm_up(way, run, cuda)
        except Exception as error:  # a compiler may raise anything; a failure is a result
            found[way] = {"error": reason_of(error)}
    ready = {way: run for way, run in runs.items() if "error" not in found[way]}
    once = {way: milliseconds(run, cuda, 1) / 1e3 for way, run in ready.items()}
    times = {way: min(20, max(1, round(ROUND / seconds))) if cuda else 1 for way, seconds in once.items()}
    rounds: list[dict[Way, float]] = []
    while len(rounds) < args.repeats:
        if len(rounds) >= 3 and args.seconds is not None and time.perf_counter() - start > args.seconds:
            break
        rounds.append({way: milliseconds(run, cuda, times[way]) for way, run in ready.items()})
    return [{"network": name, "mode": way[0], "variant": way[1], **_row(way, found, rounds)} for way in runs]


def _row(way: Way, found: dict[Way, dict[str, Any]], rounds: list[dict[Way, float]]) -> dict[str, Any]:
    """Return the results of one way, relative to the plain network."""
    if "error" in found[way]:
        return found[way]
    ratios = {
        key: statistics.median(one[way] / one[mode, PLAIN] for one in rounds) if (mode, PLAIN) in rounds[0] else None
        for key, mode in (("time_ratio", "eager"), ("compiled_ratio", "compiled"))
    }
    memory, plain = found[way]["memory_mb"], found.get((way[0], PLAIN), {}).get("memory_mb")
    memory_ratio = memory / plain if memory and plain else None
    return {**middle([one[way] for one in rounds]), **ratios, **found[way], "memory_ratio": memory_ratio}


def main() -> None:
    """Measure every way and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", default=["resnet-20", "vit-tiny"], choices=list(SIDES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, help="side of the images in pixels; by default that of the network")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="bf16 is by autocast")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true", help="also compiled, which takes minutes on a CPU")
    parser.add_argument("--repeats", type=int, default=7, help="number of rounds")
    parser.add_argument("--seconds", type=float, help="time for each network, compilation included")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    settings = {key: vars(args)[key] for key in ("precision", "batch", "channels_last")}
    rows: list[dict[str, Any]] = []
    print(TABLE_HEAD)
    for name in args.network:
        torch.compiler.reset()
        fresh = measure(name, args)
        for row in fresh:
            print(table_row(row), flush=True)
        rows += fresh
        write(args.out, {"machine": machine_of(args.device), **settings, "rows": rows})


if __name__ == "__main__":
    main()
