"""Compute memory and communication of sharded models on each process, from the layouts of networks.

    python benchmarks/shard_plan_table.py --out benchmarks/results/shard-plan.json

Nothing is trained: the networks are on the meta device. Weights are gathered in bf16, means and stds are in fp32.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measuring import write
from torch import nn

import leanbayes as lb
from leanbayes.methods.shard_plan import shard_plan
from leanbayes.networks import build
from leanbayes.networks.vit import VisionTransformer

METHODS: dict[str, Any] = {
    "mean-field, AdamW": lb.MeanField(),
    "mean-field, IVON": lb.MeanField(engine="ivon"),
    "SSVI 5 %, IVON": lb.SSVI(0.05, engine="ivon"),
    "PBN 5 %, IVON": lb.PBN(0.05, engine="ivon"),
}
PROCESSES = (1, 8, 64)
HEAD = "| network | method | memory, 1 GPU | 8 GPUs | 64 GPUs | sent per step |\n|---|---|---|---|---|---|"


def networks() -> dict[str, nn.Module]:
    """Make the networks without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM  # its import takes seconds

    with torch.device("meta"):
        huge = VisionTransformer(1000, (3, 224, 224), patch=14, width=1280, depth=32, heads=16)
        return {
            "ResNet-50": build("resnet-50", (3, 224, 224), 1000),
            "ViT-H/14": huge,
            "7B transformer": LlamaForCausalLM(LlamaConfig()),
        }


def table_row(row: dict[str, Any]) -> str:
    """Format the numbers of one network and method."""
    memory = " | ".join(f"{plan['memory'] / 1e9:.2f} GB" for plan in row["plans"].values())
    return f"| {row['network']} | {row['method']} | {memory} | {row['plans']['64']['exchanged'] / 1e9:.2f} GB |"


def main() -> None:
    """Compute all rows, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    rows = []
    for name, network in networks().items():
        for title, method in METHODS.items():
            plans = {}
            for processes in PROCESSES:
                plan = shard_plan(network, method, processes, torch.bfloat16)
                plans[str(processes)] = {**asdict(plan), "memory": plan.memory, "exchanged": plan.exchanged}
            rows.append({"network": name, "method": title, "plans": plans})
            print(table_row(rows[-1]))
    write(args.out, {"dtype": "bfloat16", "rows": rows})


if __name__ == "__main__":
    main()
