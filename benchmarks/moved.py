"""Bytes moved and kernels run by one training step (forward and backward, no optimiser), counted and not timed.

    python benchmarks/moved.py --out benchmarks/results/moved.json

The counts are those of the eager operations on a CPU in fp32, and the same on every machine.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measuring import write
from step import VARIANTS, batch, network
from torch import nn

from leanbayes.cost import count_cost


def measure(name: str, variant: str) -> dict[str, Any]:
    """Count one variant's step."""
    x, y = batch(name, 64, torch.device("cpu"))
    net: nn.Module = network(name).train()
    _, loss_fn = VARIANTS[variant](net, x, y)
    cost = count_cost(lambda: loss_fn().backward())
    return {"network": name, "variant": variant, "bytes": cost.bytes, "kernels": cost.kernels}


def main() -> None:
    """Count every variant and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args()
    rows = []
    print("| network | variant | MB moved | × | kernels |\n|---|---|---|---|---|")
    for name in ("mlp", "lenet", "cnn"):
        plain = measure(name, "deterministic")["bytes"]
        for variant in VARIANTS:
            row = measure(name, variant)
            row["ratio"] = row["bytes"] / plain
            rows.append(row)
            print(f"| {name} | {variant} | {row['bytes'] / 1e6:.0f} | {row['ratio']:.2f} | {row['kernels']} |")
    write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
