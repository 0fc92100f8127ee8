"""The rows of the headline table: what `headline.py` has found and baselines beside it, by their seeds."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssvi_tables import read

TASK = ("resnet-18", "cifar10")  # that papers and benchmarks are of
ORDER = ("Deterministic", "Ensemble", "MC dropout", "RigL", "MeanField", "PBN", "VDP++", "SSVI", "2DGBNN")

Row = Mapping[str, Any]


class Group(NamedTuple):
    """The rows of one method and way that differ in their seeds alone; title: its name, and what tells it apart."""

    name: str
    way: str
    rows: Sequence[Row]
    title: str

    @property
    def label(self) -> str:
        """What the table calls it."""
        return self.title if self.way in ("plain", "members") else f"{self.title}, {self.way}"

    @property
    def method(self) -> Row:
        """The settings of the method."""
        return self.rows[0]["method"]

    def values(self, key: str) -> list[float]:
        """Return a figure of every row; none where one of them has it not."""
        found = [row["figures"].get(key) for row in self.rows]
        return [] if None in found else found

    def mean(self, key: str) -> float:
        """Average a figure; nan where it is not known."""
        return statistics.fmean(self.values(key) or [math.nan])

    @property
    def megabytes(self) -> float:
        """The size on disk."""
        return statistics.fmean(row["bytes"] for row in self.rows) / 1e6

    @property
    def epochs(self) -> list[int]:
        """The epochs of the training, after those of the training that it goes out from."""
        return epochs_of(self.rows[0])


def read_all(folder: Path) -> list[Row]:
    """Read what `headline.py` has found, and baselines of a comparison."""
    records: list[Row] = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    compared = [read(path) for path in sorted(folder.parent.glob("*_methods.json"))] if records else []
    names = {row["name"] for record in records for row in record["results"]}
    return records + [of_baselines(record, names) for record in compared]


def of_baselines(record: Row, known: Iterable[str]) -> Row:
    """Bring those of a comparison, which predict in one way alone, into the form of `headline.py`."""
    rows = []
    for one in record["results"]:
        method, costs = one["method"], one["costs"]
        names = {"MCDropout": "MC dropout", "Ensemble": f"Ensemble ({method.get('members')})"}
        name = names.get(method["type"])
        if name is None or name in known:
            continue
        corrupted = [level["scores"]["nll"] for level in one["shifts"] if level["family"] == "corruptions"]
        figures = {
            **one["scores"],
            **{f"ood:{data}": found["by"]["entropy"]["auroc"] for data, found in one["ood"].items()},
            "corruptions:nll": statistics.fmean(corrupted) if corrupted else None,
            "kilo_stored": costs["stored"] / 1e3,
            "train_peak_mb": costs["peak_memory_bytes"] / 1e6,
        }
        way = "members" if method["type"] == "Ensemble" else f"{costs['ours']['samples']} draws"
        about = {
            "name": name,
            "way": way,
            "seed": one["seed"],
            "method": method,
            "recipe": record["recipe"],
            "validation_share": record["source"]["validation_share"],
            "start": None,
        }
        rows.append(
            {**about, "digest": str(one["seed"]), "bytes": costs["file_bytes"], "ood": one["ood"], "figures": figures}
        )
    return {**record, "examples": record["results"][0]["scores"]["examples"], "results": rows}


def all_groups(folder: Path) -> list[Group]:
    """Bring together all that is known of the task that papers and benchmarks are of."""
    return grouped(row for record in read_all(folder) if task_of(record) == TASK for row in record["results"])


def task_of(record: Row) -> tuple[str, str]:
    """Name the network and the data."""
    return record["model"]["name"], record["source"]["name"]


def epochs_of(row: Row) -> list[int]:
    """Return the epochs of a training, after those of the one that it goes out from; none are known of a file."""
    recipes = ((row.get("start") or {}).get("recipe"), row.get("recipe"))
    return [recipe["epochs"] for recipe in recipes if recipe]


def grouped(rows: Iterable[Row]) -> list[Group]:
    """Bring the seeds of each training and way together, in the order of the table; files come last."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in {(row["name"], row["digest"], row["way"]): row for row in rows}.values():  # one may be in two files
        found.setdefault(row["name"], {}).setdefault(training_of(row), []).append(row)
    groups = []
    for name, trainings in found.items():
        for of_training in trainings.values():
            epochs = " + ".join(map(str, epochs_of(of_training[0])))
            title = f"{name} ({epochs} epochs)" if len(trainings) > 1 and epochs else name
            for way in dict.fromkeys(row["way"] for row in of_training):
                groups.append(Group(name, way, [row for row in of_training if row["way"] == way], title))
    return sorted(groups, key=place_of)


def training_of(row: Row) -> str:
    """Tell trainings apart that differ in more than their seeds; files of one name are taken to be of one."""
    if "file" in row:
        return ""
    recipe = {key: value for key, value in row["recipe"].items() if key not in ("seed", "device")}
    start = row["start"] and row["start"]["method"]
    return json.dumps([row["method"], recipe, row["validation_share"], start])


def place_of(group: Group) -> tuple[Any, ...]:
    """Tell where a group stands: by method and training, then plain, draws, and one pass."""
    of_file = "file" in group.rows[0]
    kinds = [number for number, kind in enumerate(ORDER) if group.name.startswith(kind) and not of_file]
    place = (of_file, *(kinds or [len(ORDER)]), group.name, sum(group.epochs), training_of(group.rows[0]))
    draws = int(group.way.split()[0]) if group.way.endswith("draws") else 0
    return *place, group.way == "one pass", draws, group.way == "temperature"
