"""Compares one pass by moments with draws of the weights, on the test data of a trained run.

python experiments/one_pass.py RUN --out experiments/results/one_pass/NAME.json

Scored are the mean network, alone and with a temperature; draws; and one pass, with correlations and without, as it is
and calibrated. What is fitted is fitted twice: on training images without augmentation, which the network knows too
well, and on the validation images. The outputs of one pass are compared with the most draws, on some test images.
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
from asking import as_script
from torch import Tensor
from torch.utils.data import Dataset

import leanbayes as lb
from leanbayes.cli.runs import open_run
from leanbayes.data import Batches
from leanbayes.errors import LeanBayesError, RuleMismatchWarning
from leanbayes.evaluation import Scores, evaluate
from leanbayes.evaluation.assessment import BATCH, batch_size, some
from leanbayes.evaluation.moments import accuracy_of, accuracy_table, moment_accuracy
from leanbayes.evaluation.scores import ignored
from leanbayes.methods.vdp import VDP
from leanbayes.network import call_with, evaluation_mode, map_tensors, output_tensor
from leanbayes.prediction import Running
from leanbayes.rules import MomentPropagation
from leanbayes.training.record import machine, versions, without_places, write_json

CORRELATIONS = ("none", "common")
SPLITS = ("training", "validation")  # what calibrations and temperatures are fitted on
SCORES = {"accuracy": "accuracy", "miou": "mIoU", "rmse": "RMSE", "nll": "NLL", "ece": "ECE", "brier": "Brier",
          "crps": "CRPS", "coverage_95": "in 95 %"}  # fmt: skip
FIGURES = {
    "ratio": "std ratio",
    "low": "5 %",
    "high": "95 %",
    "log_correlation": "log corr.",
    "mean_error": "mean err.",
}
LAYERED = 64  # examples whose layers are compared, at most
PIXELS = 4096  # of a dense image that a temperature is fitted on, at most
PART = 100  # examples that go through the network at once where nobody looks after the memory
REPEATS = 5

Given = list[tuple[Any, Tensor]]


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--root", type=Path, help="folder that holds the data sets")
    draws = "the first calibrates and is timed, the last is taken for the truth, and all but the last are scored"
    parser.add_argument("--draws", type=int, nargs="+", default=[30, 100, 1000], help=draws)
    parser.add_argument("--calibrate-on", type=int, help="images of a split to fit on (1000; dense: 20)")
    parser.add_argument("--examples", type=int, help="test images whose outputs are compared (500; dense: 4)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if len(args.draws) < 2 or min(args.draws) < 2 or args.draws != sorted(set(args.draws)):
        parser.error("--draws takes two or more increasing numbers, from 2 on")
    if any(number is not None and number < 1 for number in (args.calibrate_on, args.examples)):
        parser.error("--calibrate-on and --examples must be 1 or more")
    return args


class Comparison:
    """One run, and all that is found of it, in `found`."""

    def __init__(self, args: argparse.Namespace) -> None:
        run = open_run(args.run, args.device)
        self.bnn, self.data, self.seed, self.draws = run.model, run.data(args.root), args.seed, args.draws
        if self.bnn.members is not None or not self.bnn.layout.numel:
            raise LeanBayesError(f"The run in {args.run} has no Bayesian weights: give one of mean-field or vdp.")
        if self.data.test is None:
            raise LeanBayesError(f"{self.data.name} has no test data: add some.")
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
            "draws": self.draws,
            "temperatures": {},
            "factors": {},
            "scores": {},
            "output_accuracy": {},
        }

    def batches(self, dataset: Dataset[Any], most: int = BATCH) -> Batches:
        """Cut data into batches as they are: in their order, not augmented."""
        size, normalise = min(most, batch_size(self.data.input_shape)), self.data.normalise
        return Batches(dataset, size, device=self.bnn.device, shuffle=False, normalise=normalise, workers=self.workers)

    def some(self, dataset: Dataset[Any], limit: int) -> Given:
        """Take some examples, in batches that go through the network without more ado."""
        return list(self.batches(some(dataset, limit, self.seed), PART).epoch())

    def run(self) -> None:
        """Find out everything."""
        self.reset()
        tell("the mean network")
        self.found["scores"]["mean"] = self.score(rule="mean")
        if isinstance(self.bnn.likelihood, lb.Categorical):
            for split in SPLITS:
                self.with_temperature(split)
        for draws in self.draws[:-1]:
            tell(f"{draws} draws")
            self.found["scores"][f"{draws} draws"] = self.score(rule="sample", samples=draws)
        tell(f"{self.draws[-1]} draws of {count(self.examples)} examples")
        truth = output_moments_of_draws(self.bnn, self.examples, self.draws[-1], self.seed)
        for correlation in CORRELATIONS:
            self.one_pass(correlation, truth)
        tell("layers")
        x = first_rows(self.examples[0][0], LAYERED if self.data.task != "segmentation" else 1)
        rule, generator = MomentPropagation("common"), torch.Generator().manual_seed(self.seed)
        layers = moment_accuracy(self.bnn, x, self.draws[-1], rule, generator)
        self.found["layers"] = [asdict(layer) for layer in layers]
        self.layers = layers
        self.found["milliseconds"] = self.times()

    def reset(self) -> None:
        """Take back a calibration."""
        self.bnn.moment_scale = 1.0, 1.0

    def score(self, **how: Any) -> dict[str, float]:
        """Score predictions of all test data."""
        return evaluate(self.bnn, self.test.epoch(), seed=self.seed, target_scale=self.data.target_std, **how)

    def with_temperature(self, split: str) -> None:
        """Divide the logits of the mean network by what suits a split best."""
        tell(f"temperature on {split} images")
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
        """Score and compare one pass, as it is and calibrated."""
        rule = MomentPropagation(correlation)
        for split in (None, *SPLITS):
            name = f"one pass, {correlation}" + (f", calibrated on {split}" if split else "")
            tell(name)
            if split:
                generator = torch.Generator().manual_seed(self.seed + 1)  # other draws than those to compare with
                with meaning(self.bnn, rule):
                    factors = self.bnn.calibrate_moments(self.fitted[split], self.draws[0], generator)
                self.found["factors"][name] = dict(zip(("mean", "std"), factors, strict=True))
            with meaning(self.bnn, rule), self.bnn.using(rule):
                self.found["scores"][name] = self.score()
                moments = output_moments(self.bnn, self.examples)
            accuracy = accuracy_of("output", type(self.bnn.network).__name__, *moments, *truth)
            self.found["output_accuracy"][name] = asdict(accuracy)
            self.reset()

    def times(self) -> dict[str, float]:
        """Take the median time of a prediction of one batch, for which the ways to predict take turns once warm."""
        tell("times")
        draws, size = self.draws[0], batch_size(self.data.input_shape)
        ((x, y),) = self.batches(some(self.test.dataset, size, self.seed)).epoch()
        ways: dict[str, dict[str, Any]] = {
            "mean": {"rule": "mean"},
            "one pass, none": {"rule": MomentPropagation("none")},
            "one pass, common": {"rule": MomentPropagation("common")},
            f"{draws} draws": {"rule": "sample", "samples": draws},
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS + 1):
            for name, how in ways.items():
                generator = torch.Generator().manual_seed(self.seed)
                taken[name].append(seconds(partial(self.bnn.predict, x, generator=generator, **how)))
        self.found["timed_examples"] = len(y)
        return {name: 1000 * statistics.median(times[1:]) for name, times in taken.items()}

    def table(self) -> str:
        """Lay out all ways to predict, one a line."""
        scores, accuracies, times = (self.found[key] for key in ("scores", "output_accuracy", "milliseconds"))
        columns = [key for key in SCORES if key in scores["mean"]]
        lines = [["", *(SCORES[key] for key in columns), *FIGURES.values(), "ms"]]
        for name, values in scores.items():
            accuracy = accuracies.get(name, {})
            figures = [values[key] for key in columns] + [accuracy.get(key, math.nan) for key in FIGURES]
            line = ["" if math.isnan(figure) else f"{figure:.4f}" for figure in figures]
            lines.append([name, *line, f"{times[name]:.1f}" if name in times else ""])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        first, *others = widths
        return "\n".join(
            "  ".join(
                [line[0].ljust(first), *(cell.rjust(w) for cell, w in zip(line[1:], others, strict=True))]
            ).rstrip()
            for line in lines
        )


# -- moments of the outputs -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def meaning(bnn: lb.BayesianModel, rule: MomentPropagation) -> Iterator[None]:
    """Let the name "moments" mean this rule: what it means is up to the method."""
    before, bnn.method = bnn.method, VDP(correlation=rule.correlation, activations=rule.activations)
    try:
        yield
    finally:
        bnn.method = before


@torch.no_grad()
def output_moments(bnn: lb.BayesianModel, batches: Given) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the outputs of all batches, by one pass."""
    with evaluation_mode(bnn):
        outputs = [output_tensor(call_with(bnn, x)) for x, _ in batches]
    return torch.cat([output.loc for output in outputs]), torch.cat([output.variance for output in outputs])


