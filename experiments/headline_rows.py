"""The rows of the headline table: results of `headline.py` and of comparisons, grouped over seeds."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine_rows import engines_record
from stored import read

import leanbayes as lb
from leanbayes.core import config

TASK = ("resnet-18", "cifar10")  # of the papers and benchmarks
COMPARISONS = ("*_methods*.json", "*_sharing_paper*.json", "*_ssvi_long*.json")  # included in the table
ONE_PASS = "one pass"  # prediction mode; with factors fitted to labels the mode starts with it
ORDER = ("Deterministic", "SWA", "Ensemble", "MC dropout", "cSG-MCMC", "Laplace", "Std search", "VBLL", "RigL",
         "MeanField", "PBN", "VDP++", "SSVI", "2DGBNN")  # fmt: skip

Row = Mapping[str, Any]


class Group(NamedTuple):
    """Rows of one method and prediction mode that differ only in the seed; the title says how they were trained."""

    name: str
    way: str
    rows: Sequence[Row]
    title: str

    @property
    def label(self) -> str:
        """The label in the table."""
        in_title = self.title.endswith(ONE_PASS)  # a file that was chosen for one pass
        way = self.way.removeprefix(ONE_PASS).removeprefix(", ") if in_title else self.way
        return self.title if way in ("plain", "members", "") else f"{self.title}, {way}"

    @property
    def method(self) -> Row:
        """The settings of the method."""
        return self.rows[0]["method"]

    def values(self, key: str) -> list[float]:
        """Return a metric of the rows that have it."""
        found = [row["metrics"].get(key) for row in self.rows]
        return [value for value in found if value is not None]

    def mean(self, key: str) -> float:
        """Return the mean of a metric; nan if it is unknown."""
        return statistics.fmean(self.values(key) or [math.nan])

    @property
    def megabytes(self) -> float:
        """The mean size on disk."""
        return statistics.fmean(row["bytes"] for row in self.rows) / 1e6

    @property
    def epochs(self) -> list[int]:
        """The epochs of the starting run, if any, and of this training."""
        return epochs_of(self.rows[0])


def read_all(folder: Path) -> list[Row]:
    """Read the results of `headline.py` and the comparisons."""
    records: list[Row] = [read(path) for path in sorted(folder.glob("*.json"))]
    if records:
        paths = sorted(path for pattern in COMPARISONS for path in folder.parent.glob(pattern))
        records += [of_comparison(read(path)) for path in paths]
        records += filter(None, [engines_record(folder.parent, TASK)])
    files = [row for path in sorted((folder.parent / "sharing").glob("paper*.json")) for row in read(path)["results"]]
    return [with_files(record, files) for record in records]


def with_files(record: Row, files: Iterable[Row]) -> Row:
    """Replace the sizes of runs with shared weights by those of their compact files."""
    sizes = {json.dumps([one["method"], one["seed"]]): one["bytes"] for one in files}
    rows = record["results"]
    return {
        **record,
        "results": [
            {**row, "bytes": sizes.get(json.dumps([row["method"], row.get("seed")]), row["bytes"])} for row in rows
        ],
    }


def name_of(method: lb.Method) -> str:
    """Name a method as in its paper, with its most important setting."""
    match method:
        case lb.Ensemble():
            return f"Ensemble ({method.members})"
        case lb.MCDropout():
            return "MC dropout"
        case lb.CyclicalSGMCMC():
            return f"cSG-MCMC ({method.members})"
        case lb.StdSearch():
            return "Std search"
        case lb.Laplace():
            parts = (method.over != "all" and ", last layer", method.rate < 1 and f" {100 * method.rate:g} %")
            return f"Laplace{''.join(part or '' for part in parts)}{', full' if method.covariance == 'full' else ''}"
        case lb.PBN():
            return f"PBN {100 * method.rate:g} %"
        case lb.VDP():
            return "VDP++"
        case lb.SSVI() | lb.RigL():
            return f"{type(method).__name__} {100 * (1 - method.density):g} %"
        case lb.WeightSharing():
            return "2DGBNN"
    return type(method).__name__


def of_comparison(record: Row) -> Row:
    """Convert a comparison, where each run has one prediction mode, to the format of `headline.py`."""
    rows = []
    for one in record["results"]:
        method, costs = one["method"], one["costs"]
        corrupted = [level["scores"]["nll"] for level in one["shifts"] if level["family"] == "corruptions"]
        metrics = {
            **one["scores"],
            **{f"ood:{data}": found["by"]["entropy"]["auroc"] for data, found in one["ood"].items()},
            "corruptions:nll": statistics.fmean(corrupted) if corrupted else None,
            "kilo_stored": costs["stored"] / 1e3,
            "train_peak_mb": costs["peak_memory_bytes"] / 1e6,
        }
        ways = {"Deterministic": "plain", "Ensemble": "members"}
        about = {
            "name": name_of(config.decode(method)),
            "way": ways.get(method["type"], f"{costs['ours']['samples']} samples"),
            "seed": one["seed"],
            "method": method,
            "recipe": record["recipe"],
            "validation_share": record["source"]["validation_share"],
            "start": record.get("start"),
        }
        rows.append({**about, "bytes": costs["file_bytes"], "ood": one["ood"], "metrics": metrics})
    return {**record, "examples": record["results"][0]["scores"]["examples"], "results": rows}


def all_groups(folder: Path) -> list[Group]:
    """Return all groups of the task of the papers and benchmarks."""
    return grouped(row for record in read_all(folder) if task_of(record) == TASK for row in record["results"])


def task_of(record: Row) -> tuple[str, str]:
    """Name the network and the data."""
    return record["model"]["name"], record["source"]["name"]


def epochs_of(row: Row) -> list[int]:
    """Return the epochs of the starting run, if any, and of the training; an empty list for a file."""
    recipes = ((row.get("start") or {}).get("recipe"), row.get("recipe"))
    return [recipe["epochs"] for recipe in recipes if recipe]


def grouped(rows: Iterable[Row]) -> list[Group]:
    """Group rows over seeds by training and prediction mode, in the order of the table; files come last."""
    once: dict[tuple[str, ...], Row] = {}  # a row may be in two files
    for row in rows:
        once.setdefault((row["name"], row["way"], *identity(row)), row)
    found: dict[str, dict[str, list[Row]]] = {}
    for row in once.values():
        found.setdefault(row["name"], {}).setdefault(training_of(row), []).append(row)
    groups = []
    for name, trainings in found.items():
        firsts = [of_training[0] for of_training in trainings.values()]
        for of_training in trainings.values():
            title = f"{name}{size_of(of_training[0])}{difference(of_training[0], firsts)}"
            for way in dict.fromkeys(row["way"] for row in of_training):
                groups.append(Group(name, way, [row for row in of_training if row["way"] == way], title))
    return sorted(groups, key=place_of)


def difference(row: Row, trainings: Sequence[Row]) -> str:
    """Say how a training differs from others of its method: by epochs, then by the fraction of training images.

    Files do not store their epochs; they differ in the number of images that their factors were fitted on.
    """
    if len(trainings) == 1:
        return ""
    if "file" in row:
        return f" ({row['held_out_examples']} held out)"
    epochs = " + ".join(map(str, epochs_of(row)))
    alike = [one for one in trainings if (size_of(one), epochs_of(one)) == (size_of(row), epochs_of(row))]
    shares = {one["validation_share"] for one in alike}
    images = f" on {1 - row['validation_share']:.0%}" if len(shares) > 1 else ""
    return f" ({epochs} epochs{images})"


def size_of(row: Row) -> str:
    """Return the initial number of Gaussians for weight sharing; otherwise an empty string."""
    components = row["method"].get("components")
    return "" if components is None or "file" in row else f" {components}"


def identity(row: Row) -> tuple[str, ...]:
    """Return a key that is unique per model."""
    return (row["digest"],) if "file" in row else (training_of(row), str(row["seed"]))


def training_of(row: Row) -> str:
    """Return a key of everything except the seed; for files, the number of held-out images."""
    if "file" in row:
        return f"{row['held_out_examples']:09}"  # padded, so that keys sort as numbers
    recipe = {key: value for key, value in row["recipe"].items() if key not in ("seed", "device")}
    start = row["start"] and row["start"]["method"]
    return json.dumps([row["method"], recipe, row["validation_share"], start])


def place_of(group: Group) -> tuple[Any, ...]:
    """Return the sort key of a group: method and training, then plain, samples, and one pass."""
    of_file = "file" in group.rows[0]
    kinds = [number for number, kind in enumerate(ORDER) if group.name.startswith(kind) and not of_file]
    place = (of_file, *(kinds or [len(ORDER)]), group.name, sum(group.epochs), training_of(group.rows[0]))
    samples = int(group.way.split()[0]) if "samples" in group.way else 0
    return *place, group.way.startswith(ONE_PASS), samples, group.way
