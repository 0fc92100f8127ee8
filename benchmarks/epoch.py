"""What a whole epoch of `lb.fit` costs: methods beside the deterministic network.

    python benchmarks/epoch.py --out benchmarks/results/epoch-resnet18.json

All train ResNet-18 on random images of CIFAR-10's size and number, with its augmentation, by the recipe of
experiments/cifar10_resnet18.yaml. They take turns, epoch by epoch, so that a slow moment of the machine hits all; the
first epochs, which compile, are not counted. Times and ratios are medians over epochs. Of a sparse method it is told
which share of the time goes into exchanging weights.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import leanbayes as lb
from leanbayes.data import ArrayDataset, Augment, Data, Normalise, from_datasets
from leanbayes.methods import parse_method
from leanbayes.models import build
from leanbayes.plain import json_text
from leanbayes.training.record import machine, versions

WARM_UP = 2  # epochs that are not counted
PLAIN = "deterministic"
METHODS = ("mean-field:prior.scale=0.05,init_std=0.001,relative=false",)


class Turns:
    """Lets several threads go on one after the other."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._missing, self._changed = names, {*names}, threading.Condition()

    def expect(self, name: str, thread: threading.Thread) -> None:
        """Start a thread, and wait until it has come: Accelerate makes ready one training at a time."""
        thread.start()
        with self._changed:
            self._changed.wait_for(lambda: name not in self._missing)

    def wait(self, name: str) -> None:
        """Wait until all have come, and it is this one's turn."""
        with self._changed:
            self._missing.discard(name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._missing and self._names[0] == name)

    def give(self, name: str, last: bool) -> None:
        """Let the next one go on; after the last turn, for good."""
        with self._changed:
            self._names.remove(name)
            if not last:
                self._names.append(name)
            self._changed.notify_all()


def in_turns(
    method: lb.Method, name: str, turns: Turns, epoch: int, seconds: list[float], exchanges: list[float]
) -> lb.Method:
    """Let a method wait for its turn before every epoch, and time it and its exchanges of weights."""
    started = 0.0
    own_before, own_after = method.before_step, method.after_step

    def before_step(training: lb.Training) -> None:
        nonlocal started
        if training.step % epoch == 0:
            turns.wait(name)
            started = now()
            exchanges.append(0.0)
        own_before(training)

    def after_step(training: lb.Training) -> None:
        if isinstance(method, (lb.SSVI, lb.RigL)) and method.share(training):
            begun = now()
            own_after(training)
            exchanges[-1] += now() - begun
        else:
            own_after(training)
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


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Train all, in turns, and return the seconds of their epochs, and those of exchanges in them."""
    Accelerator(mixed_precision="bf16")  # a state that stays when the first training is over
    names = [PLAIN, *args.method]
    turns, data = Turns(names.copy()), images(args.examples)
    times, exchanges = ({name: list[float]() for name in names} for _ in range(2))

    def train(name: str) -> None:
        steps = args.examples // args.batch
        method = in_turns(parse_method(name), name, turns, steps, times[name], exchanges[name])
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

    threads = {name: threading.Thread(target=train, args=(name,)) for name in names}
    for name, thread in threads.items():
        turns.expect(name, thread)
    for thread in threads.values():
        thread.join()
    # The last epoch of one runs beside the end of the others' trainings.
    counted, moved = ({name: of[name][WARM_UP:-1] for name in names} for of in (times, exchanges))
    return counted, moved


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=list(METHODS), help="as in leanbayes compare")
    parser.add_argument("--network", default="resnet-18")
    parser.add_argument("--examples", type=int, default=45_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=12, help="counted epochs of each")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args()
    times, exchanges = measure(args)
    ratios, shares = {}, {}
    for name, seconds in times.items():
        ratios[name] = statistics.median(ours / plain for ours, plain in zip(seconds, times[PLAIN], strict=True))
        shares[name] = sum(exchanges[name]) / sum(seconds)
        spread = f"({min(seconds):.3f} to {max(seconds):.3f})"
        print(f"{name}: {statistics.median(seconds):.3f} s an epoch {spread}, {ratios[name]:.3f} times the plain one's")
        if shares[name]:
            print(f"{name}: {shares[name]:.2%} of that is exchange of weights")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {
            "command": "python " + " ".join(sys.argv).partition(" --out")[0],
            "network": args.network,
            "compiled": not args.eager,
            "batch": args.batch,
            "examples": args.examples,
            "epoch_seconds": times,
            "ratios": ratios,
            "exchange_shares": shares,
            "versions": versions(),
            "machine": machine(),
        }
        args.out.write_text(json_text(record) + "\n")


if __name__ == "__main__":
    main()
