"""Measure one training step: the deterministic network, each rule, and bayesian-torch if it is installed.

    python benchmarks/step.py --network resnet18 mlp --mode eager compiled --out benchmarks/results/step.json

Every variant takes the same step: forward, backward and SGD with momentum, on fixed random data. The variants take
turns, round after round, so that a slow moment of the machine affects all; times and ratios are medians over rounds.
Memory is the peak during a step, with parameters and optimizer state. On a GPU, "busy" is the time of its kernels: if
it is far below the time of the step, the step waits for Python, and only larger batches or CUDA graphs help.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Trainer, busy, machine_of, middle, write
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.networks import resnet18

NUM_DATA = 50_000
COMPILED = {"eager": None, "compiled": "default", "cudagraphs": "reduce-overhead"}
TABLE_HEAD = """| network | mode | variant | ms (quartiles) | time × | busy ms | memory MB | memory × |
|---|---|---|---|---|---|---|---|"""
Step = Callable[[], Tensor]


def network(name: str) -> nn.Module:
    """Build a network by name."""
    torch.manual_seed(0)
    if name in ("resnet18", "cnn"):
        net = resnet18(width=16 if name == "cnn" else 64)
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                module.__class__ = nn.Conv2d  # ours differ only in initialization; converters check the name
        return net
    if name == "lenet":
        convolutions = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1)]
        head = [nn.Flatten(), nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 10)]
        return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), *head)
    layers = [nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)]
    return nn.Sequential(*layers)


def batch(name: str, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a batch of random inputs and labels."""
    if name == "mlp":
        return torch.randn(size, 2048, device=device), torch.randint(2048, (size,), device=device)
    x = torch.randn(size, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (size,), device=device)


def deterministic(net: nn.Module, x: Tensor, y: Tensor) -> tuple[nn.Module, Step]:
    """Return the deterministic network and its loss."""
    return net, lambda: F.cross_entropy(net(x).float(), y)


def ours(method: lb.Method) -> Callable[[nn.Module, Tensor, Tensor], tuple[nn.Module, Step]]:
    """Return a builder for one of our methods."""

    def build(net: nn.Module, x: Tensor, y: Tensor) -> tuple[nn.Module, Step]:
        bnn = lb.bayesianize(net, method)
        return bnn, lambda: lb.elbo_loss(bnn, x, y, num_data=NUM_DATA, check=False)

    return build


def bayesian_torch(kind: str) -> Callable[[nn.Module, Tensor, Tensor], tuple[nn.Module, Step]]:
    """Return a builder for bayesian-torch that keeps pretrained weights and scales the KL as in its examples."""

    def build(net: nn.Module, x: Tensor, y: Tensor) -> tuple[nn.Module, Step]:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

        settings = {
            "prior_mu": 0.0,
            "prior_sigma": 0.1,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -5.0,
            "type": kind,
            "moped_enable": True,
            "moped_delta": 0.05,
        }
        device = x.device
        net = net.cpu()
        dnn_to_bnn(net, settings)
        net = net.to(device, memory_format=torch.channels_last)
        return net, lambda: F.cross_entropy(net(x).float(), y) + get_kl_loss(net) / NUM_DATA

    return build


VARIANTS: dict[str, Callable[[nn.Module, Tensor, Tensor], tuple[nn.Module, Step]]] = {
    "deterministic": deterministic,
    "sample": ours(lb.MeanField(rule="sample")),
    "flipout": ours(lb.MeanField(rule="flipout")),
    "local": ours(lb.MeanField(rule="local")),
    "moments": ours(lb.VDP()),
    "moments, the paper's": ours(lb.VDP.paper()),
    "partial 1 %": ours(lb.PBN(rate=0.01, sensitivity="magnitude")),
    "partial 1 %, whole layers": ours(lb.PBN(rate=0.01, sensitivity="magnitude", per="layer", rule="local")),
    "subspace 5 %": ours(lb.SSVI(density=0.05)),
    "shared 256": ours(lb.WeightSharing(components=256)),
}
if importlib.util.find_spec("bayesian_torch"):
    VARIANTS["bayesian-torch"] = bayesian_torch("Reparameterization")
    VARIANTS["bayesian-torch flipout"] = bayesian_torch("Flipout")


