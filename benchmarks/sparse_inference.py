"""Measure the speedup of sparse kernels for sparse weights on a CPU: per layer shape, and for whole networks.

    python benchmarks/sparse_inference.py --out benchmarks/results/sparse-inference.json

A layer is timed with dense and with sparse kernels, and with the choice that a model makes by sizes and density, which
must seldom be slower than dense. Networks predict with 5 samples, with and without sparse kernels. The
variants take turns, round after round; times are medians over rounds.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from measuring import machine_of, milliseconds, write
from torch import Tensor

import leanbayes as lb
from leanbayes.core.layout import Slot
from leanbayes.networks import build
from leanbayes.posteriors import SparsePointPosterior
from leanbayes.posteriors.subspace.blocks import Blocks
from leanbayes.posteriors.subspace.sparse_weight import Pattern, SparseWeight

# (outputs, inputs, taps, pixels): linear layers have no pixels.
LAYERS = (
    (304, 784, 1, 0),
    (1024, 1024, 1, 0),
    (3072, 768, 1, 0),
    (4096, 4096, 1, 0),
    (256, 128, 1, 16),
    (512, 2048, 1, 7),
    (64, 64, 3, 32),
    (256, 256, 3, 8),
    (512, 512, 3, 4),
)
NETWORKS = {"lenet-300-100": (1, 28, 28), "vit-tiny": (3, 32, 32), "resnet-18": (3, 32, 32)}
DENSITIES = (0.1, 0.05, 0.02)
BATCHES = (1, 16, 128)
BLOCKS = (1, 16)  # square blocks of linear layers
SAMPLES = 5
LAYER_HEAD = """| layer | blocks | density | batch | dense ms | sparse ms | picked ms | dense / picked |
|---|---|---|---|---|---|---|---|"""
NETWORK_HEAD = f"""| network, {SAMPLES} samples | density | batch | dense ms | picked ms | dense / picked |
|---|---|---|---|---|---|"""


class Always(Pattern):
    """A pattern that always uses sparse kernels."""

    def pays(self, *args: Any) -> bool:
        """Return True."""
        return True


def timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each variant; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken = milliseconds(way, 1, cuda=False)
            if number:  # the first round is a warm-up
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def layer(
    outputs: int, inputs: int, taps: int, pixels: int, block: int, density: float, batch: int, rounds: int
) -> dict[str, Any]:
    """Time one layer with single active weights or square blocks."""
    shape = (outputs, inputs, taps, taps) if pixels else (outputs, inputs)
    slot = Slot(("weight",), shape, tuple(range(len(shape))), torch.float32, 1)
    blocks = Blocks(slot, (block, block))
    positions = blocks.positions(torch.randperm(blocks.count)[: round(density * blocks.count)]).sort().values
    values = torch.randn(len(positions))
    x = torch.randn(batch, inputs, pixels, pixels) if pixels else torch.randn(batch, inputs)

    def call(weight: Any) -> Tensor:
        return F.conv2d(x, weight, None, 1, taps // 2) if pixels else F.linear(x, weight)

    always, picking = Always(positions, slot, blocks.shape), Pattern(positions, slot, blocks.shape)
    ways: dict[str, Callable[[], Any]] = {
        "dense": lambda: call(picking.dense(values)),
        "sparse": lambda: call(SparseWeight(always, values)),
        "picked": lambda: call(SparseWeight(picking, values)),
    }
    times = timed(ways, rounds)
    return {
        "layer": "x".join(map(str, shape)) + (f" on {pixels}x{pixels}" if pixels else ""),
        "block": block,
        "density": density,
        "batch": batch,
        **{f"{name}_ms": value for name, value in times.items()},
        "picks_sparse": picking.pays(batch * max(pixels, 1) ** 2),
    }


def dense_weights(posterior: SparsePointPosterior, active: Tensor) -> list[Tensor]:
    """Return all weights as dense tensors."""
    return posterior.layout.split(posterior.scatter(active))


def network(name: str, density: float, batch: int, rounds: int) -> dict[str, Any]:
    """Time the prediction of a network with samples."""
    shape = NETWORKS[name]
    bnn = lb.bayesianize(build(name, shape, 10, seed=0), lb.SSVI(density=density)).eval()
    x = torch.randn(batch, *shape)

    def dense() -> Any:
        with mock.patch.object(SparsePointPosterior, "_weights", dense_weights):
            return bnn.predict(x, SAMPLES)

    times = timed({"dense": dense, "picked": lambda: bnn.predict(x, SAMPLES)}, rounds)
    return {"network": name, "density": density, "batch": batch, **{f"{way}_ms": ms for way, ms in times.items()}}


def layer_row(row: dict[str, Any]) -> str:
    """Format the results of one layer."""
    kind = f"| {row['layer']} | {row['block']}x{row['block']} | {row['density']} | {row['batch']} "
    times = " | ".join(f"{row[f'{way}_ms']:.3f}" for way in ("dense", "sparse", "picked"))
    return f"{kind}| {times} | {row['dense_ms'] / row['picked_ms']:.2f} |"


def network_row(row: dict[str, Any]) -> str:
    """Format the results of one network."""
    return (
        f"| {row['network']} | {row['density']} | {row['batch']} | {row['dense_ms']:.2f} | {row['picked_ms']:.2f} "
        f"| {row['dense_ms'] / row['picked_ms']:.2f} |"
    )


def main() -> None:
    """Time all layers and networks and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="number of rounds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    machine = machine_of("cpu")
    print(f"torch {torch.__version__}, {machine}\n")
    print(LAYER_HEAD)
    layers, networks = [], []
    with torch.no_grad():
        for one in LAYERS:
            for density in DENSITIES:
                for batch in BATCHES:
                    for block in BLOCKS if one[-1] == 0 else BLOCKS[:1]:
                        row = layer(*one, block, density, batch, args.repeats)
                        layers.append(row)
                        print(layer_row(row), flush=True)
        print(f"\n{NETWORK_HEAD}")
        for name in NETWORKS:
            for batch in BATCHES[:2]:
                row = network(name, 0.05, batch, args.repeats)
                networks.append(row)
                print(network_row(row), flush=True)
    write(args.out, {"machine": machine, "layers": layers, "networks": networks})


if __name__ == "__main__":
    main()
