"""PBN on corrupted images, and its segmentations."""

import argparse
import base64
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from panels import Picture, beside, from_png
from trained import (
    COSTS,
    NAMES,
    SCORES,
    Found,
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

from leanbayes import config
from leanbayes.cli.looking import look_at
from leanbayes.errors import LeanBayesError
from leanbayes.figures import Series
from leanbayes.report.runs import in_columns

SHIFTED = (*SCORES, "entropy_right", "entropy_wrong")
MAP = 150  # pixels of the width of a segmented image


def severities(args: argparse.Namespace) -> Found:
    """Average over the corruptions at each severity, from what `leanbayes compare` has written."""
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
        raise LeanBayesError("No run of these comparisons has seen corrupted images: compare with such shifts.")
    results.sort(key=in_order)
    groups, numbers = by_name(results), [one["severity"] for one in results[0]["levels"]]

    def line(name: str, label: str, score: str) -> Series:
        values = [[one["levels"][n][score] for one in groups[name]] for n in range(len(numbers))]
        return banded(label, numbers, values)

    figures = [
        lines_figure(score, NAMES[score], "severity", [line(name, name, score) for name in groups], percent=percent)
        for score, percent in zip(SCORES, ("y", "", "", ""), strict=True)
    ]
    doubts = [
        lines_figure(of, f"Entropy of {of} answers", "severity", [line(name, name, f"entropy_{of}") for name in groups])
        for of in ("right", "wrong")
    ]
    settings = {key: records[0][key] for key in ("source", "model", "recipe", "look", "machine", "versions")}
    drawings = {
        "severities": beside("Corrupted images, from clean (0) to the worst", figures, 2),
        "entropies": beside("Entropy under corruptions", doubts, 2),
    }
    return Found(settings | {"results": results}, drawings)


def by_severity(shifts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Give the mean scores of each severity, 0 for clean images; a score that is not defined is left out of a mean."""
    there = [one for one in shifts if one["family"] in ("none", "corruptions")]
    for severity in sorted({one["level"] for one in there}):
        scores = [one["scores"] for one in there if one["level"] == severity]
        known = {key: [one[key] for one in scores if one[key] is not None] for key in SHIFTED}
        known = {key: [value for value in values if math.isfinite(value)] for key, values in known.items()}
        yield {"severity": severity, **{key: statistics.fmean(of) if of else math.nan for key, of in known.items()}}


def segmentation(args: argparse.Namespace) -> Found:
    """Compare segmentations: mean IoU, that of each class, and maps of the entropy."""
    results, rows = [], []
    for run, data in opened(args):
        if data.task != "segmentation":
            raise LeanBayesError(f"The run in {run.folder} is for {data.task}: give runs of a segmentation.")
        seen = look_at(run, data, None, root=args.root, shown=False)
        found, figures = seen.assessment, seen.figures()
        (gallery,) = found["galleries"]
        iou = dict(zip(data.classes, found["curves"]["iou"], strict=True))
        results.append(
            about(run)
            | {
                "scores": {key: figures[key] for key in ("miou", *SCORES, "entropy_right", "entropy_wrong")},
                "costs": {key: figures[key] for key in COSTS},
                "iou": iou,
                "levels": list(by_severity(found["shifts"])) if found["shifts"] else [],
            }
        )
        if results[-1]["seed"] == results[0]["seed"]:
            rows.append(maps_of(results[-1]["name"], gallery["pictures"][args.picture], first=not rows))
    results.sort(key=in_order)
    pictures = list(itertools.chain.from_iterable(rows))
    sheet = [pictures[start : start + 4] for start in range(0, len(pictures), 4)]
    return Found(compared(results), sheets={"segmentation": sheet})


def maps_of(name: str, picture: Mapping[str, Any], first: bool) -> list[Picture]:
    """Take the answer and the entropy of a method, and before those of the first the image and the truth."""
    kept = ("image", "truth", "answer", "entropy") if first else ("answer", "entropy")
    return [
        from_png(
            one["label"] if one["label"] in ("image", "truth") else f"{name}, {one['label']}",
            base64.b64decode(one["data"]),
            MAP,
            grey=one["label"] == "entropy",
        )
        for one in picture["pngs"]
        if one["label"] in kept
    ]
