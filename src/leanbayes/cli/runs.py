"""From the settings of a task to its data and network, and from a run's folder back to them."""

import contextlib
import dataclasses
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.options import Task
from leanbayes.data import Batches, Data, Normalise, load, read_image, read_table
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.assessment import batch_size
from leanbayes.method import Method
from leanbayes.methods import METHODS
from leanbayes.models import build
from leanbayes.saving import load as load_model
from leanbayes.training import Recipe, fit, read_record

MODEL = "model.safetensors"  # in the folder of a run


@dataclass(frozen=True)
class Prepared:
    """A task's data and network, and the notes by which a run's folder leads back to them."""

    data: Data
    network: nn.Module
    notes: dict[str, Any]


def load_data(task: Task) -> Data:
    """Load the data of a task."""
    return load(task.data, task.root, validation_share=task.validation_share, resize=task.resize)


def prepare(task: Task, seed: int, data: Data | None = None) -> Prepared:
    """Load the data, unless they are there, and build the network, whose first weights follow the seed or a run."""
    data = data or load_data(task)
    options = dict(_option(text) for text in task.model_options)
    network = build(task.model, data.input_shape, data.outputs, seed=seed, **options)
    here = Path(task.data).expanduser()
    source: dict[str, Any] = {
        "name": str(here.resolve()) if here.exists() else task.data,
        "task": data.task,
        "validation_share": task.validation_share,
        "resize": task.resize,
    }
    model = {"name": task.model, "input_shape": data.input_shape, "outputs": data.outputs, "options": options}
    normalise = None if data.normalise is None else dataclasses.asdict(data.normalise)
    scales = {name: getattr(data, name) for name in ("input_mean", "input_std", "target_mean", "target_std")}
    notes = {"source": source, "model": model, "classes": data.classes, "normalise": normalise, "scales": scales}
    if task.start is not None:
        network, notes["start"] = _started(task.start, source, model)
    return Prepared(data, network, notes)


def _started(folder: Path, source: dict[str, Any], model: dict[str, Any]) -> tuple[BayesianModel, dict[str, Any]]:
    """Return the model that another training goes out from, and what it was."""
    run = open_run(folder, "cpu")
    config = run.record["config"]
    same = {**model, "input_shape": list(model["input_shape"])}
    if config["model"] != same:
        raise LeanBayesError(f"The run in {folder} has the network {config['model']}, not {same}: train the same one.")
    was = config["source"]
    if was["name"] == source["name"] and was["validation_share"] != source["validation_share"]:
        raise LeanBayesError(
            f"The run in {folder} has held out {was['validation_share']:g} of the same data: use --validation-share "
            f"{was['validation_share']:g}, or what is held out here was trained on there."
        )
    return run.model, {"method": config["method"], "recipe": config.get("recipe"), "digest": _digest(run)}


def _digest(run: "TrainedRun") -> str:
    """Tell a model by its file as it was trained: factors of one pass may be fitted later, and no training has them."""
    path, calibrated = run.folder / MODEL, run.model.moment_scale != (1.0, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        if calibrated:
            path, run.model.moment_scale = Path(folder) / MODEL, (1.0, 1.0)
            run.model.save(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _option(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        read = yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):
        raise LeanBayesError(f"The model option {text!r} cannot be read: write it as NAME=VALUE.") from None
    with contextlib.suppress(TypeError, ValueError):  # yaml takes 1e-3 for a text
        read = float(read) if isinstance(read, str) else read
    return name.replace("-", "_"), read


def method_name(method: Method) -> str:
    """Return the name by which the command line knows a method."""
    return next(name for name, known in METHODS.items() if type(known) is type(method))


def summary(method: Method) -> str:
    """Return the first line on a method."""
    return (type(method).__doc__ or "").strip().splitlines()[0]


def default_folder(task: Task, label: str, seed: int) -> Path:
    """Name the folder of a run after what it is."""
    return Path("runs") / as_file_name(f"{Path(task.data).stem}-{task.model}-{label}-{seed}")


def as_file_name(text: str) -> str:
    """Replace what a file's name cannot have."""
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in text)


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
        resize = source["resize"] and tuple(source["resize"])
        return load(source["name"], root, validation_share=source["validation_share"], resize=resize)

    def batches(self, data: Data, dataset: Dataset[Any]) -> Batches:
        """Give one of its splits in batches to predict, in their order."""
        return Batches(
            dataset,
            batch_size(data.input_shape),
            device=self.model.device,
            shuffle=False,
            normalise=data.normalise,
            workers=self.record["config"]["recipe"]["workers"],
        )

    def read(self, path: Path) -> Tensor:
        """Read a picture as the network was trained to see it: (1, channels, height, width)."""
        config = self.record["config"]
        shape = tuple(config["model"]["input_shape"])
        if len(shape) != 3:
            raise LeanBayesError(f"The run in {self.folder} was trained on a table: give tables, not pictures.")
        image = read_image(path, shape, stretch=config["source"]["task"] == "segmentation")[None]
        normalise = config["normalise"]
        return image if normalise is None else Normalise(tuple(normalise["mean"]), tuple(normalise["std"]))(image)

    def read_rows(self, path: Path) -> Tensor:
        """Read a table of inputs, standardised as those of the training were: (rows, features)."""
        scales = self.record["config"].get("scales", {})
        features = len(scales.get("input_mean", ()))
        if not features:
            raise LeanBayesError(f"The run in {self.folder} was not trained on a table: give pictures.")
        if not path.is_file():
            raise LeanBayesError(f"There is no table {path}: check the path.")
        rows = torch.from_numpy(read_table(path, least_columns=1).copy())
        if rows.shape[1] != features:
            raise LeanBayesError(f"{path} has {rows.shape[1]} columns: give the {features} inputs, without the target.")
        mean, std = (torch.tensor(scales[name], dtype=torch.float64) for name in ("input_mean", "input_std"))
        return ((rows - mean) / std).float()


def open_run(folder: Path, device: str | None = None) -> TrainedRun:
    """Load the model of a finished run."""
    record = read_record(folder)
    if record["status"] != "finished":
        raise LeanBayesError(f"The run in {folder} is not finished ({record['status']}): give its fit command again.")
    if device == "cuda" and not torch.cuda.is_available():
        raise LeanBayesError("--device cuda needs a GPU that torch can see: leave it out to use the CPU.")
    try:
        model, source = record["config"]["model"], record["config"]["source"]
        name, shape, outputs, options = (model[key] for key in ("name", "input_shape", "outputs", "options"))
        if not all(key in source for key in ("name", "task", "validation_share", "resize")):
            raise KeyError("source")
    except (KeyError, TypeError):
        raise LeanBayesError(
            f"{folder} was trained from Python, with a network or data that have no name here: use lb.load."
        ) from None
    bnn = load_model(folder / MODEL, build(name, tuple(shape), outputs, **options)).eval()
    return TrainedRun(folder, bnn.to(device or ("cuda" if torch.cuda.is_available() else "cpu")), record)
