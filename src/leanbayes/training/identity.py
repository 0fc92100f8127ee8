"""The identity of a run: the settings, data and network that a run to resume must have in common with its folder."""

import hashlib
from pathlib import Path
from typing import Any

from torch import nn

from leanbayes.core import config
from leanbayes.core.layout import Select, choose
from leanbayes.data import Data, fingerprint
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import Likelihood
from leanbayes.model.method import Method
from leanbayes.training.recipe import FREE_ON_RESUME, Recipe


def identity(
    network: nn.Module,
    method: Method,
    recipe: Recipe,
    data: Data,
    likelihood: Likelihood,
    select: Select,
    precision: str,
    parts: int,
) -> dict[str, Any]:
    """Return the part of `run.json` that identifies a run.

    Args:
        precision: The number format in use, by accelerate's name.
        parts: The parts of a batch: processes × accumulate.
    """
    shapes = [(name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()]
    modules = [(name, type(module).__qualname__) for name, module in network.named_modules()]
    return {
        "method": config.encode(method),
        "recipe": config.encode(recipe),
        "precision": precision,
        "data": data.name,
        "examples": fingerprint(data.train),
        "architecture": hashlib.sha256(repr([shapes, modules]).encode()).hexdigest()[:16],
        "likelihood": config.encode(likelihood),
        "selected": None if select is None else [slot.name for slot in choose(network, select)[0]],
        "parts_of_a_batch": parts,
    }


def check_same_run(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise an error if the record of a folder is that of another run.

    Args:
        folder: The folder of the run.
        old: The record that the folder holds.
        new: The settings of the run to resume.
    """
    if old["status"] == "finished":  # nothing is left to train, so the number of parts does not matter
        new = new | {"parts_of_a_batch": old["config"].get("parts_of_a_batch")}
    difference = _difference(old["config"], new)
    if difference:
        name, before, now = difference
        raise LeanBayesError(
            f"{folder} holds a run with {name}={before!r}, and this one has {now!r}: "
            "choose another folder, or overwrite that run (--overwrite)."
        )


def _difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the first setting in which two configurations differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        free = set(FREE_ON_RESUME) if name == "recipe" else set()
        for key in sorted({*old, *new} - free, key=lambda key: (key != "type", key)):
            found = _difference(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
            if found:
                return found
        return None
    return None if old == new else (name, old, new)
