"""`leanbayes calibrate RUN`: fit one-pass prediction on held-out data, and store the result in the run.

It fits two factors of the outputs, and with `--layers` corrections of all layers.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from leanbayes.cli.console import line
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import MODEL, TrainedRun, open_run
from leanbayes.cli.text_tables import SHOWN, show
from leanbayes.core.json_values import json_text
from leanbayes.data import Data, fingerprint
from leanbayes.deploy.calibration import LEAST_WRONG, Target, calibrate, samples_of, target_of
from leanbayes.deploy.model_file import save
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.model.bayesian import BayesianModel
from leanbayes.report.cells import writer
from leanbayes.report.columns import columns
from leanbayes.training.progress import say

_FACTORS = ("mean", "std")


@dataclass(frozen=True)
class CalibrateOptions:
    """Fit two factors, for the mean and the std of one-pass predictions, on the held-out data of a trained run.

    The factors are stored in model.safetensors of the run. A policy in it is removed, because it was fitted to other
    predictions: decide fits one again. Nothing else in the file changes. From then on all one-pass predictions use the
    factors: those of evaluate and predict with --rule moments, and those of the file that export writes. compress fits
    new factors for its file, to the default of --to. With --layers the mean and variance of each layer are corrected
    first, by Monte Carlo samples of the weights.

    Attributes:
        run: folder of the run.
        to: what one-pass predictions are fitted to, the labels or Monte Carlo samples of the weights. None means labels
            for classes, and samples for regression or with --layers.
        samples: Monte Carlo samples per example, if it is fitted to samples. None means 30, and 64 with --layers.
        layers: correct the mean and variance of each layer, without labels.
        layer_inputs: held-out examples to measure the corrections of layers on.
        factors: fit the two factors. Without them, --layers corrects layers only.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        device: where to predict. None means the GPU, if there is one.
        seed: seed of the samples.
        json: print JSON instead of a table.
    """

    run: RunFolder
    to: Target | None = None
    samples: int | None = None
    layers: bool = False
    layer_inputs: int = 256
    factors: bool = True
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


@dataclass(frozen=True)
class State:
    """The factors of a model, its number of corrected layers, and the scores of its one-pass predictions with them."""

    factors: dict[str, float]
    layers: int
    scores: dict[str, float]


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(CalibrateOptions, words, "calibrate")
    return lambda: _calibrate(options)


def _calibrate(options: CalibrateOptions) -> None:
    run = open_run(options.run, options.device)
    bnn = run.model
    if not bnn.posterior.random_weights:
        raise LeanBayesError(
            f"{options.run} is a run of {type(bnn.method).__name__}, which has no random weights, so its one-pass "
            "predictions have no std: calibrate a run of another method, such as mean-field."
        )
    data = run.data(options.root)
    check_held_out(run, data)
    batches = run.batches(data, data.validation)

    def state() -> State:
        scores = evaluate(bnn, batches.epoch(), rule="moments", target_scale=data.target_std, details=False)
        return State(dict(zip(_FACTORS, bnn.moment_scale, strict=True)), len(bnn.moment_layers), scores)

    before, decided = state(), bnn.policy is not None
    generator = torch.Generator().manual_seed(options.seed)
    calibrate(
        bnn,
        batches.epoch(),
        to=options.to,
        samples=options.samples,
        generator=generator,
        layers=options.layers,
        layer_inputs=options.layer_inputs,
        factors=options.factors,
        progress=_say_progress,
    )
    after = state()
    save(bnn, options.run / MODEL)
    target = target_of(bnn, options.to, options.layers)
    _print(options, target, batches.examples, before, after, _command(options.run, bnn))
    if decided and not options.json:
        line(
            "The policy of the run is removed, because it was fitted to other predictions, so predict has no verdicts. "
            f"To fit one: leanbayes decide {shlex.quote(str(options.run))} --false-alarms 0.05 --rule moments"
        )


def _say_progress(done: int, total: int) -> None:
    say(True, f"layers compared with samples on {done:,} of {total:,} examples")


def check_held_out(run: TrainedRun, data: Data) -> None:
    """Warn if the training data have changed: examples that are held out now may have been trained on."""
    if run.record["config"].get("examples") not in (None, fingerprint(data.train)):
        say(
            True,
            f"{data.name} has other training data than when {run.folder} was trained: examples that are held out now "
            "may have been trained on, and then predictions are overconfident.",
        )


def _command(folder: Path, bnn: BayesianModel) -> str:
    """Return the command that scores one-pass predictions on the test data."""
    return f"leanbayes evaluate {shlex.quote(str(folder))}" + ("" if bnn.rule == "moments" else " --rule moments")


def _print(options: CalibrateOptions, to: Target, examples: int, before: State, after: State, command: str) -> None:
    if options.json:
        result: dict[str, Any] = {"run": str(options.run), "file": str(options.run / MODEL), "to": to}
        result |= {"examples": examples, "before": vars(before), "after": vars(after)}
        print(json_text(result))
        return
    view = Table("", box=None)
    for name in ("before", "after"):
        view.add_column(name, justify="right")
    for name in _FACTORS:
        view.add_row(f"factor of the {name}", *(f"{state.factors[name]:.4f}" for state in (before, after)))
    if before.layers or after.layers:
        view.add_row("corrected layers", *(f"{state.layers}" for state in (before, after)))
    for column in columns([before.scores, after.scores]):
        if column.key in SHOWN:
            values = [state.scores[column.key] for state in (before, after)]
            view.add_row(column.title, *map(writer(column.form, values), values))
    what = "labels" if to == "labels" else f"{samples_of(options.samples, options.layers)} samples"
    show(f"{options.run / MODEL}: one-pass predictions are fitted to {what} of {examples:,} held-out examples", view)
    wrong = round((1 - before.scores.get("accuracy", 0.0)) * examples)
    if to == "labels" and options.factors and wrong < LEAST_WRONG:
        line(
            f"Wrong predictions among these: {wrong}. With fewer than {LEAST_WRONG}, the fit may make predictions less "
            "certain, but not more."
        )
    line(f"These scores are from the data of the fit. For those of the test data, run: {command}")
