"""Count the bytes moved and kernels run by one training step (forward and backward, without optimizer).

    python benchmarks/moved.py --out benchmarks/results/moved.json

The counts are of eager operations on a CPU in fp32, and the same on every machine.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from measuring import count_cost, write
from step import VARIANTS, batch, network
from torch import nn

from leanbayes.errors import LeanBayesError


def measure(name: str, variant: str) -> dict[str, Any]:
    """Count a step of one variant."""
    x, y = batch(name, 64, torch.device("cpu"))
    net: nn.Module = network(name).train()
    _, loss_fn = VARIANTS[variant](net, x, y)
    cost = count_cost(lambda: loss_fn().backward())
    return {"network": name, "variant": variant, "bytes": cost.bytes, "kernels": cost.kernels}


def main() -> None:
    """Count every variant and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    rows = []
    print("| network | variant | MB moved | × | kernels |\n|---|---|---|---|---|")
    for name in ("mlp", "lenet", "cnn"):
        plain = measure(name, "deterministic")["bytes"]
        for variant in VARIANTS:
            try:
                row = measure(name, variant)
            except LeanBayesError as error:  # no whole layer of the mlp is as small as 1 % of its weights
                print(f"{name} {variant}: {error}", file=sys.stderr)
                continue
            row["ratio"] = row["bytes"] / plain
            rows.append(row)
            print(f"| {name} | {variant} | {row['bytes'] / 1e6:.0f} | {row['ratio']:.2f} | {row['kernels']} |")
    write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
