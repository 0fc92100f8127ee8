"""A trained run seen from all sides, once: what is found is kept in the run's folder, as assessment.json."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import leanbayes
from leanbayes import config
from leanbayes.cli.presets import OOD
from leanbayes.cli.runs import TrainedRun
from leanbayes.data import ArrayDataset, Batches, Data, read_images
from leanbayes.data.images import IMAGE_SETS
from leanbayes.errors import LeanBayesError, did_you_mean
from leanbayes.evaluation import Look, assess
from leanbayes.evaluation.assessment import batch_size
from leanbayes.evaluation.shift import add_noise, rotate
from leanbayes.methods import describe_method
from leanbayes.noise import mix
from leanbayes.report import AssessedRun
from leanbayes.report.pictures import galleries_of
from leanbayes.training.progress import Progress, say
from leanbayes.training.record import write_json

FILE = "assessment.json"
_PARTS = frozenset(
    "look scores curves extremes shift_examples shifts ood pruning explanation costs figures galleries notes".split()
)
_TURN, _NOISE = 90, -6  # degrees and decibels that make test images something else
_MADE = ("rotated", "noisy")  # of the test images themselves


def look_at(
    run: TrainedRun,
    data: Data,
    look: Look,
    ood: Sequence[str] | None = None,
    root: Path | None = None,
    *,
    name: str = "",
    shown: bool = True,
    anew: bool = False,
) -> AssessedRun:
    """Assess a run, or take what is kept of an earlier look that was the same, unless it is wished anew.

    ood: names of data sets of another kind, or None for those that suit the data. name: what to call the method.
    """
    method, seed = name or describe_method(run.model.method), run.record["config"]["recipe"]["seed"]
    key = {
        "look": config.encode(look),
        "ood": ood,
        "model": _fingerprint(run.folder / "model.safetensors"),
        "leanbayes": leanbayes.__version__,
    }
    found = None if anew else _kept(run.folder / FILE, key)
    if found is None:
        found = _assess(run, data, look, ood, root, f"{method}, seed {seed}", shown)
        try:
            write_json(run.folder / FILE, {"key": key, **found})
        except LeanBayesError as error:  # in somebody else's folder, perhaps
            say(shown, f"What was found is not kept: {error}")
    return AssessedRun(method, seed, run.record, found)


def _assess(
    run: TrainedRun, data: Data, look: Look, ood: Sequence[str] | None, root: Path | None, name: str, shown: bool
) -> dict[str, Any]:
    if data.test is None:
        raise LeanBayesError(f"{data.name} has no test data to look at: add some.")
    sets, notes = ood_sets(ood, data, root, look, run.model.device)
    bar: Progress | None = None

    def tell(what: str, done: int, of: int) -> None:
        nonlocal bar
        if bar is None:
            bar = ending.enter_context(Progress(f"Assessing {name}", of, shown, None))
        else:
            bar.advance()
            bar.line()

    with contextlib.ExitStack() as ending:
        workers = run.record["config"]["recipe"]["workers"]
        found = assess(run.model, data, look, ood=sets, workers=workers, tell=tell)
    figures = run.model.method.figures(run.model, found["scores"], run.record["costs"])
    galleries = galleries_of(run.model, data, found)
    return {**found, "figures": [figure.to_json() for figure in figures], "galleries": galleries, "notes": notes}


def _kept(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Read an earlier look, if there is one, it is whole, and it was the same."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(found, dict) and found.pop("key", None) == json.loads(json.dumps(key)) and found.keys() >= _PARTS
    return found if same else None


def _fingerprint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise LeanBayesError(f"Cannot read {path}: {error.strerror}; train the run again.") from None


# -- data of another kind ---------------------------------------------------------------------------------------------


def ood_names(names: Sequence[str] | None, data: Data) -> tuple[str, ...]:
    """Return the names of the data sets that a look tells the data from: the given ones, or those that suit it."""
    if names is None:
        return (*OOD.get(data.name, ()), *_MADE) if _has_images_of_classes(data) else ()
    if names and not _has_images_of_classes(data):
        raise LeanBayesError(
            f"Data of another kind can only be told from images of classes, and {data.name} has none: leave out --ood."
        )
    for name in names:
        if _plain(name) not in map(_plain, (*IMAGE_SETS, *_MADE)):
            hint = did_you_mean(name, (*IMAGE_SETS, *_MADE), f"there are {', '.join((*IMAGE_SETS, *_MADE))}.")
            raise LeanBayesError(f"There is no data set {name!r} for --ood: {hint}")
    return tuple(names)


def ood_sets(
    names: Sequence[str] | None, data: Data, root: Path | None, look: Look, device: torch.device | str = "cpu"
) -> tuple[dict[str, Dataset[Any]], list[str]]:
    """Read the data sets of these names; of those that merely suit the data, one that cannot be read is noted."""
    sets: dict[str, Dataset[Any]] = {}
    notes: list[str] = []
    for name in ood_names(names, data):
        try:
            sets[name] = _made(name, data, look, device) if _plain(name) in _MADE else _read(name, data, root)
        except LeanBayesError:
            if names is not None:
                raise
            notes.append(f"Not told from {name}, which could not be read: --ood {name} tells why.")
    return sets, notes


def _has_images_of_classes(data: Data) -> bool:
    return data.task == "classification" and len(data.input_shape) == 3


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _read(name: str, data: Data, root: Path | None) -> Dataset[Any]:
    found = read_images(name, "test", root)
    if tuple(found.x.shape[1:]) != data.input_shape:
        shape, wanted = ("×".join(map(str, of)) for of in (found.x.shape[1:], data.input_shape))
        raise LeanBayesError(f"The images of {name} are {shape}, and the network wants {wanted}: choose another --ood.")
    return found


def _made(name: str, data: Data, look: Look, device: torch.device | str) -> Dataset[Any]:
    """Turn the test images by 90 degrees, or drown them in noise."""
    assert data.test is not None
    images, labels = [], []
    generator = torch.Generator().manual_seed(mix(look.seed))
    for x, y in Batches(data.test, batch_size(data.input_shape), device=device, shuffle=False).epoch():
        x = x.float().div(255) if x.dtype == torch.uint8 else x
        images.append((rotate(x, _TURN) if _plain(name) == "rotated" else add_noise(x, _NOISE, generator)).cpu())
        labels.append(y.cpu())
        if sum(map(len, labels)) >= look.shift_examples:
            break
    return ArrayDataset(torch.cat(images)[: look.shift_examples], torch.cat(labels)[: look.shift_examples])
