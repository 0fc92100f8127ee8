"""Compare one pass by moments with Monte Carlo samples, on the test data of a trained run.

python experiments/one_pass.py RUN --out experiments/results/one_pass/NAME.json

The program scores the mean network, without and with a temperature; Monte Carlo samples; and one pass, with and without
correlations, uncalibrated and calibrated. Temperatures and calibrations are fitted twice: on training images without
augmentation, on which the network is overconfident, and on validation images. On some test images, the outputs of one
pass are compared with those of the largest number of samples.
"""

import argparse
import contextlib
import math
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from arguments import run_script
from torch import Tensor
from torch.utils.data import Dataset

import leanbayes as lb
from leanbayes.cli.runs import open_run
from leanbayes.core.network import call_with, evaluation_mode, map_tensors, output_tensor
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.evaluation import Scores, evaluate
from leanbayes.evaluation.full_evaluation import BATCH, batch_size, some
from leanbayes.evaluation.layer_accuracy import accuracy_of, accuracy_table, moment_accuracy
from leanbayes.evaluation.scores import ignored
from leanbayes.likelihoods.accumulators import Running
from leanbayes.methods.vdp import VDP
from leanbayes.rules import MomentPropagation
from leanbayes.training.record import machine, versions, without_places, write_json

CORRELATIONS = ("none", "common")
SPLITS = ("training", "validation")  # for calibrations and temperatures
SCORES = {"accuracy": "accuracy", "miou": "mIoU", "rmse": "RMSE", "nll": "NLL", "ece": "ECE", "brier": "Brier",
          "crps": "CRPS", "coverage_95": "in 95 %"}  # fmt: skip
ACCURACIES = {
    "ratio": "std ratio",
    "low": "5 %",
    "high": "95 %",
    "log_correlation": "log corr.",
    "mean_error": "mean err.",
}
LAYERED = 64  # maximum number of examples to compare layers on
PIXELS = 4096  # maximum per dense image, to fit a temperature
PART = 100  # examples per batch
REPEATS = 5

