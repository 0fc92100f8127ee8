"""PBN by the recipe of its paper, and which part of the recipe its results depend on.

python experiments/pbn_recipe.py --root FOLDER --out experiments/results/pbn/recipe.json

LeNet-300-100 on MNIST, trained as the paper says: SGD with a constant learning rate of 0.01, momentum 0.9, a weight
decay of 1e-5, and batches of 50. Half of the epochs train the plain network. From there all rows continue with the
other half, at a rate of 5 %:

plain          the plain network
paper          `lb.PBN.paper()`, all by SGD: 5 samples per step, and a weight of the KL that falls from 0.2 to 0.01
Adam for stds  the same, but Adam with a learning rate of 0.01 trains the stds, as `lb.fit` does
stds fixed     the same, but the stds keep their initial values

Each row is scored on the test images, by 5 samples and at the means, and on 10,000 training images.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arguments import command_of, run_script
from torch import nn

import leanbayes as lb
from leanbayes.data import Batches, Data, load
from leanbayes.networks import build
from leanbayes.posteriors import PartialPosterior
from leanbayes.training import Recipe
from leanbayes.training.record import machine, versions, write_json

MODEL = "lenet-300-100"
LR, MOMENTUM, WEIGHT_DECAY, BATCH, SAMPLES = 0.01, 0.9, 1e-5, 50, 5
BETA = Recipe(temperature=0.2, temperature_end=0.01, temperature_warmup=0.0)  # the weight of the KL
SCALE_LR = 0.01  # of Adam, as lb.fit has it by default
SELECTION = 32  # batches that weights are selected on, as in lb.fit
TRAINING = 10  # batches of 1,000 training images that are scored
SCORES = ("accuracy", "nll", "ece")
ROWS = ("plain", "paper", "Adam for stds", "stds fixed")


def main() -> None:
    """Train all rows of all seeds, and write their scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--data", default="mnist", help="name of a data set of images")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rate", type=float, default=0.05, help="fraction of Bayesian weights")
    parser.add_argument("--epochs", type=int, default=50, help="epochs in all, half of them of the plain network")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="folder with the data sets")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(args.seeds):
        for found in one_seed(args, seed):
            results.append(found)
            about = {"model": {"name": MODEL}, "source": {"name": args.data}, "epochs": args.epochs, "rate": args.rate}
            record = {"command": command_of("pbn_recipe", args, []), **about, "results": results}
            write_json(args.out, {**record, "versions": versions(), "machine": machine()})  # so far
            print(found, flush=True)


def one_seed(args: argparse.Namespace, seed: int) -> Iterator[dict[str, Any]]:
    """Train the plain network, and from it every row."""
    data = load(args.data, args.root, seed=seed)
    network = build(MODEL, data.input_shape, data.outputs, seed=seed)
    batches = Batches(data.train, BATCH, seed=seed, normalize=data.normalize)
    first = args.epochs // 2
    train_plain(network, batches, range(first))
    start = {name: value.clone() for name, value in network.state_dict().items()}
    for row in args.rows:
        network.load_state_dict(start)
        began = time.monotonic()
        if row == "plain":
            train_plain(network, batches, range(first, args.epochs))
            model, stds = lb.bayesianize(network, lb.Deterministic()), {}
        else:
            method = dataclasses.replace(lb.PBN.paper(), rate=args.rate, seed=seed)
            model = lb.bayesianize(network, method, data=list(islice(batches.epoch(first), SELECTION)))
            train_partial(model, batches, range(first, args.epochs), row)
            stds = stds_of(model)
        seconds = time.monotonic() - began
        yield {"name": row, "seed": seed, **scores_of(model, data, seed), "stds": stds, "seconds": seconds}


def train_plain(network: nn.Module, batches: Batches, epochs: range) -> None:
    """Train a plain network."""
    optimizer = torch.optim.SGD(network.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    network.train()
    for epoch in epochs:
        for x, y in batches.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()


def train_partial(model: lb.BayesianModel, batches: Batches, epochs: range, row: str) -> None:
    """Train a partial Bayesian network."""
    scales = list(model.scale_parameters())
    known = {id(parameter) for parameter in scales}
    means = [parameter for parameter in model.parameters() if id(parameter) not in known]
    together = means + scales if row == "paper" else means
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(together, LR, MOMENTUM, weight_decay=WEIGHT_DECAY)]
    if row == "Adam for stds":
        optimizers.append(torch.optim.Adam(scales, SCALE_LR))
    if row == "stds fixed":
        model.posterior.rho.requires_grad_(False)
    steps, step = len(epochs) * len(batches), 0
    model.train()
    for epoch in epochs:
        for x, y in batches.epoch(epoch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            beta = BETA.temperature_at(step, steps)
            lb.elbo_loss(model, x, y, num_data=len(batches.dataset), temperature=beta, samples=SAMPLES).backward()
            for optimizer in optimizers:
                optimizer.step()
            step += 1


def stds_of(model: lb.BayesianModel) -> dict[str, dict[str, float]]:
    """Return for each layer the number of Bayesian weights, the median of their σ, and the largest σ."""
    posterior = model.posterior
    assert isinstance(posterior, PartialPosterior)
    slots, std = model.layout.slots_of(posterior.index), posterior.std().detach()
    found = {}
    for number, slot in enumerate(model.layout):
        of = std[slots == number]
        if len(of):
            found[slot.name] = {"count": len(of), "median": float(of.median()), "largest": float(of.max())}
    return found


def scores_of(model: lb.BayesianModel, data: Data, seed: int) -> dict[str, Any]:
    """Return scores on the test images by samples and at the means, and on training images by samples."""
    assert data.test is not None
    test, train = (Batches(split, 1000, normalize=data.normalize, shuffle=False) for split in (data.test, data.train))
    samples = {"samples": SAMPLES if model.layout.numel else None, "seed": seed, "details": False}
    found = {"test": lb.evaluate(model, test.epoch(), **samples)}
    found["training"] = lb.evaluate(model, islice(train.epoch(), TRAINING), **samples)
    if model.layout.numel:
        found["test, at the means"] = lb.evaluate(model, test.epoch(), rule="mean", details=False)
    return {split: {key: scores[key] for key in SCORES} for split, scores in found.items()}


if __name__ == "__main__":
    run_script(main)
