"""A trained run seen from all sides, once: what is found is kept in the run's folder, as assessment.json."""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import leanbayes
from leanbayes import config
from leanbayes.cli.presets import OOD
from leanbayes.cli.runs import MODEL, TrainedRun
from leanbayes.data import ArrayDataset, Batches, Data, fingerprint, read_images
from leanbayes.data.images import IMAGE_SETS
from leanbayes.errors import LeanBayesError, did_you_mean
from leanbayes.evaluation import Look
from leanbayes.evaluation.assessment import batch_size, some
from leanbayes.evaluation.shift import add_noise, rotate
from leanbayes.methods import describe_method
from leanbayes.noise import mix
from leanbayes.plain import with_nan, without_nan
from leanbayes.report import AssessedRun, assessed
from leanbayes.training.progress import Progress, say
from leanbayes.training.record import write_json

FILE = "assessment.json"
_TURN, _NOISE = 90, -6  # degrees and decibels that make test images something else
_MADE = ("rotated", "noisy")  # of the test images themselves


def look_at(
    run: TrainedRun,
    data: Data,
    look: Look | None,
    ood: Sequence[str] | None = None,
    root: Path | None = None,
    *,
    name: str = "",
    shown: bool = True,
    anew: bool = False,
) -> AssessedRun:
    """Assess a run, or take what is kept of an earlier look that was the same, unless it is wished anew.

    look: how to look, or None for what is kept, however that was, or else as usual. ood: names of data sets of another
    kind, or None for those that suit the data. name: what to call the method.
    """
    if data.test is None:
        raise LeanBayesError(f"{data.name} has no test data to look at: add some.")
    method, seed = name or describe_method(run.model.method), run.record["config"]["recipe"]["seed"]
    key: dict[str, Any] = {
        "model": _fingerprint(run.folder / MODEL),
        "test": [fingerprint(data.test), *data.target_std],  # a table is standardised: its unit is not in it
        "leanbayes": leanbayes.__version__,
    }
    found = _kept(run.folder / FILE, key) if look is None and not anew else None
    if found is None:
        look = look or Look()
        sets, notes = ood_sets(ood, data, root, look, run.model.device)
        key |= {"look": config.encode(look), "ood": {name: _told_by(name, one) for name, one in sets.items()}}
        found = None if anew else _kept(run.folder / FILE, key)
        if found is None:
            found = {**_assess(run, data, look, sets, f"{method}, seed {seed}", shown), "notes": notes}
            _keep(run.folder / FILE, key, found, shown)
    return AssessedRun(method, seed, run.record, found)


def _assess(
    run: TrainedRun, data: Data, look: Look, sets: Mapping[str, Dataset[Any]], name: str, shown: bool
) -> dict[str, Any]:
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
        return assessed(run.model, data, run.record["costs"], look, ood=sets, workers=workers, tell=tell)


def _keep(path: Path, key: dict[str, Any], found: dict[str, Any], shown: bool) -> None:
    plain = without_nan(found)
    try:
        write_json(path, {"key": key, "digest": _digest(plain), **plain})
    except LeanBayesError as error:  # in somebody else's folder, perhaps
        say(shown, f"What was found is not kept: {error}")


def _kept(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Read an earlier look, if there is one, it is as it was written, and it was the same in all that the key has."""
    try:
        found = json.loads(path.read_text())
        had, digest = found.pop("key"), found.pop("digest")
        same = all(had[name] == value for name, value in json.loads(json.dumps(key)).items())
        if not same or digest != _digest(found):
            return None
        return {**with_nan(found), "look": found["look"]}  # whose settings may be None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _told_by(name: str, dataset: Dataset[Any]) -> str:
    """Tell a data set by its examples; those that are made of the test data follow from these."""
    return "made" if _plain(name) in _MADE else fingerprint(dataset)


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
    found = _images(name, root, os.environ.get("LEANBAYES_DATA"))
    if tuple(found.x.shape[1:]) != data.input_shape:
        shape, wanted = ("×".join(map(str, of)) for of in (found.x.shape[1:], data.input_shape))
        raise LeanBayesError(f"The images of {name} are {shape}, and the network wants {wanted}: choose another --ood.")
    return found


@functools.lru_cache(maxsize=4)
def _images(name: str, root: Path | None, place: str | None) -> ArrayDataset:
    """Read a data set once for all runs; an error is met each time."""
    return read_images(name, "test", root)


def _made(name: str, data: Data, look: Look, device: torch.device | str) -> Dataset[Any]:
    """Turn test images by 90 degrees, or drown them in noise: some of them, chosen at random."""
    assert data.test is not None
    test, images, labels = some(data.test, look.ood_examples, look.seed), [], []
    generator = torch.Generator().manual_seed(mix(look.seed))
    for x, y in Batches(test, batch_size(data.input_shape), device=device, shuffle=False).epoch():
        x = x.float().div(255) if x.dtype == torch.uint8 else x
        images.append((rotate(x, _TURN) if _plain(name) == "rotated" else add_noise(x, _NOISE, generator)).cpu())
        labels.append(y.cpu())
    return ArrayDataset(torch.cat(images), torch.cat(labels))
