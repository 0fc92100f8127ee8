"""Score ensembles of 1 to N plain networks, to say how many of them have the NLL of another method.

python experiments/ensembles.py PROBS.safetensors ... --like RESULT.json --out experiments/results/engines/FILE.json

Each file of probabilities comes from `engines.py sgd --save-probs`. Every number of members is scored on all its
subsets of the networks, and the metrics are averaged. The temperature of each subset is fitted to held-out images.
"""

import argparse
import json
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script
from engines import fitted_temperature, metrics
from safetensors.torch import load_file
from torch import Tensor

from leanbayes.training.record import machine, versions, write_json


def main() -> None:
    """Score all sizes and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, help="probabilities of plain networks")
    parser.add_argument("--like", type=Path, required=True, help="result file of one of the networks")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    members = [load_file(path) for path in args.files]
    sizes = [score_size(members, size) for size in range(1, len(members) + 1)]
    like = json.loads(args.like.read_text())
    result = {
        "command": command_of("ensembles", args, [str(path) for path in args.files], hidden=("files",)),
        "ensembles": sizes,
        "settings": like["settings"],
        "versions": versions(),
        "machine": machine(),
        "networks_trained_on": like["machine"],
    }
    write_json(args.out, result)
    for size in sizes:
        print(size, flush=True)


def score_size(members: list[dict[str, Tensor]], size: int) -> dict[str, Any]:
    """Return the mean metrics of all subsets of one size."""
    found = [score_subset(subset) for subset in combinations(members, size)]
    means = {
        kind: {key: statistics.fmean(one[kind][key] for one in found) for key in found[0][kind]} for kind in found[0]
    }
    return {"members": size, "subsets": len(found), **means}


def score_subset(subset: tuple[dict[str, Tensor], ...]) -> dict[str, dict[str, float]]:
    """Score one ensemble, with and without temperature."""
    held_out, test = (torch.stack([one[name].double() for one in subset]).mean(0) for name in ("held_out", "test"))
    temperature = fitted_temperature(held_out, subset[0]["held_out_labels"])
    labels = subset[0]["test_labels"]
    scaled = (test.log() / temperature).softmax(1)
    return {
        "test": metrics(test, labels),
        "test_with_temperature": {"temperature": temperature, **metrics(scaled, labels)},
    }


if __name__ == "__main__":
    run_script(main)
