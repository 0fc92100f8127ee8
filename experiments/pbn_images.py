"""PBN on corrupted images, and for segmentation."""

import argparse
import base64
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panels import LabeledImage, from_png, side_by_side
from trained_runs import (
    COSTS,
    NAMES,
    SCORES,
    Results,
    about,
    banded,
    by_name,
    compared,
    in_order,
    lines_figure,
    name_of,
    opened,
    rate_of,
    read_comparison,
)

from leanbayes.cli.evaluations import evaluation_of
from leanbayes.core import config
from leanbayes.errors import LeanBayesError
from leanbayes.report.evaluated_run import in_columns
from leanbayes.report.figure import Series

SHIFTED = (*SCORES, "entropy_right", "entropy_wrong")
MAP = 150  # width of a segmentation map in pixels


def severities(args: argparse.Namespace) -> Results:
    """Average over the corruptions per severity, from files of `leanbayes compare`."""
    records = [read_comparison(path) for path in args.comparisons]
    results = []
    for record in records:
        for run in record["results"]:
            method, levels = config.decode(run["method"]), list(by_severity(run["shifts"]))
            if len(levels) > 1:
                results.append(
                    {
                        "name": name_of(method),
                        "rate": rate_of(method),
                        "seed": run["seed"],
                        "method": run["method"],
                        "scores": {key: run["scores"][key] for key in SHIFTED},
                        "costs": {
                            **in_columns(run["costs"]),
                            "predict_time_ratio": run["costs"]["ratios"]["predict_ms_per_1000"],
                        },
                        "levels": levels,
                    }
                )
    if not results:
        raise LeanBayesError(
            "No run of these comparisons was evaluated on corruptions: compare with --evaluation.shifts corruptions."
        )
    results.sort(key=in_order)
    groups, numbers = by_name(results), [one["severity"] for one in results[0]["levels"]]

    def line(name: str, label: str, score: str) -> Series:
        values = [[one["levels"][n][score] for one in groups[name]] for n in range(len(numbers))]
        return banded(label, numbers, values)

    figures = [
        lines_figure(score, NAMES[score], "severity", [line(name, name, score) for name in groups], percent=percent)
        for score, percent in zip(SCORES, ("y", "", "", ""), strict=True)
    ]
    entropies = [
        lines_figure(of, f"Entropy of {of} answers", "severity", [line(name, name, f"entropy_{of}") for name in groups])
        for of in ("right", "wrong")
    ]
    settings = {key: records[0][key] for key in ("source", "model", "recipe", "evaluation", "machine", "versions")}
    drawings = {
        "severities": side_by_side("Corrupted images, from clean (0) to the worst", figures, 2),
        "entropies": side_by_side("Entropy under corruptions", entropies, 2),
    }
    return Results(settings | {"results": results}, drawings)


def by_severity(shifts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Yield mean scores per severity, 0 for clean images; undefined scores are left out of a mean."""
    levels = [one for one in shifts if one["family"] in ("none", "corruptions")]
    for severity in sorted({one["level"] for one in levels}):
        scores = [one["scores"] for one in levels if one["level"] == severity]
        known = {key: [one[key] for one in scores if one[key] is not None] for key in SHIFTED}
        known = {key: [value for value in values if math.isfinite(value)] for key, values in known.items()}
        yield {"severity": severity, **{key: statistics.fmean(of) if of else math.nan for key, of in known.items()}}


def segmentation(args: argparse.Namespace) -> Results:
    """Compare segmentations: mean IoU, IoU per class, and entropy maps."""
    results, rows = [], []
    for run, data in opened(args):
        if data.task != "segmentation":
            raise LeanBayesError(f"The run in {run.folder} is for {data.task}: give segmentation runs.")
        evaluated = evaluation_of(run, data, None, root=args.root, shown=False)
        found, metrics = evaluated.evaluation, evaluated.metrics()
        (gallery,) = found["galleries"]
        iou = dict(zip(data.classes, found["curves"]["iou"], strict=True))
        results.append(
            about(run)
            | {
                "scores": {key: metrics[key] for key in ("miou", *SCORES, "entropy_right", "entropy_wrong")},
                "costs": {key: metrics[key] for key in COSTS},
                "iou": iou,
                "levels": list(by_severity(found["shifts"])) if found["shifts"] else [],
            }
        )
        if results[-1]["seed"] == results[0]["seed"]:
            rows.append(maps_of(results[-1]["name"], gallery["pictures"][args.image], first=not rows))
    results.sort(key=in_order)
    images = list(itertools.chain.from_iterable(rows))
    sheet = [images[start : start + 4] for start in range(0, len(images), 4)]
    return Results(compared(results), sheets={"segmentation": sheet})


def maps_of(name: str, example: Mapping[str, Any], first: bool) -> list[LabeledImage]:
    """Return the prediction and entropy maps of a method; for the first method, also image and ground truth."""
    maps = []
    for one in example["pngs"]:
        common = one["label"] in ("image", "truth")  # the same for all methods
        if first or not common:
            label = one["label"] if common else f"{name}, {one['label']}"
            maps.append(from_png(label, base64.b64decode(one["data"]), MAP, gray=one["label"] == "entropy"))
    return maps
