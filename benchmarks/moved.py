"""Bytes moved and kernels run by one training step (forward and backward, no optimiser), counted and not timed.

    python benchmarks/moved.py --out benchmarks/results/moved.json

The counts are those of the eager operations on a CPU in fp32, and the same on every machine.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from step import VARIANTS, batch, network
from torch import nn

import leanbayes as lb
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
    if args.out:
        command = "python " + " ".join(sys.argv).partition(" --out")[0]
        record = {"command": command, "leanbayes": lb.__version__, "torch": torch.__version__, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
