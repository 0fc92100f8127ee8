"""A trained run seen from all sides, once: what is found is kept in the run's folder, as assessment.json."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from leanbayes import config
from leanbayes.bayesian import BayesianModel
from leanbayes.cli.presets import OOD
from leanbayes.cli.runs import TrainedRun
from leanbayes.data import ArrayDataset, Batches, Data, read_images
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import Look, assess
from leanbayes.evaluation.assessment import batch_size
from leanbayes.evaluation.shift import add_noise, rotate
from leanbayes.methods import describe_method
from leanbayes.noise import mix
from leanbayes.report import AssessedRun
from leanbayes.report.pictures import galleries_of
from leanbayes.training.progress import Progress
from leanbayes.training.record import write_json

FILE = "assessment.json"
_TURN, _NOISE = 90, -6  # degrees and decibels that make test images something else
_MADE = ("rotated", "noisy")  # of the test images themselves


def look_at(
    run: TrainedRun,
    data: Data,
    look: Look,
    ood: Sequence[str] | None = None,
    root: Path | None = None,
    name: str = "",
    shown: bool = True,
) -> AssessedRun:
    """Assess a run, or take what is kept of an earlier look that was the same.

    ood: names of data sets of another kind, or None for those that suit the data.
    """
    method, seed = name or describe_method(run.model.method), run.record["config"]["recipe"]["seed"]
    key = {"look": config.encode(look), "ood": ood, "model": _fingerprint(run.folder / "model.safetensors")}
    found = _kept(run.folder / FILE, key)
    if found is None:
        found = _assess(run, data, look, ood, root, method, shown)
        write_json(run.folder / FILE, {"key": key, **found})
    return AssessedRun(method, seed, run.record, found)


def _assess(
    run: TrainedRun, data: Data, look: Look, ood: Sequence[str] | None, root: Path | None, name: str, shown: bool
) -> dict[str, Any]:
    sets, notes = ood_sets(ood, data, root, look, run.model)
    progress: list[Progress] = []

    def tell(what: str, done: int, of: int) -> None:
        if not progress:
            progress.append(Progress(f"Assessing {name}", of, shown, None).__enter__())
        elif done:
            progress[0].advance()
            progress[0].line()

    try:
        workers = run.record["config"]["recipe"]["workers"]
        found = assess(run.model, data, look, ood=sets, workers=workers, tell=tell)
    finally:
        for bar in progress:
            bar.__exit__(None, None, None)
    figures = run.model.method.figures(run.model, found["scores"], run.record["costs"])
    galleries = galleries_of(run.model, data, found)
    return {**found, "figures": [figure.to_json() for figure in figures], "galleries": galleries, "notes": notes}


def _kept(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Read an earlier look, if there is one and it was the same."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.pop("key", None) == json.loads(json.dumps(key)) else None


def _fingerprint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise LeanBayesError(f"Cannot read {path}: {error.strerror}; train the run again.") from None


# -- data of another kind ---------------------------------------------------------------------------------------------


def ood_sets(
    names: Sequence[str] | None, data: Data, root: Path | None, look: Look, bnn: BayesianModel
) -> tuple[dict[str, Dataset[Any]], list[str]]:
    """Read the data sets of these names; of those that merely suit the data, one that is not there is noted."""
    notes: list[str] = []
    if data.task != "classification" or len(data.input_shape) != 3:
        if names:
            raise LeanBayesError(f"Data of another kind can be told from images of classes only: {data.name} has none.")
        return {}, notes
    sets: dict[str, Dataset[Any]] = {}
    for name in (*OOD.get(data.name, ()), *_MADE) if names is None else names:
        try:
            sets[name] = _made(name, data, look, bnn) if name in _MADE else _read(name, data, root)
        except LeanBayesError as error:
            if names is not None:
                raise
            notes.append(f"Not told from {name}: {error}")
    return sets, notes


def _read(name: str, data: Data, root: Path | None) -> Dataset[Any]:
    found = read_images(name, "test", root)
    if tuple(found.x.shape[1:]) != data.input_shape:
        shape = "×".join(map(str, found.x.shape[1:]))
        wanted = "×".join(map(str, data.input_shape))
        raise LeanBayesError(f"The images of {name} are {shape}, and the network wants {wanted}: choose another set.")
    return found


def _made(name: str, data: Data, look: Look, bnn: BayesianModel) -> Dataset[Any]:
    """Turn the test images by 90 degrees, or drown them in noise."""
    assert data.test is not None
    size = batch_size(data.input_shape)
    images, labels = [], []
    generator = torch.Generator().manual_seed(mix(look.seed))
    for x, y in Batches(data.test, size, device=bnn.device, shuffle=False).epoch():
        x = x.float().div(255) if x.dtype == torch.uint8 else x
        images.append((rotate(x, _TURN) if name == "rotated" else add_noise(x, _NOISE, generator)).cpu())
        labels.append(y.cpu())
        if sum(map(len, labels)) >= look.shift_examples:
            break
    return ArrayDataset(torch.cat(images)[: look.shift_examples], torch.cat(labels)[: look.shift_examples])
