"""From the settings of a task to its data and network, and from a run's folder back to them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.options import Task, with_numbers
from leanbayes.data import Data, Normalise, load
from leanbayes.errors import LeanBayesError
from leanbayes.method import Method
from leanbayes.methods import METHODS
from leanbayes.models import build
from leanbayes.saving import load as load_model
from leanbayes.training import Recipe, fit, read_record


@dataclass(frozen=True)
class Prepared:
    """A task's data and network, and the notes by which a run's folder leads back to them."""

    data: Data
    network: nn.Module
    notes: dict[str, Any]


def prepare(task: Task, seed: int) -> Prepared:
    """Load the data and build the network, whose first weights follow the seed."""
    data = load(task.data, task.root, validation_share=task.validation_share, resize=task.resize)
    if task.model is None:
        raise LeanBayesError("There is no network that suits every data set: choose one with --model.")
    options = dict(_option(text) for text in task.model_options)
    network = build(task.model, data.input_shape, data.outputs, seed=seed, **options)
    source = {"name": task.data, "validation_share": task.validation_share}
    source |= {"resize": list(task.resize)} if task.resize else {}
    model = {"name": task.model, "input_shape": list(data.input_shape), "outputs": data.outputs, "options": options}
    normalise = None if data.normalise is None else dataclasses.asdict(data.normalise)
    notes = {"source": source, "model": model, "classes": list(data.classes), "normalise": normalise}
    return Prepared(data, network, notes)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise LeanBayesError(f"The model option {text!r} has no value: write it as NAME=VALUE.")
    import yaml

    return name.replace("-", "_"), with_numbers(yaml.safe_load(value))


def method_name(method: Method) -> str:
    """Return the name by which the command line knows a method."""
    return next(name for name, known in METHODS.items() if type(known) is type(method))


def summary(method: Method) -> str:
    """Return the first line on a method."""
    return (type(method).__doc__ or "").strip().splitlines()[0]


def default_folder(task: Task, label: str, seed: int) -> Path:
    """Name the folder of a run after what it is."""
    words = f"{task.data}-{task.model}-{label}-{seed}"
    return Path("runs") / "".join(c if c.isalnum() or c in "-_.=" else "-" for c in words).strip("-")


def train(prepared: Prepared, method: Method, recipe: Recipe, task: Task, folder: Path) -> BayesianModel:
    """Train into a folder, or load what is finished there."""
    settings = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return fit(
        prepared.network,
        method,
        prepared.data,
        out=folder,
        overwrite=task.overwrite,
        progress=not task.quiet,
        notes=prepared.notes,
        **settings,
    )


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder, opened: what was trained, on what, and the record of it."""

    folder: Path
    model: BayesianModel
    record: dict[str, Any]

    def data(self, root: Path | None) -> Data:
        """Load the data that it was trained on."""
        source = self.record["config"]["source"]
        resize = tuple(source["resize"]) if "resize" in source else None
        return load(source["name"], root, validation_share=source["validation_share"], resize=resize)

    def normalise(self, x: Tensor) -> Tensor:
        """Treat inputs as those of the training were."""
        settings = self.record["config"]["normalise"]
        return x if settings is None else Normalise(tuple(settings["mean"]), tuple(settings["std"]))(x)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.record["config"]["model"]["input_shape"])


def open_run(folder: Path, device: str | None = None) -> TrainedRun:
    """Load the model of a finished run."""
    record = read_record(folder)
    if record["status"] != "finished":
        raise LeanBayesError(f"The run in {folder} is not finished ({record['status']}): give its fit command again.")
    if "model" not in record["config"]:
        raise LeanBayesError(f"{folder} was trained from Python, with a network that has no name here: use lb.load.")
    model = record["config"]["model"]
    network = build(model["name"], tuple(model["input_shape"]), model["outputs"], **model["options"])
    bnn = load_model(folder / "model.safetensors", network).eval()
    return TrainedRun(folder, bnn.to(device or ("cuda" if torch.cuda.is_available() else "cpu")), record)
