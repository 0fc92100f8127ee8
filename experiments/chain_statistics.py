"""Samples of the weights with their own statistics of BatchNorm, or with one set for all, on held-out images.

The samples are the snapshots of the chain of `lb.AEB`, whose weights move far between snapshots if the weight decay is
large, or samples of another method. One set for all is the mean of the statistics of all samples, as a pass over the
data with a random sample per batch computes it. For other methods than aeb, the statistics of each sample are also
computed from a single batch of 500 training images.

python experiments/chain_statistics.py --out experiments/results/choices/chain-statistics.json
python experiments/chain_statistics.py --methods swag --data cifar10 --out runs/FILE.json
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.noise import make_key
from leanbayes.data import ArrayDataset, Batches, Data, load
from leanbayes.evaluation.calibration_error import bin_sums, expected_calibration_error
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json

METHODS = {
    "aeb": lambda args: lb.AEB(density=0.1, temperature=1e-3),
    "swag": lambda args: lb.SWAG(samples=args.samples),
    "laplace": lambda args: lb.Laplace(prior_from="held-out"),
    "std-search": lambda args: lb.StdSearch(),
    "backprop": lambda args: lb.MeanField(engine="backprop"),
    "ivon": lambda args: lb.MeanField(engine="ivon"),
}
FEW = 500  # images of a single batch


def main() -> None:
    """Train one model per method and seed, and write the scores of its samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["aeb"])
    parser.add_argument("--data", default="digits", help="name of a data set of images")
    parser.add_argument("--train-images", type=int, help="number of training images (default: all)")
    parser.add_argument("--held-out-images", type=int, help="number of held-out images (default: all)")
    parser.add_argument("--samples", type=int, default=10, help="samples of other methods than aeb")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage of a ResNet-20")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16, help="batch size")
    parser.add_argument("--weight-decays", nargs="+", type=float, default=[5e-4, 5e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    record = {
        "command": command_of("chain_statistics", args, []),
        "results": [
            one_model(args, method, decay, seed)
            for method in args.methods
            for decay in args.weight_decays
            for seed in range(args.seeds)
        ],
        "versions": versions(),
        "machine": machine(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, record)


def one_model(args: argparse.Namespace, method: str, weight_decay: float, seed: int) -> dict[str, Any]:
    """Train one model, and score its samples."""
    data = load(args.data, validation_share=0.25, seed=seed)
    data = replace(
        data,
        train=_first(data.train, args.train_images),
        validation=_first(data.validation, args.held_out_images),
    )
    network = build("resnet-20", data.input_shape, data.outputs, seed=seed, width=args.width)
    started = time.monotonic()
    settings: dict[str, Any] = {"optimizer": "sgd", "weight_decay": weight_decay} if method != "ivon" else {}
    bnn = lb.fit(
        network, METHODS[method](args), data, epochs=args.epochs, batch_size=args.batch, warmup=5 / 60,
        temperature=0.01 if method == "aeb" else None, evaluate_every=0, seed=seed, device="cpu", progress=False,
        **settings,
    )  # fmt: skip
    seconds = time.monotonic() - started
    x, y = next(Batches(data.validation, 10_000, normalize=data.normalize, shuffle=False).epoch())
    members = list(samples_of(bnn, args.samples, data, args.batch))
    weights = [torch.cat([p.detach().flatten() for p in member.parameters()]) for member in members]
    scores = {"own": scores_of(members, x, y)}
    if method != "aeb":
        scores["few"] = scores_of([with_statistics(member, data, FEW, 1) for member in members], x, y)
    share_statistics(members)
    scores["shared"] = scores_of(members, x, y)
    found = {
        "method": method,
        "weight_decay": weight_decay,
        "seed": seed,
        "examples": len(y),
        "distance": float((weights[0] - weights[-1]).norm() / weights[-1].norm()),
        "held_out": scores,
        "training_seconds": seconds,
    }
    print(found, flush=True)
    return found


def _first(images: Any, count: int | None) -> Any:
    return images if count is None else ArrayDataset(images.x[:count], images.y[:count])


@torch.no_grad()
def samples_of(bnn: lb.BayesianModel, count: int, data: Data, batch: int) -> Iterator[nn.Module]:
    """Yield members, or samples of the weights, as plain networks with their own statistics."""
    for number in range(bnn.members or count):
        if bnn.members is not None:
            yield bnn.member(number).eval()
            continue
        network = bnn.to_deterministic()
        sample = bnn.layout.split(bnn.posterior.sample(make_key(number)))
        for slot, values in zip(bnn.layout, sample, strict=True):
            network.get_parameter(slot.name).copy_(values)
        yield with_statistics(network, data, batch)


def with_statistics(network: nn.Module, data: Data, batch: int, batches: int | None = None) -> nn.Module:
    """Return a copy of a plain network with statistics of BatchNorm from these batches of training images."""
    found = Batches(data.train, batch, normalize=data.normalize, augment=data.augment, shuffle=True, seed=0).epoch()
    plain = lb.bayesianize(network, lb.Deterministic())
    plain.refresh_batchnorm(x for x, _ in islice(found, batches))
    return plain.to_deterministic().eval()


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
