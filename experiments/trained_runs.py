"""Trained runs and comparisons: reading and describing them, lines over their seeds, and output files."""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from panels import LabeledImage, sheet
from plotting import draw
from stored import read

import leanbayes as lb
from leanbayes.cli.runs import TrainedRun, method_name, open_run
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.report.figure import Figure, Series

SCORES = ("accuracy", "nll", "brier", "ece")
NAMES = {"accuracy": "Accuracy", "nll": "NLL", "brier": "Brier score", "ece": "ECE", "entropy": "Entropy"}
COSTS = ("kilo_trained", "file_kb", "predict_time_ratio", "train_gflops", "predict_mflops")
OVER_SEEDS = "Mean over the seeds; the band is the range."

# -- reading ----------------------------------------------------------------------------------------------------------


def folders(given: Path) -> list[Path]:
    """Return the folders of the runs in a folder."""
    found = [given] if (given / "run.json").is_file() else sorted(path.parent for path in given.glob("*/run.json"))
    if not found:
        raise LeanBayesError(f"There is no run in {given} (no run.json): check the path.")
    return found


def opened(args: argparse.Namespace) -> Iterator[tuple[TrainedRun, Data]]:
    """Yield the runs in the given folders with their data; each data set is read once."""
    known: dict[str, Data] = {}
    for place in itertools.chain.from_iterable(folders(given) for given in args.runs):
        run = open_run(place, args.device)
        source = json.dumps(run.record["config"]["source"])
        if source not in known:
            known[source] = run.data(args.root)
        print(f"{name_of(run.model.method)}, seed {run.record['config']['recipe']['seed']} ...", flush=True)
        yield run, known[source]


def read_comparison(path: Path) -> dict[str, Any]:
    """Read the compare.json of `leanbayes compare`."""
    try:
        found = read(path)
        if found["recipe"] and all(run["method"]["type"] and run["scores"] for run in found["results"]):
            return found
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise LeanBayesError(f"{path} cannot be read: give a compare.json of leanbayes compare.")


# -- descriptions -----------------------------------------------------------------------------------------------------


def name_of(method: lb.Method) -> str:
    """Name a method by the settings that these experiments vary."""
    if not isinstance(method, lb.PBN):
        return method_name(method)
    return f"PBN {100 * method.rate:g} %" + ("" if most_sensitive(method) else f", {method.sensitivity}")


def most_sensitive(method: lb.PBN) -> bool:
    """Return whether the weights are chosen by the default sensitivity."""
    return method.sensitivity == lb.PBN.sensitivity


def rate_of(method: lb.Method) -> float | None:
    """Return the fraction of Bayesian weights; None for methods without such a fraction."""
    if isinstance(method, lb.PBN):
        return method.rate
    return {lb.Deterministic: 0.0, lb.MeanField: 1.0}.get(type(method))


def about(run: TrainedRun) -> dict[str, Any]:
    """Describe a run: name, rate, seed, method, network, recipe and data."""
    settings = run.record["config"]
    return {
        "name": name_of(run.model.method),
        "rate": rate_of(run.model.method),
        "seed": settings["recipe"]["seed"],
        **{key: settings[key] for key in ("method", "model", "recipe")},
        "source": {**settings["source"], "name": Path(settings["source"]["name"]).name},
    }


def compared(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the common settings of all runs, and the runs without them."""
    if not results:
        raise LeanBayesError("None of these runs fits this experiment: give others.")
    common = {key: results[0][key] for key in ("source", "model")}
    if any(one[key] != value for one in results for key, value in common.items()):
        raise LeanBayesError("The runs differ in data set or network: give runs of one task.")
    recipe = {key: value for key, value in results[0]["recipe"].items() if key != "seed"}
    for one in results:
        for key in ("source", "model", "recipe"):
            del one[key]
    return {**common, "recipe": recipe, "results": list(results)}


def task_of(values: Mapping[str, Any]) -> str:
    """Name the network and the data."""
    return f"{values['model']['name']} on {values['source']['name']}"


def by_name(results: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group runs by the name of their method."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(result["name"], []).append(result)
    return found


def in_order(result: Mapping[str, Any]) -> tuple[bool, float, str]:
    """Return a sort key: methods without a rate, then by rate, then other sensitivities."""
    rate = result["rate"]
    return "," in result["name"], -1.0 if rate is None else rate, f"{result['name']} {result['seed']}"


# -- lines ------------------------------------------------------------------------------------------------------------


def lines_figure(key: str, y: str, x: str, series: Iterable[Series], caption: str = OVER_SEEDS, **more: Any) -> Figure:
    """Return a line figure whose title is the label of its y axis."""
    return Figure(key, y, "lines", x, y, caption, tuple(series), **more)


def banded(name: str, x: Sequence[float], values: Sequence[Sequence[float]]) -> Series:
    """Return a line of means with a band from minimum to maximum."""
    band = (tuple(map(min, values)), tuple(map(max, values))) if max(map(len, values)) > 1 else ((), ())
    return Series(name, tuple(x), tuple(map(statistics.fmean, values)), *band)


# -- output -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Results:
    """The results of an experiment: values for the JSON file, and SVG files and image grids by file name."""

    values: dict[str, Any]
    drawings: dict[str, str] = dataclasses.field(default_factory=dict)
    sheets: dict[str, list[list[LabeledImage]]] = dataclasses.field(default_factory=dict)

    def draw(self, folder: Path) -> None:
        """Write all figures to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.drawings.items():
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")
        for name, rows in self.sheets.items():
            sheet(rows, folder / f"{name}.png")


def save(figures: Iterable[Figure], folder: Path) -> None:
    """Write figures as SVG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        (folder / f"{figure.key}.svg").write_text(draw(figure), encoding="utf-8")
