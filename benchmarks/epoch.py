"""Measure the time of whole epochs of `lb.fit`: methods against the deterministic network.

    python benchmarks/epoch.py --out benchmarks/results/epoch-resnet18.json

All methods train ResNet-18 on random images of the size and number of CIFAR-10, with its augmentation and the recipe of
experiments/cifar10_resnet18.yaml. They take turns, epoch by epoch, so that a slow moment of the machine affects all.
The first epochs, which compile, are not counted. Times and ratios are medians over epochs. For sparse methods, the
program also prints the fraction of the time that exchanges of weights take.
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
from leanbayes.core.json_values import json_text
from leanbayes.data import ArrayDataset, Augment, Data, Normalize, from_datasets
from leanbayes.methods import parse_method
from leanbayes.networks import build
from leanbayes.training.record import machine, versions

WARM_UP = 2  # epochs that are not counted
PLAIN = "deterministic"
METHODS = ("mean-field:prior.scale=0.05,init_std=0.001,relative=false",)


class Turns:
    """Lets several threads run one at a time, in a fixed order."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._missing, self._changed = names, {*names}, threading.Condition()

    def expect(self, name: str, thread: threading.Thread) -> None:
        """Start a thread, and wait until it is ready: Accelerate prepares one training at a time."""
        thread.start()
        with self._changed:
            self._changed.wait_for(lambda: name not in self._missing)

    def wait(self, name: str) -> None:
        """Wait until all threads are ready and it is the turn of this one."""
        with self._changed:
            self._missing.discard(name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._missing and self._names[0] == name)

    def give(self, name: str, last: bool) -> None:
        """Pass the turn to the next thread; after the last turn, leave."""
        with self._changed:
            self._names.remove(name)
            if not last:
                self._names.append(name)
            self._changed.notify_all()


def in_turns(
    method: lb.Method, name: str, turns: Turns, epoch: int, seconds: list[float], exchanges: list[float]
) -> lb.Method:
    """Make a method wait for its turn before every epoch, and time its epochs and exchanges of weights."""
    started = 0.0
    own_start, own_after = method.start, method.after_step

    def start_epoch() -> None:
        nonlocal started
        turns.wait(name)
        started = now()
        exchanges.append(0.0)

    def start(training: lb.Training) -> None:
        own_start(training)
        start_epoch()

    def after_step(training: lb.Training) -> None:
        if isinstance(method, (lb.SSVI, lb.RigL)) and method.exchanged_share(training):
            before = now()
            own_after(training)
            exchanges[-1] += now() - before
        else:
            own_after(training)
        if (training.step + 1) % epoch == 0:
            seconds.append(now() - started)
            last = training.step + 1 == training.steps
            turns.give(name, last=last)
            if not last:
                start_epoch()

    object.__setattr__(method, "start", start)
    object.__setattr__(method, "after_step", after_step)
    return method


def now() -> float:
    """Return the time after the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def images(count: int) -> Data:
    """Return random images of the size of CIFAR-10, with its augmentation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    train = ArrayDataset(x, torch.randint(10, (count,), generator=generator))
    held_out = ArrayDataset(x[:100], train.y[:100])
    return from_datasets(train, held_out, outputs=10, augment=Augment(), normalize=Normalize((0.5,), (0.25,)))


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Train all methods in turns, and return the seconds of their epochs and of the exchanges in them."""
    Accelerator(mixed_precision="bf16")  # keeps the shared state alive when the first training ends
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
            temperature=0.01,
            optimizer="sgd",
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
    # The last epoch overlaps with the end of the other trainings.
    counted, moved = ({name: of[name][WARM_UP:-1] for name in names} for of in (times, exchanges))
    return counted, moved


def main() -> None:
    """Measure, and print times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=list(METHODS), help="as in leanbayes compare")
    parser.add_argument("--network", default="resnet-18")
    parser.add_argument("--examples", type=int, default=45_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=12, help="counted epochs per method")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    times, exchanges = measure(args)
    ratios, shares = {}, {}
    for name, seconds in times.items():
        ratios[name] = statistics.median(ours / plain for ours, plain in zip(seconds, times[PLAIN], strict=True))
        shares[name] = sum(exchanges[name]) / sum(seconds)
        extent = f"({min(seconds):.3f} to {max(seconds):.3f})"
        ratio = f"{ratios[name]:.3f} times the deterministic network"
        print(f"{name}: {statistics.median(seconds):.3f} s per epoch {extent}, {ratio}")
        if shares[name]:
            print(f"{name}: {shares[name]:.2%} of the time is exchange of weights")
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
