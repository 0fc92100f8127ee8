"""Full evaluations of trained runs. Each is stored in the folder of its run, as evaluation.json."""

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

from leanbayes.cli.runs import MODEL, TrainedRun
from leanbayes.core import config
from leanbayes.core.json_values import read_untrusted, with_nan, without_nan
from leanbayes.core.names import lookup
from leanbayes.core.noise import mix
from leanbayes.core.version import __version__
from leanbayes.data import ArrayDataset, Batches, Data, fingerprint, ood_partners, read_images
from leanbayes.data.images import IMAGE_SETS
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import EvaluationSettings
from leanbayes.evaluation.full_evaluation import batch_size, some
from leanbayes.evaluation.shift import add_noise, rotate
from leanbayes.methods import describe_method
from leanbayes.report import EvaluatedRun, document_of, evaluated, render
from leanbayes.training.progress import Progress, say
from leanbayes.training.record import write_json

FILE = "evaluation.json"
_ROTATION, _NOISE = 90, -6  # degrees and decibels that turn test images into OOD data
_MADE = ("rotated", "noisy")  # OOD data made from the test images


def evaluation_of(
    run: TrainedRun,
    data: Data,
    settings: EvaluationSettings | None,
    ood: Sequence[str] | None = None,
    root: Path | None = None,
    *,
    name: str = "",
    shown: bool = True,
    again: bool = False,
) -> EvaluatedRun:
    """Evaluate a run, or return the stored evaluation if it has the same settings.

    Args:
        run: The trained run.
        data: Its data.
        settings: How to evaluate it. None means the stored evaluation, whatever its settings, or if there is none the
            default settings.
        ood: The names of out-of-distribution data sets. None means the usual ones for the data.
        root: The folder of the data sets.
        name: The name of the method in tables.
        shown: Whether to show progress.
        again: Whether to evaluate the run again even if there is a stored evaluation.
    """
    if data.test is None:
        raise LeanBayesError(f"{data.name} has no test data to evaluate on: add some.")
    method, seed = name or describe_method(run.model.method), run.record["config"]["recipe"]["seed"]
    key: dict[str, Any] = {
        "model": _fingerprint(run.folder / MODEL),
        "test": [fingerprint(data.test), *data.target_std],  # a standardized table does not contain its unit
        "leanbayes": __version__,
    }

    def stored() -> dict[str, Any] | None:
        found = None if again else _stored(run.folder / FILE, key)
        return found if found is not None and _can_be_shown(EvaluatedRun(method, seed, run.record, found)) else None

    found = stored() if settings is None else None
    if found is None:
        settings = settings or EvaluationSettings()
        sets, notes = ood_sets(ood, data, root, settings, run.model.device)
        digests = {name: _digest_of_set(name, dataset) for name, dataset in sets.items()}
        key |= {"settings": config.encode(settings), "ood": digests}
        found = stored()
        if found is None:
            found = {**_evaluate(run, data, settings, sets, f"{method}, seed {seed}", shown), "notes": notes}
            _store(run.folder / FILE, key, found, shown)
    return EvaluatedRun(method, seed, run.record, found)


def _evaluate(
    run: TrainedRun, data: Data, settings: EvaluationSettings, sets: Mapping[str, Dataset[Any]], name: str, shown: bool
) -> dict[str, Any]:
    bar: Progress | None = None

    def advance(what: str, done: int, of: int) -> None:
        nonlocal bar
        if bar is None:
            bar = stack.enter_context(Progress(f"Evaluating {name}", of, shown, None))
        else:
            bar.advance()
            bar.line()

    with contextlib.ExitStack() as stack:
        workers, costs = run.record["config"]["recipe"]["workers"], run.record["costs"]
        return evaluated(run.model, data, costs, settings, ood=sets, workers=workers, on_progress=advance)


def _store(path: Path, key: dict[str, Any], found: dict[str, Any], shown: bool) -> None:
    plain = without_nan(found)
    try:
        write_json(path, {"key": key, "digest": _digest(plain), **plain})
    except LeanBayesError as error:  # the folder may belong to somebody else
        say(shown, f"The evaluation is not stored: {error}")


