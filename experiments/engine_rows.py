"""Rows of the headline table from the results of `engines.py`: what IVON trains, at temperature 1."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stored import read

import leanbayes as lb
from leanbayes.core import config

Row = Mapping[str, Any]

METHODS = {
    "ivon": ("MeanField by ivon", lambda settings: lb.MeanField(engine="ivon")),
    "ssvi-ivon": ("SSVI 95 % by ivon", lambda settings: lb.SSVI(settings["density"], engine="ivon")),
    "pbn-ivon": ("PBN 5 % by ivon", lambda settings: lb.PBN(settings["density"], engine="ivon")),
}
# Models that were saved, and the results of `one_pass_quality.py` on them, which have the AUROC of samples.
DETECTION = {"cifar10-ivon-3": "cifar10_ivon", "cifar10-ssvi-ivon-2": "cifar10_ssvi_ivon"}
IMAGES = 50_000


def engines_record(results: Path, task: tuple[str, str]) -> Row | None:
    """Return the trainings of a network and data set with default settings as one record of `headline.py`."""
    records = {path.stem: read(path) for path in sorted((results / "engines").glob("*.json"))}
    chosen = {stem: record for stem, record in records.items() if is_default(record, task)}
    if not chosen:
        return None
    # The first results lack the sizes of the posterior and of its file, which are the same for all seeds.
    sizes: dict[str, dict[str, int]] = {}
    for record in records.values():
        if "row" in record and task_of(record) == task:
            found = {key: record["costs"][key] for key in ("file_bytes", "stored_numbers") if key in record["costs"]}
            sizes.setdefault(record["row"], {}).update(found)
    first = next(iter(chosen.values()))
    return {
        "command": "experiments/engines.py, one file per row and seed",
        "model": {"name": task[0]},
        "source": {"name": task[1]},
        "machine": first["machine"],
        "versions": first["versions"],
        "results": [
            row for stem, record in chosen.items() for row in rows_of(results, stem, record, sizes[record["row"]])
        ],
    }


def task_of(record: Row) -> tuple[str, str]:
    """Name the network and the data of a result of `engines.py`."""
    return record["settings"]["model"], record["settings"]["data"]


def is_default(record: Row, task: tuple[str, str]) -> bool:
    """Whether a result is of a method of the table, of this task, and with default settings."""
    if record.get("row") not in METHODS or task_of(record) != task:
        return False
    settings = record["settings"]
    return (settings["temperature"], settings["hess_init"], settings["pretrain"]) == (1.0, 0.5, 0.5)


def rows_of(results: Path, stem: str, record: Row, sizes: Mapping[str, int]) -> Iterator[Row]:
    """Convert one training to the format of `headline.py`."""
    settings, scores = record["settings"], record["scores"]["refreshed"]
    name, make = METHODS[record["row"]]
    ood = detection(results, DETECTION.get(stem), settings["samples"])
    more = {"kilo_stored": sizes["stored_numbers"] / 1e3} if "stored_numbers" in sizes else {}
    about = {
        "name": name,
        "seed": settings["seed"],
        "method": config.encode(make(settings)),
        "recipe": {"epochs": settings["epochs"], "temperature": settings["temperature"]},
        "validation_share": 1 - settings["num_data"] / IMAGES,
        "start": None,
        "ood": ood,
        "bytes": sizes.get("file_bytes", math.nan),
    }
    of_samples = {f"ood:{data}": found["auroc"] for data, found in ood.items()} | more
    yield {**about, "way": f"{settings['samples']} samples", "metrics": {**scores["test"], **of_samples}}
    if not settings["all_images"]:  # which leaves no images to fit a temperature on
        found = dict(scores["test_with_temperature"])
        temperature = found.pop("temperature")
        way = f"{settings['samples']} samples, temperature"
        yield {**about, "ood": {}, "way": way, "temperature": temperature, "metrics": {**found, **more}}


def detection(results: Path, name: str | None, samples: int) -> dict[str, Row]:
    """Return the AUROC of the entropy of samples, by data set, if the model of a training was saved."""
    if name is None:
        return {}
    found = read(results / "one_pass" / f"{name}.json")["predictors"][f"{samples} samples"]["auroc"]
    return {data: {"auroc": scores["entropy"]} for data, scores in found.items()}
