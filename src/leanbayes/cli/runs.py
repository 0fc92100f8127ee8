"""Prepare the data and network of a task, train them, and open the folder of a trained run again."""

import contextlib
import dataclasses
import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from leanbayes.cli.options import Task
from leanbayes.core.config import decode
from leanbayes.core.json_values import check_shape
from leanbayes.data import Batches, Data, Normalize, detail_lost, load, read_image, read_table
from leanbayes.data.image_files import list_image_files
from leanbayes.deploy.model_file import save
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.evaluation.full_evaluation import batch_size
from leanbayes.methods import METHODS
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.method import Method
from leanbayes.networks.recorded import build_listed, rebuild
from leanbayes.training import Recipe, fit, read_record
from leanbayes.training.run_folder import load_trained

MODEL = "model.safetensors"  # in the folder of a run


@dataclass(frozen=True)
class Prepared:
    """The data and network of a task, and the notes that rebuild them from the folder of a run."""

    data: Data
    network: nn.Module
    notes: dict[str, Any]


def load_data(task: Task) -> Data:
    """Load the data of a task."""
    return load(task.data, task.root, validation_share=task.validation_share, resize=task.resize)


def prepare(task: Task, seed: int, data: Data | None = None) -> Prepared:
    """Load the data, unless given, and build the network, initialized from the seed or from another run."""
    data = data or load_data(task)
    options = dict(_option(text) for text in task.model_options)
    network = build_listed(task.model, data.input_shape, data.outputs, options, seed=seed)
    here = Path(task.data).expanduser()
    source: dict[str, Any] = {
        "name": str(here.resolve()) if here.exists() else task.data,
        "task": data.task,
        "validation_share": task.validation_share,
        "resize": task.resize,
    }
    model = {"name": task.model, "input_shape": data.input_shape, "outputs": data.outputs, "options": options}
    normalize = None if data.normalize is None else dataclasses.asdict(data.normalize)
    scales = {name: getattr(data, name) for name in ("input_mean", "input_std", "target_mean", "target_std")}
    notes = {"source": source, "model": model, "classes": data.classes, "normalize": normalize, "scales": scales}
    if task.start is not None:
        network, notes["start"] = _started(task.start, source, model)
    return Prepared(data, network, notes)


def _started(folder: Path, source: dict[str, Any], model: dict[str, Any]) -> tuple[BayesianModel, dict[str, Any]]:
    """Return the model of the run that a training starts from, and a description of it."""
    run = open_run(folder, "cpu")
    config = run.record["config"]
    same = {**model, "input_shape": list(model["input_shape"])}
    if config["model"] != same:
        raise LeanBayesError(f"The run in {folder} has the network {config['model']}, not {same}: train the same one.")
    was = config["source"]
    if was["name"] == source["name"] and was["validation_share"] != source["validation_share"]:
        raise LeanBayesError(
            f"The run in {folder} was trained with {was['validation_share']:g} of the same data held out: use "
            f"--validation-share {was['validation_share']:g}, so that no held-out example has been trained on."
        )
    return run.model, {"method": config["method"], "recipe": config.get("recipe"), "digest": _digest(run)}


def _digest(run: "TrainedRun") -> str:
    """Return a digest of the model file as it was trained, without what calibrate and decide may have added later."""
    path, model = run.folder / MODEL, run.model
    with tempfile.TemporaryDirectory() as folder:
        if model.moment_scale != (1.0, 1.0) or model.moment_layers or model.policy is not None:
            model.moment_scale, model.moment_layers, model.policy = (1.0, 1.0), {}, None
            model.moment_margins = ()
            path = Path(folder) / MODEL
            save(model, path)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _option(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        read = yaml.safe_load(value)
    except (ValueError, KeyError, OverflowError, RecursionError, yaml.YAMLError):
        raise LeanBayesError(f"The model option {text!r} cannot be read: write it as NAME=VALUE.") from None
    with contextlib.suppress(TypeError, ValueError):  # yaml reads 1e-3 as a text
        read = float(read) if isinstance(read, str) else read
    return name.replace("-", "_"), read


def method_name(method: Method) -> str:
    """Return the name of a method on the command line."""
    return next(name for name, known in METHODS.items() if type(known) is type(method))


def summary(method: Method) -> str:
    """Return the first line of the docstring of a method."""
    return (type(method).__doc__ or "").strip().splitlines()[0]


def default_folder(task: Task, label: str, seed: int) -> Path:
    """Return the default folder of a run."""
    return Path("runs") / as_file_name(f"{Path(task.data).stem}-{task.model}-{label}-{seed}")


def as_file_name(text: str) -> str:
    """Replace characters that a file name cannot have."""
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in text)


