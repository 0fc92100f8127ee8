"""`temperature="auto"`: train with a few temperatures, and keep the model with the best held-out likelihood.

In a folder, each temperature is a run of its own under temperatures/, so that a stopped search continues where it was.
The files of the chosen run are then copied into the folder itself, the record last.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

from leanbayes.core.files import reason_of, written_whole
from leanbayes.core.json_values import json_text, read_untrusted
from leanbayes.errors import FileFormatError, LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.training.progress import say
from leanbayes.training.run_folder import CHECKPOINTS, MODEL, RECORD, TENSORBOARD

TEMPERATURES = (1.0, 0.1, 0.01, 0.001)
FOLDER, CHOICE = "temperatures", "choice.json"
Train = Callable[[float, Path | None], tuple[BayesianModel, float]]


def train_with_each(train: Train, folder: Path | None, shown: bool) -> tuple[BayesianModel, float]:
    """Train with each temperature and return the best model with its temperature.

    Args:
        train: Trains with a temperature into a folder, or returns the model of a finished run. Returns the model and
            its NLL on the held-out split.
        folder: The folder of the search, or None.
        shown: Whether to report the result.
    """
    found: dict[float, tuple[BayesianModel, float]] = {}
    for temperature in TEMPERATURES:
        found[temperature] = train(temperature, None if folder is None else folder / FOLDER / f"{temperature:g}")
    scores = {temperature: nll if math.isfinite(nll) else math.inf for temperature, (_, nll) in found.items()}
    best = min(scores, key=lambda temperature: scores[temperature])
    listed = ", ".join(f"{nll:.4f} at {temperature:g}" for temperature, nll in scores.items())
    say(shown, f"Temperature {best:g} has the best held-out NLL ({listed}).")
    if folder is not None:
        _keep(folder, best, scores)
    return found[best][0], best


def chosen_temperature(folder: Path) -> float | None:
    """Return the temperature that a finished search in a folder has chosen, or None."""
    path = folder / FOLDER / CHOICE
    if not path.is_file() or not (folder / RECORD).is_file():
        return None
    try:
        chosen = read_untrusted(path)["temperature"]
        if chosen not in TEMPERATURES:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise FileFormatError(f"{path} is damaged: remove it to choose the temperature again.") from None
    return float(chosen)


def _keep(folder: Path, best: float, scores: dict[float, float]) -> None:
    """Copy the chosen run into the folder, and write all scores."""
    run = folder / FOLDER / f"{best:g}"
    try:
        text = json_text({"temperature": best, "held_out_nll": {f"{one:g}": nll for one, nll in scores.items()}})
        with written_whole(folder / FOLDER / CHOICE) as part:
            part.write_text(text + "\n")
        for name in (CHECKPOINTS, TENSORBOARD):
            if (run / name).is_dir():
                shutil.copytree(run / name, folder / name, dirs_exist_ok=True)
        for name in (MODEL, RECORD):
            with written_whole(folder / name) as part:
                shutil.copyfile(run / name, part)
    except OSError as error:
        raise LeanBayesError(f"Cannot write to {folder} ({reason_of(error)}): choose a writable folder.") from None
