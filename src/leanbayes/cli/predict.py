"""`leanbayes predict RUN IMAGES`: label, probability and uncertainty of pictures."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.markup import escape
from rich.table import Table

from leanbayes.cli.options import Run, parse
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.cli.tables import show
from leanbayes.errors import LeanBayesError
from leanbayes.prediction import ClassPrediction

Images = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
_FIGURES = ("probability", "total_uncertainty", "epistemic_uncertainty")


@dataclass(frozen=True)
class PredictOptions:
    """Predict pictures: the label, its probability, and how unsure the model is, in nats.

    Total uncertainty is the entropy of the prediction; its epistemic part is what more training data could remove. Of
    a segmentation these are means over the pixels, and the label is the most frequent one.

    Attributes:
        run: folder of the run.
        images: files to look at.
        samples: draws of a prediction. None means what the method says.
        device: where to predict. None means the GPU, if there is one.
        seed: number that the draws follow from.
        json: print JSON, not a table.
    """

    run: Run
    images: Images
    samples: int | None = None
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
    rows = [_row(run, path, options) for path in options.images]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    view = Table("image", "label", box=None)
    for name in _FIGURES:
        view.add_column(name.replace("_", "\n"), justify="right")
    for row in rows:
        view.add_row(escape(row["image"]), escape(str(row["label"])), *(f"{row[key]:.3f}" for key in _FIGURES))
    show("", view)


def _row(run: TrainedRun, path: Path, options: PredictOptions) -> dict[str, Any]:
    """Predict one picture."""
    x = run.read(path).to(run.model.device)
    generator = torch.Generator().manual_seed(options.seed)
    prediction = run.model.predict(x, options.samples, generator=generator)
    if not isinstance(prediction, ClassPrediction):
        raise LeanBayesError(f"The run in {run.folder} does not predict classes: use lb.load and bnn.predict.")
    label = int(prediction.label.flatten().mode().values)
    classes = run.record["config"].get("classes")
    figures = (prediction.confidence, prediction.entropy, prediction.mutual_information)
    values = {name: figure.mean().item() for name, figure in zip(_FIGURES, figures, strict=True)}
    return {"image": str(path), "label": classes[label] if classes else label, **values}
