"""Measure a training step of LeNet-5 on MNIST: deterministic, Bayes by Backprop, VDP++, VDP with full covariances.

    python benchmarks/lenet.py --out benchmarks/results/lenet.json

Every variant takes the same step in fp32: forward, backward and SGD with momentum, on fixed random data, in batches of
512 as in the paper; full covariances use the largest of 512, 256, 128, 64 and 32 that fits. The variants take turns,
round after round; times are medians over rounds. Memory is the peak during a step, with parameters and optimizer state.
Ratios are relative to the deterministic network in the same mode, per example.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import Trainer, machine_of, middle, write
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.networks import lenet5
from leanbayes.rules.covariance import covariances

NUM_DATA = 60_000
HALVINGS = 5  # batch sizes to try with full covariances
TABLE_HEAD = """| mode | variant | batch | ms (quartiles) | s/epoch | time × | memory MB | kB/example | memory × |
|---|---|---|---|---|---|---|---|---|"""
Loss = Callable[[], Tensor]
Build = Callable[[nn.Module, Tensor, Tensor], tuple[nn.Module, Loss]]


def deterministic(net: nn.Module, x: Tensor, y: Tensor) -> tuple[nn.Module, Loss]:
    """Return the deterministic network and its loss."""
    return net, lambda: F.cross_entropy(net(x), y)


def bayesian(method: lb.Method) -> Build:
    """Return a builder for a method with its own rule."""

    def build(net: nn.Module, x: Tensor, y: Tensor) -> tuple[nn.Module, Loss]:
        bnn = lb.bayesianize(net, method)
        return bnn, lambda: lb.elbo_loss(bnn, x, y, num_data=NUM_DATA, check=False)

    return build


def full_covariance(net: nn.Module, x: Tensor, y: Tensor) -> tuple[nn.Module, Loss]:
    """Return VDP with full covariances, as in Dera et al., and its loss."""
    bnn = lb.bayesianize(net, lb.VDP(rule="covariance"))

    def loss() -> Tensor:
        draw = bnn.next_draw(with_kl=True)
        output, kl = bnn(x, _draw=draw)
        total, observations = bnn.method.expected_nll(bnn.likelihood, output.moments(), y, draw.key)
        return total / observations + kl / NUM_DATA

    return bnn, loss


COVARIANCE = "VDP, full covariance"
VARIANTS: dict[str, Build] = {
    "deterministic": deterministic,
    "Bayes by Backprop": bayesian(lb.MeanField(rule="sample")),
    "VDP++": bayesian(lb.VDP()),
    "VDP++, as in the paper": bayesian(lb.VDP.paper()),
    COVARIANCE: full_covariance,
}


class Ready(NamedTuple):
    """A variant after its first steps."""

    trainer: Trainer
    batch: int
    slow: bool

    def time(self, steps: int) -> float:
        """Return milliseconds per step."""
        return self.trainer.time(1 if self.slow else steps)


def make(variant: str, mode: str, batch: int, args: argparse.Namespace) -> Ready:
    """Build a variant and take its first steps."""
    device, slow = torch.device(args.device), variant == COVARIANCE
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    torch.manual_seed(0)
    x = torch.randn(batch, 1, 28, 28, device=device)
    y = torch.randint(10, (batch,), device=device)
    model, loss = VARIANTS[variant](lenet5().to(device).train(), x, y)
    warmup, compiled = 2 if slow else args.warmup, "default" if mode == "compiled" else None
    return Ready(Trainer(model, loss, device, before, lr=1e-4, warmup=warmup, compiled=compiled), batch, slow)


def prepared(variant: str, mode: str, args: argparse.Namespace) -> Ready | None:
    """Prepare a variant; with full covariances, in the largest batch that fits."""
    sizes = [args.batch >> times for times in range(HALVINGS)] if variant == COVARIANCE else [args.batch]
    for size in filter(None, sizes):
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return make(variant, mode, size, args)
        except (torch.OutOfMemoryError, lb.LeanBayesError) as error:
            print(f"{variant} in batches of {size}: {str(error)[:200]}", file=sys.stderr, flush=True)
        except Exception as error:  # a variant that cannot be compiled is a result, not a crash
            if mode == "eager":
                raise
            print(f"{variant}, {mode}: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
    return None


def measure(mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all variants in turns."""
    if args.device == "cuda":
        make("deterministic", "eager", args.batch, args)  # so that no variant is charged for GPU workspaces
    ready: dict[str, Ready] = {}
    for variant in args.variant:
        if variant == COVARIANCE and mode != "eager":
            continue
        made = prepared(variant, mode, args)
        if made is not None:
            ready[variant] = made
        print(f"{mode} {variant}: {'ready' if made else 'skipped'}", file=sys.stderr, flush=True)
    rounds = [{variant: one.time(args.steps) for variant, one in ready.items()} for _ in range(args.repeats)]
    rows = []
    for variant, one in ready.items():
        times, memory = middle([of[variant] for of in rounds]), one.trainer.memory
        row: dict[str, Any] = {
            "mode": mode,
            "variant": variant,
            "batch": one.batch,
            **times,
            "epoch_s": times["ms"] * NUM_DATA / one.batch / 1e3,
            "memory_mb": None if memory is None else memory / 1e6,
            "kb_per_example": None if memory is None else memory / one.batch / 1e3,
        }
        plain = ready.get("deterministic")
        if plain is not None:
            scale = plain.batch / one.batch
            row["time_ratio"] = statistics.median(of[variant] * scale / of["deterministic"] for of in rounds)
            row["memory_ratio"] = memory * scale / plain.trainer.memory if memory and plain.trainer.memory else None
        rows.append(row)
    return rows


def table_row(row: dict[str, Any]) -> str:
    """Format the results of one variant."""
    low, high = row["ms_quartiles"]
    cells = [row["mode"], row["variant"], str(row["batch"]), f"{row['ms']:.2f} ({low:.2f} to {high:.2f})"]
    forms = {"epoch_s": ".2f", "time_ratio": ".2f", "memory_mb": ".0f", "kb_per_example": ".0f", "memory_ratio": ".2f"}
    cells += ["" if row.get(name) is None else format(row[name], form) for name, form in forms.items()]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure every variant and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--variant", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--repeats", type=int, default=7, help="number of rounds")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    machine = machine_of(args.device)
    if args.device == "cuda":
        covariances.LIMIT = torch.cuda.get_device_properties(0).total_memory
    print(f"torch {torch.__version__}, {machine}, fp32")
    print(TABLE_HEAD)
    rows: list[dict[str, Any]] = []
    for mode in args.mode:
        torch.compiler.reset()
        fresh = measure(mode, args)
        for row in fresh:
            print(table_row(row), flush=True)
        rows += fresh
    write(args.out, {"machine": machine, "precision": "fp32", "rows": rows})


if __name__ == "__main__":
    main()
