"""The rows of the headline table: what `headline.py` has found and comparisons beside it, by their seeds."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssvi_tables import read

import leanbayes as lb
from leanbayes import config

TASK = ("resnet-18", "cifar10")  # that papers and benchmarks are of
COMPARISONS = ("*_methods*.json", "*_sharing_paper*.json", "*_ssvi_long*.json")  # that stand in the table
ONE_PASS = "one pass"  # the way, and how that begins whose factors are fitted to labels
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
        said = self.title.endswith(ONE_PASS)  # by a file that is chosen for it
        way = self.way.removeprefix(ONE_PASS).removeprefix(", ") if said else self.way
        return self.title if way in ("plain", "members", "") else f"{self.title}, {way}"

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
    """Read what `headline.py` has found, and comparisons of all methods."""
    records: list[Row] = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if records:
        paths = sorted(path for pattern in COMPARISONS for path in folder.parent.glob(pattern))
        records += [of_comparison(read(path)) for path in paths]
    files = [row for path in sorted((folder.parent / "sharing").glob("paper*.json")) for row in read(path)["results"]]
    return [with_files(record, files) for record in records]


def with_files(record: Row, files: Iterable[Row]) -> Row:
    """Take the sizes of runs that share weights from their compact files."""
    sizes = {json.dumps([one["method"], one["seed"]]): one["bytes"] for one in files}
    rows = record["results"]
    return {
        **record,
        "results": [
            {**row, "bytes": sizes.get(json.dumps([row["method"], row.get("seed")]), row["bytes"])} for row in rows
        ],
    }


def name_of(method: lb.Method) -> str:
    """Name a method as its paper does, with the setting that matters most."""
    match method:
        case lb.Ensemble():
            return f"Ensemble ({method.members})"
        case lb.MCDropout():
            return "MC dropout"
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
    """Bring a comparison, in which each predicts in one way alone, into the form of `headline.py`."""
    rows = []
    for one in record["results"]:
        method, costs = one["method"], one["costs"]
        corrupted = [level["scores"]["nll"] for level in one["shifts"] if level["family"] == "corruptions"]
        figures = {
            **one["scores"],
            **{f"ood:{data}": found["by"]["entropy"]["auroc"] for data, found in one["ood"].items()},
            "corruptions:nll": statistics.fmean(corrupted) if corrupted else None,
            "kilo_stored": costs["stored"] / 1e3,
            "train_peak_mb": costs["peak_memory_bytes"] / 1e6,
        }
        ways = {"Deterministic": "plain", "Ensemble": "members"}
        about = {
            "name": name_of(config.decode(method)),
            "way": ways.get(method["type"], f"{costs['ours']['samples']} draws"),
            "seed": one["seed"],
            "method": method,
            "recipe": record["recipe"],
            "validation_share": record["source"]["validation_share"],
            "start": record.get("start"),
        }
        rows.append({**about, "bytes": costs["file_bytes"], "ood": one["ood"], "figures": figures})
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
    once: dict[tuple[str, ...], Row] = {}  # one may be in two files
    for row in rows:
        once.setdefault((row["name"], row["way"], *identity(row)), row)
    found: dict[str, dict[str, list[Row]]] = {}
    for row in once.values():
        found.setdefault(row["name"], {}).setdefault(training_of(row), []).append(row)
    groups = []
    for name, trainings in found.items():
        firsts = [of_training[0] for of_training in trainings.values()]
        for of_training in trainings.values():
            title = f"{name}{size_of(of_training[0])}{told_apart(of_training[0], firsts)}"
            for way in dict.fromkeys(row["way"] for row in of_training):
                groups.append(Group(name, way, [row for row in of_training if row["way"] == way], title))
    return sorted(groups, key=place_of)


def told_apart(row: Row, trainings: Sequence[Row]) -> str:
    """Tell a training from others of its method: by its epochs and, where they have as many, by the images it saw.

    Of files, which know no epochs, it is told how many images their factors were fitted on.
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
    """Tell how many Gaussians a training that shares weights goes out from; nothing of others."""
    components = row["method"].get("components")
    return "" if components is None or "file" in row else f" {components}"


def identity(row: Row) -> tuple[str, ...]:
    """Tell a model from all others."""
    return (row["digest"],) if "file" in row else (training_of(row), str(row["seed"]))


def training_of(row: Row) -> str:
    """Tell trainings apart that differ in more than their seeds; files of one name do if other data were held out."""
    if "file" in row:
        return f"{row['held_out_examples']:09}"  # in the order of their numbers
    recipe = {key: value for key, value in row["recipe"].items() if key not in ("seed", "device")}
    start = row["start"] and row["start"]["method"]
    return json.dumps([row["method"], recipe, row["validation_share"], start])


def place_of(group: Group) -> tuple[Any, ...]:
    """Tell where a group stands: by method and training, then plain, draws, and one pass."""
    of_file = "file" in group.rows[0]
    kinds = [number for number, kind in enumerate(ORDER) if group.name.startswith(kind) and not of_file]
    place = (of_file, *(kinds or [len(ORDER)]), group.name, sum(group.epochs), training_of(group.rows[0]))
    draws = int(group.way.split()[0]) if group.way.endswith("draws") else 0
    return *place, group.way.startswith(ONE_PASS), draws, group.way