def train(prepared: Prepared, method: Method, recipe: Recipe, task: Task, folder: Path) -> BayesianModel:
    """Train into a folder, or load the finished run in it."""
    return fit(
        prepared.network,
        method,
        prepared.data,
        recipe=recipe,
        out=folder,
        overwrite=task.overwrite,
        progress=not task.quiet,
        notes=prepared.notes,
    )


@dataclass(frozen=True)
class TrainedRun:
    """The folder of a run, its trained model, and its record."""

    folder: Path
    model: BayesianModel
    record: dict[str, Any]

    def data(self, root: Path | None) -> Data:
        """Load the data that the run was trained on."""
        source = self.record["config"]["source"]
        resize = source["resize"] and tuple(source["resize"])
        return load(source["name"], root, validation_share=source["validation_share"], resize=resize)

    def batches(self, data: Data, dataset: Dataset[Any]) -> Batches:
        """Return batches of one split in their original order, for prediction."""
        return Batches(
            dataset,
            batch_size(data.input_shape),
            device=self.model.device,
            shuffle=False,
            normalize=data.normalize,
            workers=self.record["config"]["recipe"]["workers"],
        )

    def read(self, path: Path) -> Tensor:
        """Read an image with the preprocessing of the training: (1, channels, height, width)."""
        shape, normalize = tuple(self.record["config"]["model"]["input_shape"]), self.record["config"]["normalize"]
        if len(shape) != 3:
            raise LeanBayesError(f"The run in {self.folder} was trained on a table: give tables, not images.")
        image = read_image(path, shape, stretch=self._stretches)[None]
        return image if normalize is None else Normalize(tuple(normalize["mean"]), tuple(normalize["std"]))(image)

    def detail_lost(self, path: Path) -> float:
        """Return the share of an image's variance that the network does not see, because the image is shrunk."""
        return detail_lost(path, tuple(self.record["config"]["model"]["input_shape"]), stretch=self._stretches)

    @property
    def _stretches(self) -> bool:
        return self.record["config"]["source"]["task"] == "segmentation"

    def read_rows(self, path: Path) -> Tensor:
        """Read a table of inputs, standardized as in training: (rows, features)."""
        scales = self.record["config"].get("scales", {})
        features = len(scales.get("input_mean", ()))
        if not features:
            raise LeanBayesError(f"The run in {self.folder} was not trained on a table: give images.")
        if not path.is_file():
            raise LeanBayesError(f"There is no table {path}: check the path.")
        rows = torch.from_numpy(read_table(path, least_columns=1).copy())
        if rows.shape[1] != features:
            raise LeanBayesError(f"{path} has {rows.shape[1]} columns: give the {features} inputs, without the target.")
        mean, std = (torch.tensor(scales[name], dtype=torch.float64) for name in ("input_mean", "input_std"))
        return ((rows - mean) / std).float()


def files_in(given: Sequence[Path]) -> list[Path]:
    """Return the given files, and in place of a folder the images in it."""
    files: list[Path] = []
    for path in given:
        found = [Path(name) for name in list_image_files(path)] if path.is_dir() else [path]
        if not found:
            raise LeanBayesError(f"{path} has no images: give a folder of images.")
        files += found
    return files


