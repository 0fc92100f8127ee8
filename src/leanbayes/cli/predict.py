"""`leanbayes predict RUN IMAGES`: label, probability and uncertainty of pictures."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from leanbayes.cli.options import parse
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.data import read_image
from leanbayes.errors import LeanBayesError
from leanbayes.prediction import ClassPrediction


@dataclass(frozen=True)
class PredictOptions:
    """Predict pictures: the label, its probability, and how unsure the model is (in nats).

    Attributes:
        run: folder of the run.
        images: files to look at.
        samples: draws of a prediction. By default what the method says.
        device: by default the GPU if there is one.
        seed: of the draws.
        json: print JSON.
    """

    run: tyro.conf.Positional[Path]
    images: tyro.conf.Positional[tuple[Path, ...]]
    samples: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    seed: int = 0
    json: bool = False


def predict_images(words: list[str]) -> None:
    """Run the command."""
    options = parse(PredictOptions, words, "leanbayes predict")
    if not options.images:
        raise LeanBayesError("No picture was given: name at least one file.")
    run = open_run(options.run, options.device)
    rows = [_row(run, path, options) for path in options.images]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    view = Table(box=None)
    for name, justify in (("image", "left"), ("label", "left"), ("probability", "right"),
                          ("total uncertainty", "right"), ("epistemic", "right")):  # fmt: skip
        view.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        figures = (f"{row[key]:.3f}" for key in ("probability", "total_uncertainty", "epistemic_uncertainty"))
        view.add_row(row["image"], str(row["label"]), *figures)
    Console().print(view)


def _row(run: TrainedRun, path: Path, options: PredictOptions) -> dict[str, Any]:
    """Predict one picture; of a segmentation, the most frequent label and means over the pixels."""
    x = _input(run, path).to(run.model.device)
    generator = torch.Generator().manual_seed(options.seed)
    prediction = run.model.predict(x, options.samples, generator=generator)
    if not isinstance(prediction, ClassPrediction):
        raise LeanBayesError(f"The run in {run.folder} does not predict classes: use lb.load and bnn.predict.")
    label = int(prediction.label.flatten().mode().values)
    classes = run.record["config"]["classes"]
    return {
        "image": str(path),
        "label": classes[label] if classes else label,
        "probability": prediction.confidence.mean().item(),
        "total_uncertainty": prediction.entropy.mean().item(),
        "epistemic_uncertainty": prediction.mutual_information.mean().item(),
    }


def _input(run: TrainedRun, path: Path) -> Tensor:
    """Read a picture as the network was trained to see it."""
    shape = run.input_shape
    if len(shape) != 3:
        raise LeanBayesError(f"The run in {run.folder} was trained on tables, not pictures: use lb.load in Python.")
    return run.normalise(read_image(path, shape)[None])
