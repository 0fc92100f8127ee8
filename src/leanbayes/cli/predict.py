"""`leanbayes predict RUN FILES`: label, probability and uncertainty of pictures; mean and std for rows of tables."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from leanbayes.cli.options import RuleName, RunFolder, parse
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.cli.tables import show
from leanbayes.data import TABLE_ENDINGS
from leanbayes.errors import LeanBayesError
from leanbayes.plain import json_text
from leanbayes.prediction import ClassPrediction

Files = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
_OF_CLASSES = ("probability", "total_uncertainty", "epistemic_uncertainty")
_OF_NUMBERS = ("mean", "std", "epistemic_std")


@dataclass(frozen=True)
class PredictOptions:
    """Predict pictures: the label, its probability, and how unsure the model is, in nats.

    Total uncertainty is the entropy of the prediction; its epistemic part is what more training data could remove. Of
    a segmentation these are means over the pixels, and the label is the most frequent one. A run that was trained on a
    table takes tables of inputs (csv), and predicts a mean and a std for each row, in the target's unit.

    Attributes:
        run: folder of the run.
        images: files to look at.
        samples: draws of a prediction. None means what the method says.
        rule: how weights meet activations; moments takes one pass and no draws. None means as in training.
        device: where to predict. None means the GPU, if there is one.
        seed: number that the draws follow from.
        json: print JSON, not a table.
    """

    run: RunFolder
    images: Files
    samples: int | None = None
    rule: RuleName | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def predict_images(words: list[str]) -> Callable[[], None]:
    """Read the words of the command."""
    options = parse(PredictOptions, words, "predict")
    if not options.images:
        raise LeanBayesError("No picture was given: name at least one file.")
    return lambda: _predict(options)


def _predict(options: PredictOptions) -> None:
    run = open_run(options.run, options.device)
    tables = [path.name.lower().endswith(TABLE_ENDINGS) for path in options.images]
    rows: list[dict[str, Any]] = []
    for path, table in zip(options.images, tables, strict=True):
        rows += _of_table(run, path, options) if table else [_of_picture(run, path, options)]
    if options.json:
        print(json_text(rows))
        return
    names, form = (_OF_NUMBERS, ".4g") if all(tables) else (_OF_CLASSES, ".3f")
    first, second = ("table", "row") if all(tables) else ("image", "label")
    view = Table(first, second, box=None)
    for name in names:
        view.add_column(name.replace("_", "\n"), justify="right")
    for row in rows:
        view.add_row(escape(row[first]), escape(str(row[second])), *(f"{row[name]:{form}}" for name in names))
    show("", view)


def _prediction(run: TrainedRun, x: Tensor, options: PredictOptions) -> Any:
    generator = torch.Generator().manual_seed(options.seed)
    return run.model.predict(x.to(run.model.device), options.samples, rule=options.rule, generator=generator)


def _of_picture(run: TrainedRun, path: Path, options: PredictOptions) -> dict[str, Any]:
    prediction = _prediction(run, run.read(path), options)
    if not isinstance(prediction, ClassPrediction):
        raise LeanBayesError(f"The run in {run.folder} does not predict classes: use lb.load and bnn.predict.")
    label = int(prediction.label.flatten().mode().values)
    classes = run.record["config"]["classes"]
    figures = (prediction.confidence, prediction.entropy, prediction.mutual_information)
    values = {name: figure.mean().item() for name, figure in zip(_OF_CLASSES, figures, strict=True)}
    return {"image": str(path), "label": classes[label] if classes else label, **values}


def _of_table(run: TrainedRun, path: Path, options: PredictOptions) -> list[dict[str, Any]]:
    prediction = _prediction(run, run.read_rows(path), options)
    scales = run.record["config"]["scales"]
    mean, std = scales["target_mean"][0], scales["target_std"][0]
    figures = (prediction.mean * std + mean, prediction.std * std, prediction.epistemic_variance.sqrt() * std)
    rows = zip(*(figure[:, 0].tolist() for figure in figures), strict=True)
    return [
        {"table": str(path), "row": number, **dict(zip(_OF_NUMBERS, row, strict=True))}
        for number, row in enumerate(rows, start=1)
    ]