_SCALES = ("input_mean", "input_std", "target_mean", "target_std")
_SHAPE = {
    "config": {
        "data": str,
        "method": {str: Any},
        "recipe": dict.fromkeys(("seed", "workers", "epochs", "batch_size", "samples"), int) | {"temperature": float},
        "precision": str,
        "source": {"name": str, "task": str, "validation_share": float, "resize": (None, [int])},
        "model": {"name": str, "input_shape": [int], "outputs": int, "options": {str: Any}},
        "classes": (None, [str]),
        "normalize": (None, {"mean": [float], "std": [float]}),
        "scales?": {name: [float] for name in _SCALES},
        "examples?": (None, str),
    },
    "command": str,
    "machine": {"system": str, "processor": str, "cores": (int, None), "gpus": [str]},
    "history": [{"step": int, "epoch?": float}],
    "costs": {"trainable": float, "stored": float},
}


def _check_record(folder: Path, record: dict[str, Any]) -> None:
    """Raise an error if the record of a finished run lacks anything that the commands read from it."""
    try:
        check_shape(record, _SHAPE)
        if not isinstance(decode(record["config"]["recipe"]), Recipe):
            raise ValueError("config.recipe has a wrong type")
        if not isinstance(decode(record["config"]["method"]), Method):
            raise ValueError("config.method has a wrong type")
        if any("validation" in entry and "epoch" not in entry for entry in record["history"]):
            raise ValueError("an entry of history has no epoch")
        _check_lengths(record["config"])
    except (ValueError, FileFormatError) as error:
        reason = str(error).rstrip(".")
        raise FileFormatError(
            f"{folder / 'run.json'} is damaged ({reason}): remove the run's folder and train again."
        ) from None


def _check_lengths(config: dict[str, Any]) -> None:
    """Raise an error if the scales of inputs and targets do not fit the shape of the inputs and each other."""
    size, normalize, scales = config["model"]["input_shape"][:1], config["normalize"], config.get("scales", {})
    if normalize and not [len(normalize["mean"])] == [len(normalize["std"])] == size:
        raise ValueError("config.normalize has a wrong length")
    if 0 < len(config["classes"] or ()) < config["model"]["outputs"]:
        raise ValueError("config.classes has a wrong length")
    lengths = {name: len(scales[name]) for name in _SCALES if name in scales}
    if lengths and (
        lengths["input_mean"] != lengths["input_std"]
        or lengths["target_mean"] != lengths["target_std"]
        or (lengths["input_mean"] and ([lengths["input_mean"]] != size or not lengths["target_mean"]))
    ):
        raise ValueError("config.scales has a wrong length")


def open_run(folder: Path, device: str | None = None) -> TrainedRun:
    """Load the model of a finished run."""
    record = read_record(folder)
    if record["status"] != "finished":
        raise LeanBayesError(f"The run in {folder} is not finished ({record['status']}): run its fit command again.")
    if device == "cuda" and not torch.cuda.is_available():
        raise LeanBayesError("--device cuda needs a GPU that torch can see: leave it out to use the CPU.")
    try:
        model, source = record["config"]["model"], record["config"]["source"]
        name, shape, outputs, options = (model[key] for key in ("name", "input_shape", "outputs", "options"))
        if not all(key in source for key in ("name", "task", "validation_share", "resize")):
            raise KeyError("source")
    except (KeyError, TypeError):
        raise LeanBayesError(
            f"{folder} was trained from Python, with a network or data unknown to the command line: use lb.load."
        ) from None
    _check_record(folder, record)
    path = folder / MODEL
    network: nn.Module = nn.Identity()  # without a model file, loading says so
    if path.is_file():
        network = rebuild(name, shape, outputs, options, file_bytes=path.stat().st_size)
    bnn = load_trained(folder, network).eval()
    if any(tensor.dtype != torch.float32 for tensor in bnn.parameters()):
        raise FileFormatError(f"{path} has weights of another dtype than a run has: use a run folder that is complete.")
    return TrainedRun(folder, bnn.to(device or ("cuda" if torch.cuda.is_available() else "cpu")), record)
