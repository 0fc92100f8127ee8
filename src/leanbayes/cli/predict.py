"""`leanbayes predict RUN FILES`: label, probability and uncertainty of images; mean and std for rows of tables."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Table
from torch import Tensor

from leanbayes.cli.console import cell
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import TrainedRun, files_in, open_run
from leanbayes.cli.text_tables import show
from leanbayes.core.json_values import json_text
from leanbayes.data import TABLE_ENDINGS
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import ClassPrediction
from leanbayes.likelihoods.decisions import Decision
from leanbayes.model.bayesian import BayesianModel
from leanbayes.training.progress import Progress, say

Files = Annotated[
    tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES", help_behavior_hint="(required)")
]
_CLASS_COLUMNS = ("probability", "total_uncertainty", "epistemic_uncertainty")
_REGRESSION_COLUMNS = ("mean", "std", "epistemic_std")
_ENDS = ("low", "high")
_FEW = 20  # files that need no progress bar
_MOST_DETAIL_LOST = 2 / 3  # enlarged digits lose at most 0.3 and MNIST in 8×8 pixels 0.5; noise of twice the size 0.8


@dataclass(frozen=True)
class PredictOptions:
    """Predict images: the label, its probability, and the uncertainty in nats.

    The total uncertainty is the entropy of the prediction. Its epistemic part is what more training data could remove.
    For a segmentation, both are means over the pixels, and the label is the most frequent one. A run that was trained
    on a table takes tables of inputs (csv), and predicts mean and std for each row, in the unit of the target. The
    verdict on each input is "answer", or "ask a person" and why: fit and compare let a run raise alarms about 5 % of
    inputs like those of the training, and decide sets other rates, a bound on wrong answers, and sets of classes or
    intervals. An image that loses most of its detail when it is shrunk to the size of the network is never answered.

    Attributes:
        run: folder of the run.
        files: images and folders of images, or csv tables of inputs.
        samples: Monte Carlo samples per prediction. None means those of the policy, or the default of the method.
        rule: how random weights are combined with activations: sample, moments, mean or another rule, also with
            settings, such as adjoint:mean=moments,margins=3. moments needs one pass and no samples. None means the rule
            of the policy, or the one used in training.
        device: where to predict. None means the GPU, if there is one.
        seed: seed of the samples.
        json: print JSON instead of a table.
    """

    run: RunFolder
    files: Files
    samples: int | None = None
    rule: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(PredictOptions, words, "predict")
    if not options.files:
        raise LeanBayesError("There is nothing to predict: give at least one image, folder of images or table.")
    return lambda: _predict(options)


def _predict(options: PredictOptions) -> None:
    run = open_run(options.run, options.device)
    files = files_in(options.files)
    tables = [path.name.lower().endswith(TABLE_ENDINGS) for path in files]
    rows: list[dict[str, Any]] = []
    with Progress("Predicting", len(files), len(files) > _FEW and not options.json, None) as progress:
        for path, table in zip(files, tables, strict=True):
            rows += predict_table(run, path, options) if table else [predict_image(run, path, options)]
            progress.advance()
    if options.json:
        print(json_text(rows))
        return
    names, form = (_REGRESSION_COLUMNS, ".4g") if all(tables) else (_CLASS_COLUMNS, ".3f")
    first, second = ("table", "row") if all(tables) else ("image", "label")
    view = Table(box=None)
    view.add_column(first, overflow="fold")  # the end of a path says which image it is
    view.add_column(second, no_wrap=True)
    for name in names:
        view.add_column(name.removesuffix("_uncertainty").replace("_", "\n"), justify="right", no_wrap=True)
    decided = [name for name in (*_ENDS, "set", "verdict") if any(name in row for row in rows)]
    for name in decided:
        view.add_column(name, justify="right" if name in _ENDS else "left")
    for row in rows:
        numbers = (f"{row[name]:{form}}" for name in (*names, *(name for name in decided if name in _ENDS)))
        words = (cell(_text(row.get(name, ""))) for name in decided if name not in _ENDS)
        view.add_row(cell(row[first]), cell(row[second]), *numbers, *words)
    show("", view, wrap=True)  # names, sets and verdicts may take several lines, numbers do not
    if run.model.policy is None:
        say(True, f"For a verdict on each input: leanbayes decide {shlex.quote(str(options.run))} --false-alarms 0.05")


def _text(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def prediction_of(
    model: BayesianModel, x: Tensor | dict[str, Tensor], options: PredictOptions
) -> tuple[Any, Decision | None]:
    """Return the prediction, and what to do with each input if the model has a policy."""
    generator, policy = torch.Generator().manual_seed(options.seed), model.policy
    rule, samples = options.rule, options.samples
    if policy is not None and rule is None:
        rule, samples = policy.rule, samples or policy.samples
    prediction = model.predict(x, samples, rule=rule, generator=generator)
    return prediction, None if policy is None else policy(prediction)


def predict_image(run: TrainedRun, path: Path, options: PredictOptions) -> dict[str, Any]:
    """Return the label of an image, its uncertainty, and the verdict if the run has a policy."""
    prediction, decision = prediction_of(run.model, run.read(path).to(run.model.device), options)
    found = {"image": str(path), **class_row(prediction, decision, run.record["config"]["classes"], run.folder)}
    lost = run.detail_lost(path)
    if lost > _MOST_DETAIL_LOST:
        size = "×".join(map(str, run.record["config"]["model"]["input_shape"][1:]))
        found["verdict"] = f"ask a person: {lost:.0%} of the detail is lost in {size} pixels"
    return found


def class_row(
    prediction: Any, decision: Decision | None, classes: Sequence[str] | None, folder: Path
) -> dict[str, Any]:
    """Return the label of one input, its uncertainty, and the verdict if there is one."""
    if not isinstance(prediction, ClassPrediction):
        raise LeanBayesError(f"The model in {folder} does not predict classes: use lb.load and bnn.predict.")
    label = int(prediction.label.flatten().mode().values)
    values = (prediction.confidence, prediction.entropy, prediction.mutual_information)
    means = {name: value.mean().item() for name, value in zip(_CLASS_COLUMNS, values, strict=True)}
    names = [*classes] if classes else [*range(prediction.probs.shape[prediction.class_dim])]
    found: dict[str, Any] = {"label": names[label] if label < len(names) else label, **means}
    if decision is not None and decision.sets is not None:
        found["set"] = [names[place] for place in decision.sets[0].nonzero()[:, 0].tolist()]
    if decision is not None:
        found["verdict"] = decision.verdict[0]
    return found


def predict_table(run: TrainedRun, path: Path, options: PredictOptions) -> list[dict[str, Any]]:
    """Return mean and std of each row of a table, and the interval and the verdict if the run has a policy."""
    prediction, decision = prediction_of(run.model, run.read_rows(path).to(run.model.device), options)
    scales = run.record["config"]["scales"]
    mean, std = scales["target_mean"][0], scales["target_std"][0]
    values = (prediction.mean * std + mean, prediction.std * std, prediction.epistemic_variance.sqrt() * std)
    found = {name: value[:, 0].tolist() for name, value in zip(_REGRESSION_COLUMNS, values, strict=True)}
    if decision is not None and decision.interval is not None:
        found |= {name: (end * std + mean)[:, 0].tolist() for name, end in zip(_ENDS, decision.interval, strict=True)}
    if decision is not None:
        found["verdict"] = decision.verdict
    return [
        {"table": str(path), "row": number, **dict(zip(found, row, strict=True))}
        for number, row in enumerate(zip(*found.values(), strict=True), start=1)
    ]