@torch.no_grad()
def output_moments_of_draws(bnn: lb.BayesianModel, batches: Given, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the outputs of all batches, by draws."""
    generator = torch.Generator().manual_seed(seed)
    outputs = Running()
    with bnn.using("sample"), evaluation_mode(bnn):
        for number in range(draws):
            with bnn.drawn(bnn.next_draw(generator, number)) as call:
                outputs.update(torch.cat([output_tensor(call_with(call, x)) for x, _ in batches]).double())
    return outputs.mean, outputs.squares / (draws - 1)


# -- temperature ------------------------------------------------------------------------------------------------------


def mean_logits(bnn: lb.BayesianModel, batches: Iterable[tuple[Any, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the outputs of the mean network, and the labels."""
    for x, y in batches:
        yield bnn.predict(x, rule="mean", keep_outputs=True).outputs[0], y


def thinned(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Bring logits (..., classes) and labels to one row a position, of dense images to some positions."""
    logits, y = (
        logits.flatten(1, -2) if logits.dim() > 2 else logits[:, None],
        y.flatten(1) if y.dim() > 1 else y[:, None],
    )
    step = -(-y.shape[1] // PIXELS) | 1  # odd, so that it meets all columns of images of usual widths
    return logits[:, ::step].flatten(0, 1).double(), y[:, ::step].flatten()


def best_temperature(logits: Tensor, labels: Tensor, ignore_index: int) -> float:
    """Minimise the NLL over T by golden section; it is convex in 1/T, so it has one minimum in log T."""

    def nll(log_temperature: float) -> float:
        return F.cross_entropy(logits / math.exp(log_temperature), labels, ignore_index=ignore_index).item()

    golden, low, high = (math.sqrt(5) - 1) / 2, math.log(0.01), math.log(100)
    while high - low > 1e-5:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if nll(left) < nll(right) else (left, high)
    return math.exp((low + high) / 2)


# -- small things -----------------------------------------------------------------------------------------------------


def command(run: Path) -> str:
    """Return the command of this process, without the folders of its machine."""
    words = [run.resolve().name if Path(word) == run else word for word in without_places(sys.argv[1:])]
    return shlex.join(["python", "experiments/one_pass.py", *words])


def count(batches: Given) -> int:
    """Count the examples."""
    return sum(len(y) for _, y in batches)


def first_rows(x: Any, rows: int) -> Any:
    """Take the first rows of a batch."""
    return map_tensors(lambda tensor: tensor[:rows], x)


def seconds(run: Callable[[], Any]) -> float:
    """Time a call, with what it has left to the GPU."""
    wait()
    start = perf_counter()
    run()
    wait()
    return perf_counter() - start


def wait() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tell(what: str) -> None:
    """Say what comes next."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def main() -> None:
    """Compare, write and print."""
    args = options()
    warnings.simplefilter("ignore", RuleMismatchWarning)  # the comparison is about just that
    comparison = Comparison(args)
    comparison.run()
    if args.out is not None:
        write_json(args.out, comparison.found)
    print(accuracy_table(comparison.layers), end="\n\n")
    print(comparison.table())


if __name__ == "__main__":
    as_script(main)