Given = list[tuple[Any, Tensor]]


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--root", type=Path, help="folder with the data sets")
    samples = "the first calibrates and is timed, the last is the ground truth, all but the last are scored"
    parser.add_argument("--samples", type=int, nargs="+", default=[30, 100, 1000], help=samples)
    parser.add_argument("--calibrate-on", type=int, help="images per split for the fits (default: 1000; dense: 20)")
    parser.add_argument("--examples", type=int, help="test images to compare outputs on (default: 500; dense: 4)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if len(args.samples) < 2 or min(args.samples) < 2 or args.samples != sorted(set(args.samples)):
        parser.error("--samples needs two or more increasing numbers, each at least 2")
    if any(number is not None and number < 1 for number in (args.calibrate_on, args.examples)):
        parser.error("--calibrate-on and --examples must be 1 or more")
    return args


class Comparison:
    """The comparison of one run; results are in `found`."""

    def __init__(self, args: argparse.Namespace) -> None:
        run = open_run(args.run, args.device)
        self.bnn, self.data, self.seed, self.samples = run.model, run.data(args.root), args.seed, args.samples
        if self.bnn.members is not None or not self.bnn.layout.numel:
            raise LeanBayesError(f"The run in {args.run} has no Bayesian weights: give a run of mean-field or vdp.")
        if self.data.test is None:
            raise LeanBayesError(f"{self.data.name} has no test data: give a run on another data set.")
        self.workers = run.record["config"]["recipe"]["workers"]
        dense = self.data.task == "segmentation"
        fitted, compared = (20, 4) if dense else (1000, 500)
        fitted, compared = args.calibrate_on or fitted, args.examples or compared
        self.test = self.batches(self.data.test)
        self.examples = self.some(self.data.test, compared)
        splits = zip(SPLITS, (self.data.train, self.data.validation), strict=True)
        self.fitted = {name: self.some(split, fitted) for name, split in splits}
        config = run.record["config"]
        self.found: dict[str, Any] = {
            "command": command(args.run),
            "seed": self.seed,
            "run": args.run.resolve().name,
            "source": {**config["source"], "name": Path(config["source"]["name"]).name},
            "model": config["model"],
            "method": config["method"],
            "versions": versions(),
            "machine": machine(),
            "device": str(self.bnn.device),
            "test_examples": self.test.examples,
            "compared_examples": count(self.examples),
            "fitted_examples": {name: count(batches) for name, batches in self.fitted.items()},
            "samples": self.samples,
            "temperatures": {},
            "factors": {},
            "scores": {},
            "output_accuracy": {},
        }

    def batches(self, dataset: Dataset[Any], most: int = BATCH) -> Batches:
        """Return batches in order, without augmentation."""
        size, normalize = min(most, batch_size(self.data.input_shape)), self.data.normalize
        return Batches(dataset, size, device=self.bnn.device, shuffle=False, normalize=normalize, workers=self.workers)

    def some(self, dataset: Dataset[Any], limit: int) -> Given:
        """Return some examples in small batches."""
        return list(self.batches(some(dataset, limit, self.seed), PART).epoch())

    def run(self) -> None:
        """Run all comparisons."""
        self.reset()
        log("the mean network")
        self.found["scores"]["mean"] = self.score(rule="mean")
        if isinstance(self.bnn.likelihood, lb.Categorical):
            for split in SPLITS:
                self.with_temperature(split)
        for samples in self.samples[:-1]:
            log(f"{samples} samples")
            self.found["scores"][f"{samples} samples"] = self.score(rule="sample", samples=samples)
        log(f"{self.samples[-1]} samples of {count(self.examples)} examples")
        truth = sampled_moments(self.bnn, self.examples, self.samples[-1], self.seed)
        for correlation in CORRELATIONS:
            self.one_pass(correlation, truth)
        log("layers")
        x = first_rows(self.examples[0][0], LAYERED if self.data.task != "segmentation" else 1)
        rule, generator = MomentPropagation("common"), torch.Generator().manual_seed(self.seed)
        layers = moment_accuracy(self.bnn, x, self.samples[-1], rule, generator)
        self.found["layers"] = [asdict(layer) for layer in layers]
        self.layers = layers
        self.found["milliseconds"] = self.times()

    def reset(self) -> None:
        """Remove the calibration."""
        self.bnn.moment_scale = 1.0, 1.0

    def score(self, **how: Any) -> dict[str, float]:
        """Score predictions on all test data."""
        return evaluate(self.bnn, self.test.epoch(), seed=self.seed, target_scale=self.data.target_std, **how)

    def with_temperature(self, split: str) -> None:
        """Score the mean network with the temperature that is best on a split."""
        log(f"temperature on {split} images")
        dim: int = self.bnn.likelihood.settings["class_dim"]
        pairs = [thinned(logits.movedim(dim, -1), y) for logits, y in mean_logits(self.bnn, self.fitted[split])]
        logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        temperature = best_temperature(logits, labels, ignored(self.bnn))
        scores = Scores(ignored(self.bnn), details=True)
        for output, y in mean_logits(self.bnn, self.test.epoch()):
            probs = (output.float() / temperature).softmax(dim)
            scores.update(lb.ClassPrediction(1, None, probs, torch.special.entr(probs).sum(dim), dim), y)
        self.found["temperatures"][split] = temperature
        self.found["scores"][f"mean, temperature on {split}"] = scores.compute()

    def one_pass(self, correlation: Any, truth: tuple[Tensor, Tensor]) -> None:
        """Score and compare one pass, uncalibrated and calibrated."""
        rule = MomentPropagation(correlation)
        for split in (None, *SPLITS):
            name = f"one pass, {correlation}" + (f", calibrated on {split}" if split else "")
            log(name)
            if split:
                generator = torch.Generator().manual_seed(self.seed + 1)  # not the samples of the comparison
                with moments_rule(self.bnn, rule):
                    factors = lb.calibrate(
                        self.bnn, self.fitted[split], to="samples", samples=self.samples[0], generator=generator
                    )
                self.found["factors"][name] = dict(zip(("mean", "std"), factors, strict=True))
            with moments_rule(self.bnn, rule), self.bnn.using(rule):
                self.found["scores"][name] = self.score()
                moments = output_moments(self.bnn, self.examples)
            accuracy = accuracy_of("output", type(self.bnn.network).__name__, *moments, *truth)
            self.found["output_accuracy"][name] = asdict(accuracy)
            self.reset()

    def times(self) -> dict[str, float]:
        """Return the median time of predicting one batch; the modes take turns, after a warm-up."""
        log("times")
        samples, size = self.samples[0], batch_size(self.data.input_shape)
        ((x, y),) = self.batches(some(self.test.dataset, size, self.seed)).epoch()
        ways: dict[str, dict[str, Any]] = {
            "mean": {"rule": "mean"},
            "one pass, none": {"rule": MomentPropagation("none")},
            "one pass, common": {"rule": MomentPropagation("common")},
            f"{samples} samples": {"rule": "sample", "samples": samples},
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS + 1):
            for name, how in ways.items():
                generator = torch.Generator().manual_seed(self.seed)
                taken[name].append(seconds(partial(self.bnn.predict, x, generator=generator, **how)))
        self.found["timed_examples"] = len(y)
        return {name: 1000 * statistics.median(times[1:]) for name, times in taken.items()}

    def table(self) -> str:
        """Format all prediction modes, one line each."""
        scores, accuracies, times = (self.found[key] for key in ("scores", "output_accuracy", "milliseconds"))
        columns = [key for key in SCORES if key in scores["mean"]]
        lines = [["", *(SCORES[key] for key in columns), *ACCURACIES.values(), "ms"]]
        for name, values in scores.items():
            accuracy = accuracies.get(name, {})
            numbers = [values[key] for key in columns] + [accuracy.get(key, math.nan) for key in ACCURACIES]
            line = ["" if math.isnan(number) else f"{number:.4f}" for number in numbers]
            lines.append([name, *line, f"{times[name]:.1f}" if name in times else ""])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        first, *others = widths
        return "\n".join(
            "  ".join(
                [line[0].ljust(first), *(cell.rjust(w) for cell, w in zip(line[1:], others, strict=True))]
            ).rstrip()
            for line in lines
        )


# -- output moments ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def moments_rule(bnn: lb.BayesianModel, rule: MomentPropagation) -> Iterator[None]:
    """Make the name "moments" refer to this rule, which normally depends on the method."""
    before, bnn.method = bnn.method, VDP(correlation=rule.correlation, activations=rule.activations)
    try:
        yield
    finally:
        bnn.method = before


@torch.no_grad()
def output_moments(bnn: lb.BayesianModel, batches: Given) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all outputs in one pass."""
    with evaluation_mode(bnn):
        outputs = [output_tensor(call_with(bnn, x)) for x, _ in batches]
    return torch.cat([output.loc for output in outputs]), torch.cat([output.variance for output in outputs])


@torch.no_grad()
def sampled_moments(bnn: lb.BayesianModel, batches: Given, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all outputs over Monte Carlo samples."""
    generator = torch.Generator().manual_seed(seed)
    outputs = Running()
    with bnn.using("sample"), evaluation_mode(bnn):
        for number in range(samples):
            with bnn.drawn(bnn.next_draw(generator, number)) as call:
                outputs.update(torch.cat([output_tensor(call_with(call, x)) for x, _ in batches]).double())
    return outputs.mean, outputs.squares / (samples - 1)


# -- temperature ------------------------------------------------------------------------------------------------------


def mean_logits(bnn: lb.BayesianModel, batches: Iterable[tuple[Any, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs of the mean network with the labels."""
    for x, y in batches:
        yield bnn.predict(x, rule="mean", keep_outputs=True).outputs[0], y


def thinned(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (..., classes) and labels with one row per position; dense images are subsampled."""
    logits, y = (
        logits.flatten(1, -2) if logits.dim() > 2 else logits[:, None],
        y.flatten(1) if y.dim() > 1 else y[:, None],
    )
    step = -(-y.shape[1] // PIXELS) | 1  # odd, so that it covers all columns of images of common widths
    return logits[:, ::step].flatten(0, 1).double(), y[:, ::step].flatten()


def best_temperature(logits: Tensor, labels: Tensor, ignore_index: int) -> float:
    """Minimize the NLL over T by golden section; it is convex in 1/T, so it has one minimum in log T."""

    def nll(log_temperature: float) -> float:
        return F.cross_entropy(logits / math.exp(log_temperature), labels, ignore_index=ignore_index).item()

    golden, low, high = (math.sqrt(5) - 1) / 2, math.log(0.01), math.log(100)
    while high - low > 1e-5:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if nll(left) < nll(right) else (left, high)
    return math.exp((low + high) / 2)


# -- helpers ----------------------------------------------------------------------------------------------------------


def command(run: Path) -> str:
    """Return the command of this process without the paths of this machine."""
    words = [run.resolve().name if Path(word) == run else word for word in without_places(sys.argv[1:])]
    return shlex.join(["python", "experiments/one_pass.py", *words])


def count(batches: Given) -> int:
    """Count the examples."""
    return sum(len(y) for _, y in batches)


def first_rows(x: Any, rows: int) -> Any:
    """Take the first rows of a batch."""
    return map_tensors(lambda tensor: tensor[:rows], x)


def seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of a call, including its work on the GPU."""
    wait()
    start = perf_counter()
    run()
    wait()
    return perf_counter() - start


def wait() -> None:
    """Wait for the GPU if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def log(what: str) -> None:
    """Print the current step."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def main() -> None:
    """Compare, write and print."""
    args = options()
    warnings.simplefilter("ignore", RuleMismatchWarning)  # the comparison measures this mismatch
    comparison = Comparison(args)
    comparison.run()
    if args.out is not None:
        write_json(args.out, comparison.found)
    print(accuracy_table(comparison.layers), end="\n\n")
    print(comparison.table())


if __name__ == "__main__":
    run_script(main)
