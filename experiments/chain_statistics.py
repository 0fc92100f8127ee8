"""Snapshots of a chain with their own statistics of BatchNorm, or with one set for all, on held-out images.

The chain is that of `lb.AEB`, whose weights move far between snapshots if the weight decay is large. One set for all is
the mean of the statistics of all snapshots, as a pass over the data with a random snapshot per batch computes it.

python experiments/chain_statistics.py --out experiments/results/choices/chain-statistics.json
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.evaluation.calibration_error import bin_sums, expected_calibration_error
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json


def main() -> None:
    """Train one chain per seed, and write the scores of its snapshots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--data", default="digits", help="name of a data set of images")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage of a ResNet-20")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16, help="batch size")
    parser.add_argument("--weight-decays", nargs="+", type=float, default=[5e-4, 5e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    record = {
        "command": command_of("chain_statistics", args, []),
        "results": [one_chain(args, decay, seed) for decay in args.weight_decays for seed in range(args.seeds)],
        "versions": versions(),
        "machine": machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, record)


def one_chain(args: argparse.Namespace, weight_decay: float, seed: int) -> dict[str, Any]:
    """Train one chain, and score its members."""
    data = load(args.data, validation_share=0.25, seed=seed)
    network = build("resnet-20", data.input_shape, data.outputs, seed=seed, width=args.width)
    started = time.monotonic()
    bnn = lb.fit(
        network, lb.AEB(density=0.1, temperature=1e-3), data, epochs=args.epochs, batch_size=args.batch,
        optimizer="sgd", weight_decay=weight_decay, temperature=0.01, warmup=5 / 60, evaluate_every=0, seed=seed,
        device="cpu", progress=False,
    )  # fmt: skip
    seconds = time.monotonic() - started
    x, y = next(Batches(data.validation, 10_000, normalize=data.normalize, shuffle=False).epoch())
    members = [bnn.member(number).eval() for number in range(bnn.members or 0)]
    weights = [torch.cat([p.detach().flatten() for p in member.parameters()]) for member in members]
    scores = {"own": scores_of(members, x, y)}
    share_statistics(members)
    scores["shared"] = scores_of(members, x, y)
    found = {
        "weight_decay": weight_decay,
        "seed": seed,
        "examples": len(y),
        "distance": float((weights[0] - weights[-1]).norm() / weights[-1].norm()),
        "held_out": scores,
        "training_seconds": seconds,
    }
    print(found, flush=True)
    return found


@torch.no_grad()
def scores_of(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> dict[str, float]:
    """Return accuracy, NLL and ECE of the mean probabilities."""
    probs = torch.stack([member(x).softmax(1) for member in members]).mean(0)
    return {
        "accuracy": float((probs.argmax(1) == y).double().mean()),
        "nll": float(nn.functional.nll_loss(probs.clamp_min(1e-30).log(), y)),
        "ece": expected_calibration_error(bin_sums(probs.amax(1), probs.argmax(1) == y)),
        "confidence": float(probs.amax(1).mean()),
    }


@torch.no_grad()
def share_statistics(members: Sequence[nn.Module]) -> None:
    """Give all members the mean of their statistics of BatchNorm."""
    for norms in zip(*(_norms(member) for member in members), strict=True):
        for name in ("running_mean", "running_var"):
            mean = torch.stack([getattr(norm, name) for norm in norms]).mean(0)
            for norm in norms:
                getattr(norm, name).copy_(mean)


def _norms(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


if __name__ == "__main__":
    run_script(main)