def trainer(name: str, variant: str, mode: str, args: argparse.Namespace) -> Trainer:
    """Prepare one variant."""
    device = torch.device(args.device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    x, y = batch(name, args.batch or (64 if name == "mlp" else 256), device)
    model, loss = VARIANTS[variant](network(name).to(device, memory_format=torch.channels_last).train(), x, y)
    return Trainer(
        model,
        loss,
        device,
        before,
        lr=1e-3,
        warmup=args.warmup,
        compiled=COMPILED[mode],
        fullgraph=not variant.startswith("bayesian-torch"),
        autocast=not args.fp32,
    )


def measure(name: str, mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all variants in turns."""
    trainers: dict[str, Trainer] = {}
    if args.device == "cuda":
        trainer(name, "deterministic", "eager", args)  # so that no variant is charged for workspaces of GPU libraries
    for variant in args.variant:
        gc.collect()
        try:
            trainers[variant] = trainer(name, variant, mode, args)
        except Exception as error:  # a peer that cannot run this is a result, not a crash
            if not variant.startswith("bayesian-torch"):
                raise
            print(f"{name} {mode} {variant}: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"{name} {mode} {variant}: ready", file=sys.stderr, flush=True)
    rounds = [{variant: ready.time(args.steps) for variant, ready in trainers.items()} for _ in range(args.repeats)]
    rows = []
    for variant, ready in trainers.items():
        row = {
            "network": name,
            "mode": mode,
            "variant": variant,
            **middle([one[variant] for one in rounds]),
            "memory_mb": None if ready.memory is None else ready.memory / 1e6,
            "busy_ms": busy(ready.step) if args.device == "cuda" else None,
        }
        if "deterministic" in trainers:
            row["time_ratio"] = statistics.median(one[variant] / one["deterministic"] for one in rounds)
            plain = trainers["deterministic"].memory
            row["memory_ratio"] = ready.memory / plain if ready.memory and plain else None
        rows.append(row)
    return rows


def table_row(row: dict[str, Any]) -> str:
    """Format the results of one variant; with CUDA graphs, memory is left out because it misses their pool."""
    low, high = row["ms_quartiles"]
    if row["mode"] == "cudagraphs":
        row = {**row, "memory_mb": None, "memory_ratio": None}
    cells = [row["network"], row["mode"], row["variant"], f"{row['ms']:.2f} ({low:.2f} to {high:.2f})"]
    for name, form in (("time_ratio", ".2f"), ("busy_ms", ".2f"), ("memory_mb", ".0f"), ("memory_ratio", ".2f")):
        value = row.get(name)
        cells.append("" if value is None else format(value, form))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure every variant and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--network", nargs="+", default=["resnet18", "mlp"], choices=["resnet18", "cnn", "lenet", "mlp"]
    )
    parser.add_argument("--mode", nargs="+", default=["eager"], choices=["eager", "compiled", "cudagraphs"])
    parser.add_argument("--variant", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--batch", type=int, help="default: 256 images, or 64 for the mlp")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fp32", action="store_true", help="without bf16 autocast")
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--repeats", type=int, default=20, help="number of rounds")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    machine, precision = machine_of(args.device), "fp32" if args.fp32 else "bf16"
    print(f"torch {torch.__version__}, {machine}, {precision}")
    print(TABLE_HEAD)
    for name in args.network:
        for mode in args.mode:
            torch.compiler.reset()
            fresh = measure(name, mode, args)
            for row in fresh:
                print(table_row(row), flush=True)
            rows += fresh
    write(args.out, {"machine": machine, "precision": precision, "rows": rows})


if __name__ == "__main__":
    main()