def _stored(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Read the stored evaluation, or return None if it is missing, was changed, or differs in anything in the key."""
    try:
        found = read_untrusted(path)
        had, digest = found.pop("key"), found.pop("digest")
        same = all(had[name] == value for name, value in json.loads(json.dumps(key)).items())
        if not same or digest != _digest(found):
            return None
        return {**with_nan(found), "settings": found["settings"]}  # in settings, None is not NaN
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _can_be_shown(run: EvaluatedRun) -> bool:
    """Whether a stored evaluation, which anybody can have written, holds what a report needs."""
    try:
        render(document_of([run]))
        return isinstance(run.evaluation["notes"], list)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return False


def _digest(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _digest_of_set(name: str, dataset: Dataset[Any]) -> str:
    """Return a digest of the examples; sets made from the test data are determined by these."""
    return "made" if name in _MADE else fingerprint(dataset)


def _fingerprint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise LeanBayesError(f"Cannot read {path}: {error.strerror}; train the run again.") from None


# -- out-of-distribution data -----------------------------------------------------------------------------------------


def ood_names(names: Sequence[str] | None, data: Data) -> tuple[str, ...]:
    """Return the names of the OOD data sets of an evaluation: the given ones, or the usual ones for the data."""
    if names is None:
        return (*ood_partners(data.name), *_MADE) if _has_images_of_classes(data) else ()
    if names and not _has_images_of_classes(data):
        raise LeanBayesError(
            f"OOD detection needs a classifier of images, and {data.name} is not for one: leave out --ood."
        )
    return tuple(lookup("OOD data set", name, (*IMAGE_SETS, *_MADE)) for name in names)


def ood_sets(
    names: Sequence[str] | None,
    data: Data,
    root: Path | None,
    settings: EvaluationSettings,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, Dataset[Any]], list[str]]:
    """Read the OOD data sets, with a note for each of the usual ones that cannot be read."""
    sets: dict[str, Dataset[Any]] = {}
    notes: list[str] = []
    for name in ood_names(names, data):
        try:
            sets[name] = _made(name, data, settings, device) if name in _MADE else _read(name, data, root)
        except LeanBayesError:
            if names is not None:
                raise
            notes.append(f"OOD detection on {name} is missing, because it cannot be read: --ood {name} says why.")
    return sets, notes


def _has_images_of_classes(data: Data) -> bool:
    return data.task == "classification" and len(data.input_shape) == 3


def _read(name: str, data: Data, root: Path | None) -> Dataset[Any]:
    found = _images(name, root, os.environ.get("LEANBAYES_DATA"))
    if tuple(found.x.shape[1:]) != data.input_shape:
        shape, wanted = ("×".join(map(str, of)) for of in (found.x.shape[1:], data.input_shape))
        raise LeanBayesError(f"The images of {name} are {shape}, and the network needs {wanted}: choose another --ood.")
    return found


@functools.lru_cache(maxsize=4)
def _images(name: str, root: Path | None, place: str | None) -> ArrayDataset:
    """Read a data set once for all runs; errors are not cached."""
    return read_images(name, "test", root)


def _made(name: str, data: Data, settings: EvaluationSettings, device: torch.device | str) -> Dataset[Any]:
    """Rotate some of the test images by 90 degrees, or add strong noise to them."""
    assert data.test is not None
    test, images, labels = some(data.test, settings.ood_examples, settings.seed), [], []
    generator = torch.Generator().manual_seed(mix(settings.seed))
    for x, y in Batches(test, batch_size(data.input_shape), device=device, shuffle=False).epoch():
        x = x.float().div(255) if x.dtype == torch.uint8 else x
        images.append((rotate(x, _ROTATION) if name == "rotated" else add_noise(x, _NOISE, generator)).cpu())
        labels.append(y.cpu())
    return ArrayDataset(torch.cat(images), torch.cat(labels))
