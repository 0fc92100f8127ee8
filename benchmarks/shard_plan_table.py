"""Compute memory and communication of sharded models on each process, from the layouts of networks.

    python benchmarks/shard_plan_table.py --out benchmarks/results/shard-plan.json

Nothing is trained: the networks are on the meta device. Weights are gathered in bf16, means and stds are in fp32.
Beside the plan for one GPU, the table has what engines.py measured there for the same network, method and optimizer.
"""

import argparse
import json
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

RESULTS = Path(__file__).parent / "results"
METHODS: dict[str, Any] = {
    "mean-field, AdamW": lb.MeanField(),
    "mean-field, IVON": lb.MeanField(engine="ivon"),
    "SSVI 5 %, IVON": lb.SSVI(0.05, engine="ivon"),
    "PBN 5 %, IVON": lb.PBN(0.05, engine="ivon"),
}
PROCESSES = (1, 8, 64)
LANGUAGE = ("GPT-2 small", "GPT-2 medium")  # which engines.py trains by AdamW, and other networks by SGD with Adam
HEAD = (
    "| network | method | memory, 1 GPU | state per weight | measured | peak of a step, measured | 8 GPUs | 64 GPUs "
    "| sent per step |\n|---|---|---|---|---|---|---|---|---|"
)


def networks() -> dict[str, nn.Module]:
    """Make the networks without memory."""
    from engines import LANGUAGE as SIZES
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # its import takes seconds

    with torch.device("meta"):
        return {
            "ResNet-50": build("resnet-50", (3, 224, 224), 1000),
            "ViT-B/16": build("vit-base", (3, 224, 224), 1000),
            "ViT-H/14": VisionTransformer(1000, (3, 224, 224), patch=14, width=1280, depth=32, heads=16),
            **{name: GPT2LMHeadModel(GPT2Config(**SIZES[_key(name)])) for name in LANGUAGE},
            "7B transformer": LlamaForCausalLM(LlamaConfig()),
        }


def _key(network: str) -> str:
    """Return the name of a network in engines.py."""
    return {"ViT-B/16": "vit-base"}.get(network, network.lower().replace("gpt-2 ", "gpt2-"))


def measured(network: str, method: str) -> dict[str, Any] | None:
    """Return the row of engines.py for a network and a method, or None if it has none."""
    rows = {"mean-field, IVON": "ivon", "SSVI 5 %, IVON": "SSVI ivon"}
    if network in LANGUAGE:
        rows["mean-field, AdamW"] = "backprop"
    path = RESULTS / f"engines-{_key(network)}.json"
    if method not in rows or not path.exists():
        return None
    row: dict[str, Any] = json.loads(path.read_text())["rows"].get(rows[method], {"failed": ""})
    return None if "failed" in row else row


def table_row(row: dict[str, Any]) -> str:
    """Format the numbers of one network and method."""
    plans, found = row["plans"], measured(row["network"], row["method"])
    memory = {processes: f"{plan['memory'] / 1e9:.2f} GB" for processes, plan in plans.items()}
    one = plans["1"]
    state = f"{(one['parameters'] + one['optimizer']) / one['weights']:.2f} B"
    own = peak = ""
    if found is not None:
        own = f"{found['bytes_per_weight']['parameters'] + found['bytes_per_weight']['optimizer']:.2f} B"
        peak = f"{found['peak_bytes'] / 1e9:.2f} GB"
    cells = [memory["1"], state, own, peak, memory["8"], memory["64"], f"{plans['64']['exchanged'] / 1e9:.2f} GB"]
    return f"| {row['network']} | {row['method']} | {' | '.join(cells)} |"


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
