"""Compare two ways to compute the gradients of a convolution's weight for each example, on a CPU.

    python benchmarks/example_gradients.py --out benchmarks/results/example-gradients-cpu.json

The rule `adjoint` needs them. One way is a product of windows; the other one is a grouped convolution of oneDNN, in
which each example is a group. The second one is taken within the limits of `rules/example_gradients.py`. Times are
CPU time of one thread for each example, the median over rounds in which both ways take turns.
"""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measuring import machine_of, write
from torch import nn

import leanbayes as lb
from leanbayes.rules import example_gradients

# Channels in and out, pixels along a side, kernel and stride: layers of ResNets, small CNNs and U-Nets.
SHAPES = [
    (3, 64, 32, 3, 1),
    (16, 16, 32, 3, 1),
    (32, 32, 16, 3, 1),
    (64, 64, 8, 3, 1),
    (64, 64, 32, 3, 1),
    (64, 128, 32, 3, 2),
    (128, 128, 16, 3, 1),
    (256, 256, 8, 3, 1),
    (512, 512, 4, 3, 1),
    (64, 128, 32, 1, 1),
    (256, 64, 56, 1, 1),
    (3, 64, 64, 7, 2),
    (8, 8, 72, 3, 1),
]
WAYS = {"windows": (1 << 60, 0), "groups": (0, 1 << 60)}


def compare(shape: tuple[int, ...], batch: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds per example of both ways, and which one the rule takes."""
    inputs, outputs, side, kernel, stride = shape
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    network = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    bnn = lb.bayesianize(network, lb.MeanField(), likelihood=lb.Gaussian()).eval()
    x = torch.randn(batch, inputs, side, side)
    limits = example_gradients.POSITIONS, example_gradients.WEIGHTS
    found: dict[str, list[float]] = {name: [] for name in WAYS}

    def scalar(output: torch.Tensor) -> torch.Tensor:
        return output[:, 0]

    results = {}
    try:
        for _ in range(rounds + 1):
            for name, (positions, weights) in WAYS.items():
                example_gradients.POSITIONS, example_gradients.WEIGHTS = positions, weights
                start = time.process_time()
                results[name] = lb.delta_method(bnn, x, scalar).variance
                found[name].append(1e3 * (time.process_time() - start) / batch)
    finally:
        example_gradients.POSITIONS, example_gradients.WEIGHTS = limits
    torch.testing.assert_close(results["groups"], results["windows"], rtol=1e-4, atol=0)
    times = {name: statistics.median(each[1:]) for name, each in found.items()}
    pixels = math.ceil(side / stride) ** 2
    taken = example_gradients.by_groups(pixels, layer.weight.shape)
    return {"shape": shape, "ms": times, "speedup": times["windows"] / times["groups"], "groups_are_taken": taken}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        rows.append(compare(shape, options.batch, options.rounds))
        row = rows[-1]
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in row["ms"].items())
        print(f"{shape}: {times}, taken: {'groups' if row['groups_are_taken'] else 'windows'}", flush=True)
    write(options.out, {"machine": machine_of("cpu"), "batch": options.batch, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
