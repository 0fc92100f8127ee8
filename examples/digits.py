"""Train a small network on scikit-learn's handwritten digits: plain, with three baselines' uncertainty, and Bayesian.

Prints how good and how calibrated each is on digits it has not seen, and what that cost.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

import leanbayes as lb
from leanbayes.method import Method

CLASSES, BATCH = 10, 64
METHODS: dict[str, Method] = {
    "Deterministic": lb.Deterministic(),
    "MCDropout": lb.MCDropout(rate=0.1),
    "Ensemble of 5": lb.Ensemble(members=5),
    "MeanField": lb.MeanField(),
    "MeanField flipout": lb.MeanField(rule="flipout"),
}
# A cold posterior, chosen on a part of the training images: a thousand of them cannot pay for the whole KL of
# sixty thousand weights, and at a temperature of 1 those would stay at the prior.
TEMPERATURE = 1e-3


def network() -> nn.Module:
    """A small convolutional network for 8×8 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4, CLASSES),
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images in [-1, 1] and labels: two thirds to train on, one third to test on."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(data.target, dtype=torch.long)
    train, test = train_test_split(range(len(labels)), test_size=1 / 3, random_state=0, stratify=data.target)
    return images[train], labels[train], images[test], labels[test]


@dataclass
class Result:
    """What one method reached, and what it cost."""

    accuracy: float
    nll: float
    ece: float
    entropy_wrong: float
    trainable: int
    kilobytes: float
    train_seconds: float
    predict_ms: float


def train(bnn: lb.BayesianModel, x: Tensor, y: Tensor, epochs: int, progress: Progress, task: TaskID) -> float:
    """Train by the ELBO, as any loop would; returns the seconds that it took."""
    groups = [{"params": bnn.mean_parameters(), "lr": 2e-3}]
    if bnn.scale_parameters():
        groups.append({"params": bnn.scale_parameters(), "lr": 1e-2})
    optimiser = torch.optim.Adam(groups)
    steps = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    order = torch.Generator().manual_seed(0)
    bnn.train()
    start, step = time.perf_counter(), 0
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(BATCH)[: len(x) // BATCH]:
            warm = min(1.0, 2 * step / steps)  # the KL comes in over the first half
            loss = lb.elbo(bnn, x[rows], y[rows], num_data=len(x), temperature=TEMPERATURE * warm)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            step += 1
        progress.update(task, advance=1, loss=f"loss {loss.item():.3f}")
    bnn.refresh_batchnorm(x.split(BATCH))
    return time.perf_counter() - start


def evaluate(bnn: lb.BayesianModel, x: Tensor, y: Tensor, train_seconds: float) -> Result:
    """Score on the test images."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        prediction = bnn.predict(x, generator=torch.Generator().manual_seed(0))
        times.append(time.perf_counter() - start)
    probs, right = prediction.probs, prediction.label == y
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        bnn.save(path)
        kilobytes = path.stat().st_size / 1e3
    return Result(
        accuracy=float(multiclass_accuracy(probs, y, CLASSES, average="micro")),
        nll=float(-probs.gather(1, y[:, None]).log().mean()),
        ece=float(multiclass_calibration_error(probs, y, CLASSES, n_bins=15)),
        entropy_wrong=float(prediction.entropy[~right].mean()),
        trainable=sum(p.numel() for p in bnn.parameters() if p.requires_grad),
        kilobytes=kilobytes,
        train_seconds=train_seconds,
        predict_ms=1e3 * statistics.median(times),
    )


def table(results: dict[str, Result], tested: int) -> Table:
    """Lay out quality and cost side by side; the deterministic network is the unit of cost."""
    plain = results["Deterministic"]
    view = Table(title=f"Handwritten digits, {tested} test images", box=None, padding=(0, 1, 0, 0))
    view.add_column("method\n", no_wrap=True)
    quality = ("accuracy\n%", "NLL\n", "ECE\n", "entropy\nif wrong")
    cost = ("numbers\n×", "file\nkB", "train\n×", "predict\nms")
    for name in quality + cost:
        view.add_column(name, justify="right", no_wrap=True)
    for name, result in results.items():
        view.add_row(
            name,
            f"{100 * result.accuracy:.2f}",
            f"{result.nll:.4f}",
            f"{result.ece:.4f}",
            f"{result.entropy_wrong:.2f}",
            f"{result.trainable / plain.trainable:.2f}",
            f"{result.kilobytes:.0f}",
            f"{result.train_seconds / plain.train_seconds:.2f}",
            f"{result.predict_ms:.0f}",
        )
    return view


def main() -> None:
    """Train and test every method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    epochs = parser.parse_args().epochs
    x, y, x_test, y_test = digits()
    results = {}
    console = Console()
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name, method in METHODS.items():
            bnn = lb.bayesianize(network(), method)
            task = progress.add_task(name, total=epochs, loss="")
            seconds = train(bnn, x, y, epochs, progress, task)
            results[name] = evaluate(bnn, x_test, y_test, seconds)
    console.print(table(results, len(y_test)))
    console.print(
        "Lower is better for NLL and ECE; entropy, in nats, should be high where an answer is wrong.\n"
        "× compares trainable numbers and training time with the deterministic network."
    )


if __name__ == "__main__":
    main()
