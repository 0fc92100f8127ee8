"""`leanbayes calibrate RUN`: fit the two factors of one pass on held-out data, and keep them in the run's model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import MODEL, TrainedRun, open_run
from leanbayes.cli.tables import SHOWN, show
from leanbayes.data import Batches, Data, fingerprint
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.plain import json_text
from leanbayes.report.cells import writer
from leanbayes.report.columns import columns
from leanbayes.training.progress import say

To = Literal["labels", "draws"]
_FACTORS = ("mean", "std")


@dataclass(frozen=True)
class CalibrateOptions:
    """Fit two factors, of the mean and of the std that one pass gives, on the held-out data of a trained run.

    They are kept in the run's model.safetensors, of which nothing else changes. From then on predictions in one pass
    have them: those of evaluate and predict with --rule moments, and those of the file that export writes. Those of the
    files that compress writes are fitted anew, to what None means here.

    Attributes:
        run: folder of the run.
        to: what one pass is brought near: the labels, or draws of the weights. None means labels where the outputs are
            classes, and draws where they are numbers.
        samples: draws of each example, where it is brought near draws.
        root: folder that holds the data sets. None means what the environment variable LEANBAYES_DATA says.
        device: where to predict. None means the GPU, if there is one.
        seed: number that the draws follow from.
        json: print JSON, not a table.
    """

    run: RunFolder
    to: To | None = None
    samples: int = 30
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


@dataclass(frozen=True)
class State:
    """The factors of a model, and what its one pass scores with them."""

    factors: dict[str, float]
    scores: dict[str, float]


def calibrate_run(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(CalibrateOptions, words, "calibrate")
    return lambda: _calibrate(options)


def _calibrate(options: CalibrateOptions) -> None:
    run = open_run(options.run, options.device)
    bnn = run.model
    if not bnn.posterior.random_weights:
        raise LeanBayesError(
            f"{options.run} is a run of {type(bnn.method).__name__}, which has no random weights, and so no std in one "
            "pass: calibrate one that has, such as mean-field."
        )
    data = run.data(options.root)
    _check_held_out(run, data)
    batches = run.batches(data, data.validation)

    def state() -> State:
        scores = evaluate(bnn, batches.epoch(), rule="moments", target_scale=data.target_std, details=False)
        return State(dict(zip(_FACTORS, bnn.moment_scale, strict=True)), scores)

    before = state()
    to = fit_factors(bnn, data, batches, options.to, options.samples, options.seed)
    after = state()
    bnn.save(options.run / MODEL)
    _tell(options, to, batches.examples, before, after, _command(options.run, bnn))


def fit_factors(
    bnn: BayesianModel, data: Data, batches: Batches, to: To | None = None, samples: int = 30, seed: int = 0
) -> To:
    """Fit the factors of a model, and return what to: unless it is said, labels of classes, and draws of numbers."""
    to = to or ("draws" if data.task == "regression" else "labels")
    bnn.calibrate_moments(batches.epoch(), samples, torch.Generator().manual_seed(seed), to=to)
    return to


def _check_held_out(run: TrainedRun, data: Data) -> None:
    """Warn where the training data are others than they were: what is held out now may have been trained on then."""
    if run.record["config"].get("examples") not in (None, fingerprint(data.train)):
        say(
            True,
            f"{data.name} has other training data than when {run.folder} was trained: what is held out now may have "
            "been trained on, and then the factors make it too sure.",
        )


def _command(folder: Path, bnn: BayesianModel) -> str:
    """Return the command that scores one pass on the test data; where it is the usual way, it renews what is kept."""
    return f"leanbayes evaluate {folder}" + ("" if bnn.rule == "moments" else " --rule moments")


def _tell(options: CalibrateOptions, to: To, examples: int, before: State, after: State, command: str) -> None:
    if options.json:
        told: dict[str, Any] = {"run": str(options.run), "file": str(options.run / MODEL), "to": to}
        told |= {"examples": examples, "before": vars(before), "after": vars(after)}
        print(json_text(told))
        return
    view = Table("", box=None)
    for name in ("before", "after"):
        view.add_column(name, justify="right")
    for name in _FACTORS:
        view.add_row(f"factor of the {name}", *(f"{state.factors[name]:.4f}" for state in (before, after)))
    for column in columns([before.scores, after.scores]):
        if column.key in SHOWN:
            values = [state.scores[column.key] for state in (before, after)]
            view.add_row(column.title, *map(writer(column.form, values), values))
    what = "labels" if to == "labels" else f"{options.samples} draws"
    show(f"{options.run / MODEL}: one pass is fitted to {what} of {examples:,} held-out examples", view)
    print(f"These are the scores of the data that were fitted on. On the test data: {command}")
