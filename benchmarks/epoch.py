"""What a whole epoch of `lb.fit` costs: mean-field variational inference beside the deterministic network.

    python benchmarks/epoch.py --out benchmarks/results/epoch-resnet18.json

Both train ResNet-18 on random images of CIFAR-10's size and number, with its augmentation, by the recipe of
experiments/cifar10_resnet18.yaml. They take turns, epoch by epoch, so that a slow moment of the machine hits both; the
first epochs, which compile, are not counted. Times and the ratio are medians over epochs.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import leanbayes as lb
from leanbayes.data import ArrayDataset, Augment, Data, Normalise, from_datasets
from leanbayes.models import build
from leanbayes.training.record import machine, versions

WARM_UP = 2  # epochs that are not counted


class Turns:
    """Lets several threads go on one after the other."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._changed = names, threading.Condition()

    def wait(self, name: str) -> None:
        """Wait until it is this one's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._names[0] == name)

    def give(self, name: str, last: bool) -> None:
        """Let the next one go on; after the last turn, for good."""
        with self._changed:
            self._names.remove(name)
            if not last:
                self._names.append(name)
            self._changed.notify_all()


def in_turns(method: lb.Method, name: str, turns: Turns, epoch: int, seconds: list[float]) -> lb.Method:
    """Let a method wait for its turn before every epoch, and time it."""
    started = 0.0

    def before_step(training: lb.Training) -> None:
        nonlocal started
        if training.step % epoch == 0:
            turns.wait(name)
            started = now()

    def after_step(training: lb.Training) -> None:
        if (training.step + 1) % epoch == 0:
            seconds.append(now() - started)
            turns.give(name, last=training.step + 1 == training.steps)

    object.__setattr__(method, "before_step", before_step)
    object.__setattr__(method, "after_step", after_step)
    return method


def now() -> float:
    """Return the time, once the GPU has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def images(count: int) -> Data:
    """Make random images of CIFAR-10's size, with its augmentation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    train = ArrayDataset(x, torch.randint(10, (count,), generator=generator))
    held_out = ArrayDataset(x[:100], train.y[:100])
    return from_datasets(train, held_out, outputs=10, augment=Augment(), normalise=Normalise((0.5,), (0.25,)))


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Train both, in turns, and return the seconds of their epochs."""
    methods = {
        "deterministic": lb.Deterministic(),
        "mean-field": lb.MeanField(prior=lb.Normal(0.05), init_std=1e-3, relative=False),
    }
    turns, data = Turns(list(methods)), images(args.examples)
    times: dict[str, list[float]] = {name: [] for name in methods}

    def train(name: str) -> None:
        method = in_turns(methods[name], name, turns, args.examples // args.batch, times[name])
        network = build(args.network, (3, 32, 32), 10, seed=0)
        lb.fit(
            network,
            method,
            data,
            epochs=args.epochs + WARM_UP + 1,
            batch_size=args.batch,
            optimiser="sgd",
            precision="bf16",
            compile=not args.eager,
            channels_last=True,
            evaluate_every=0,
            refresh_batchnorm=False,
            progress=False,
        )

    threads = [threading.Thread(target=train, args=(name,)) for name in methods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The last epoch of one runs beside the end of the other's training.
    return {name: seconds[WARM_UP:-1] for name, seconds in times.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet-18")
    parser.add_argument("--examples", type=int, default=45_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=12, help="counted epochs of each")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args()
    times = measure(args)
    pairs = zip(times["mean-field"], times["deterministic"], strict=True)
    ratio = statistics.median(ours / plain for ours, plain in pairs)
    for name, seconds in times.items():
        print(f"{name:<14} {statistics.median(seconds):.3f} s an epoch ({min(seconds):.3f} to {max(seconds):.3f})")
    print(f"mean-field takes {ratio:.3f} times as long, the median over {len(times['mean-field'])} pairs of epochs")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {
            "command": "python " + " ".join(sys.argv).partition(" --out")[0],
            "network": args.network,
            "compiled": not args.eager,
            "batch": args.batch,
            "examples": args.examples,
            "epoch_seconds": times,
            "ratio": ratio,
            "versions": versions(),
            "machine": machine(),
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
