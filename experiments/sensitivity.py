"""Compare each kind of sensitivity with exact per-example Jacobians, on networks trained on digits.

python experiments/sensitivity.py --out experiments/results/pbn/sensitivity.json

The ground truth per weight is the mean over 512 examples of Σ_o (∂f_o/∂θ)², in double precision. The program prints the
rank correlation of each kind with it, and the fraction of the top 5 % of the weights that the kind finds.
"""

import argparse
import functools
from pathlib import Path
from typing import Any, get_args

import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.methods.pbn.estimators import Kind
from leanbayes.training.record import machine, versions, write_json

KINDS = get_args(Kind)
NETWORKS = ("mlp", "conv")
EXAMPLES, PART, TOP = 512, 32, 0.05
SEED, STEPS = 0, 300


def build(name: str) -> nn.Module:
    """Return a network with fixed initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        if name == "mlp":
            return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return shuffled images and labels."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(SEED))
    return torch.tensor(bunch.data / 16)[order], torch.tensor(bunch.target)[order]


@functools.cache
def trained(name: str) -> lb.BayesianModel:
    """Return a network after some training steps on digits, in double precision."""
    x, y = digits()
    network, generator = build(name), torch.Generator().manual_seed(SEED + 1)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = torch.randint(0, 1400, (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[batch].float()), y[batch]).backward()
        optimizer.step()
    return lb.bayesianize(network.double().eval(), lb.MeanField())


@functools.cache
def examples() -> list[tuple[Tensor, Tensor]]:
    """Return the batches that sensitivities are computed on."""
    x, y = digits()
    return list(zip(x[:EXAMPLES].split(PART), y[:EXAMPLES].split(PART), strict=True))


@functools.cache
def squared_jacobian(name: str) -> Tensor:
    """Return the mean over examples of Σ_o (∂f_o/∂θ_i)², from the Jacobian of every example."""
    bnn, x = trained(name), digits()[0][:EXAMPLES]

    def outputs(weights: Tensor, one: Tensor) -> Tensor:
        with bnn.holding(weights) as network:
            return network(one[None])[0]

    weights = bnn.posterior.mean().detach()
    jacobians = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0), chunk_size=PART)(weights, x)
    return jacobians.detach().square().sum((0, 1)) / len(x)


def agreement(kind: Any, name: str) -> tuple[float, float]:
    """Return the rank correlation with the squared Jacobian, and the fraction of its top weights that is found."""
    truth, found = squared_jacobian(name), lb.sensitivity(trained(name), examples(), kind)
    best = lb.Sensitivity(found.layout, truth, "truth").top(TOP)
    shared = torch.isin(best, found.top(TOP)).double().mean().item()
    return float(spearmanr(truth.numpy(), found.scores.numpy()).statistic), shared


def main() -> None:
    """Score all kinds of sensitivity."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    results = []
    for kind in KINDS:
        for name in NETWORKS:
            correlation, found = agreement(kind, name)
            results.append({"kind": kind, "network": name, "spearman": correlation, "top_found": found})
            print(
                f"{kind:<10} {name:<5} Spearman {correlation:.3f}, {found:.1%} of the top {TOP:.0%} found", flush=True
            )
    if args.out is not None:
        record = {
            "command": "python experiments/sensitivity.py",
            "seed": SEED,
            "steps": STEPS,
            "examples": EXAMPLES,
            "top": TOP,
            "versions": versions(),
            "machine": machine(),
            "results": results,
        }
        write_json(args.out, record)


if __name__ == "__main__":
    main()
