"""The figures that every method has, from what `assess` found in each of its runs.

Where a method was trained with several seeds, a line is the mean over them, and its band reaches from the least to the
most; bins of reliability and of entropy are added up.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from leanbayes.evaluation.curves import LEVELS
from leanbayes.figures import Figure, Series
from leanbayes.report.runs import AssessedRun

Runs = Sequence[AssessedRun]
_GRID = np.linspace(0.01, 1, 100)  # of the coverage
_CLASSES, _FEWEST = 5, 5  # drawn at most, and examples of a bin to be drawn
_FLOOR = 1e-12


def calibration(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    """Draw reliability diagrams, and how often each confidence occurs; for regressions the coverage of intervals."""
    if "intervals" in runs[0].assessment["curves"]:
        return [_intervals(runs)]
    bins = _added(runs, "reliability")
    if bins is None:
        return []
    return [_reliability(bins), _confidences(bins), *_class_reliability(runs, classes)]


def _reliability(bins: Any) -> Figure:
    return Figure(
        key="reliability",
        title="Reliability",
        kind="lines",
        x="confidence",
        y="accuracy",
        caption="How often answers of a given confidence are right. On the diagonal confidence can be taken at its "
        "word; below it the model is too sure, above it too modest.",
        series=(_bins_as_line("", bins),),
        percent="xy",
        diagonal=True,
    )


def _bins_as_line(name: str, bins: Any, fewest: int = 1) -> Series:
    confidence, right, count = bins[:, bins[2] >= fewest]
    labels = tuple(f"{int(number):,} examples" for number in count)
    return Series(name, tuple(confidence / count), tuple(right / count), labels=labels)


def _confidences(bins: Any) -> Figure:
    edges = np.linspace(0, 1, bins.shape[1] + 1)
    names = tuple(f"{low:.0%}–{high:.0%}" for low, high in pairwise(edges))
    return Figure(
        key="confidences",
        title="Confidence of the answers",
        kind="bars",
        x="confidence",
        y="share of the test examples",
        caption="How sure the answers are. The calibration error weighs each bin of the diagram above by this share.",
        series=(Series("", names, tuple(bins[2] / bins[2].sum())),),
        percent="y",
    )


def _class_reliability(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    bins = _added(runs, "class_reliability")
    if bins is None:
        return []
    gaps = np.abs(bins[:, 0] - bins[:, 1]).sum(1)
    drawn = sorted(np.argsort(-gaps, kind="stable")[:_CLASSES])
    which = "all classes" if len(drawn) == len(bins) else f"the {len(drawn)} classes with the largest gaps"
    return [
        Figure(
            key="class-reliability",
            title="Reliability of each class",
            kind="lines",
            x="predicted probability of the class",
            y="how often it is that class",
            caption="The same for the probability of a class, whether or not it is the answer. Drawn are "
            f"{which}, and bins of at least {_FEWEST} examples.",
            series=tuple(_bins_as_line(_name(classes, number), bins[number], _FEWEST) for number in drawn),
            percent="xy",
            apart=True,
            diagonal=True,
        )
    ]


def _intervals(runs: Runs) -> Figure:
    return Figure(
        key="intervals",
        title="Coverage of intervals",
        kind="lines",
        x="probability that the interval claims",
        y="share of the truths inside",
        caption="On the diagonal intervals hold what they claim; below it the model is too sure, above it too modest.",
        series=(_mean_line("", LEVELS, [run.assessment["curves"]["intervals"] for run in runs]),),
        percent="xy",
        diagonal=True,
    )


def selective(runs: Runs) -> list[Figure]:
    """Draw the risk over the coverage."""
    curves = [run.assessment["curves"].get("risk_coverage") for run in runs]
    if None in curves:
        return []
    lines = [np.interp(_GRID, coverage, risk) for coverage, risk in curves]
    return [
        Figure(
            key="risk-coverage",
            title="Risk over coverage",
            kind="lines",
            x="share of the examples that are answered",
            y="share of these answers that are wrong",
            caption="The model answers what it is most sure of and leaves the rest to a person. A good one makes few "
            "mistakes until it answers nearly everything.",
            series=(_mean_line("", tuple(_GRID), lines),),
            percent="xy",
        )
    ]


def entropies(runs: Runs) -> list[Figure]:
    """Draw how the entropy is distributed for right and wrong answers, and on data of another kind."""
    edges = runs[0].assessment["curves"].get("entropy_edges")
    if edges is None:
        return []
    parts = {name: _added(runs, f"entropy_{name}") for name in ("right", "wrong")}
    for name in runs[0].assessment["ood"]:
        parts[name] = sum(np.asarray(run.assessment["ood"][name]["entropy"], float) for run in runs)
    middles = tuple((np.asarray(edges)[:-1] + np.asarray(edges)[1:]) / 2)
    series = [Series(name, middles, tuple(counts / max(counts.sum(), 1))) for name, counts in parts.items()]
    return [
        Figure(
            key="entropies",
            title="Entropy in and out of the distribution",
            kind="lines",
            x="entropy of the prediction, in nats",
            y="share of the examples",
            caption="A model that knows what it does not know is sure (left) where it is right, and unsure (right) "
            "where it is wrong or sees what it was not trained on.",
            series=tuple(series),
            percent="y",
            apart=True,
        )
    ]


def detection(runs: Runs) -> list[Figure]:
    """Draw how well each measure of doubt tells other data from the test data."""
    found = [run.assessment["ood"] for run in runs]
    if not found[0]:
        return []
    shown = {"max_probability": "1 − confidence", "entropy": "entropy", "mutual_information": "mutual information"}
    series = []
    for measure, name in shown.items():
        values = [[one[kind]["by"][measure]["auroc"] for kind in found[0]] for one in found]
        series.append(_mean_line(name, tuple(found[0]), values))
    return [
        Figure(
            key="detection",
            title="Telling other data from the test data",
            kind="bars",
            x="data of another kind",
            y="AUROC",
            caption="How often an example of another kind looks less sure than a test example, by three measures of "
            "doubt. 50 % is guessing, 100 % is perfect.",
            series=tuple(series),
            percent="y",
            apart=True,
        )
    ]


_SCORES = {  # their names, and whether they are shown in percent
    "accuracy": ("accuracy", "y"),
    "miou": ("mIoU", "y"),
    "rmse": ("RMSE", ""),
    "nll": ("NLL", ""),
    "ece": ("ECE", ""),
    "entropy": ("mean entropy", ""),
    "std": ("mean predicted std", ""),
}
_FAMILIES = {  # the axis, the title, how to read it, and what is drawn
    "corruptions": (
        "severity of the corruption",
        "over the severity of corruptions",
        "Means over all corruptions; severity 0 is the clean test data.",
        "accuracy miou rmse nll ece",
    ),
    "rotation": ("degrees", "over the rotation", "Test images, turned.", "accuracy nll entropy"),
    "noise": (
        "signal to noise, in dB",
        "over the noise",
        "White noise relative to the power of each input: the further left, the more. Doubt should rise with it.",
        "accuracy miou rmse nll entropy std",
    ),
    "labels": (
        "concentration",
        "when classes come in other proportions",
        "The test examples are drawn again, with proportions of the classes from a Dirichlet distribution: the smaller "
        "its concentration, the more a few classes prevail.",
        "accuracy ece",
    ),
}


def shifts(runs: Runs) -> list[Figure]:
    """Draw the scores over the levels of each kind of shift."""
    figures = []
    for family, (x, over, caption, keys) in _FAMILIES.items():
        for key in keys.split():
            lines = [_over_levels(run.assessment["shifts"], family, key) for run in runs]
            if not all(lines):
                continue
            title, percent = _SCORES[key]
            figures.append(
                Figure(
                    key=f"{family}-{key}",
                    title=f"{_capital(title)} {over}",
                    kind="lines",
                    x=x,
                    y=title,
                    caption=caption,
                    series=(_mean_line("", tuple(lines[0]), [list(line.values()) for line in lines]),),
                    percent=percent,
                    log="x" if family == "labels" else "",
                )
            )
    return [*figures, *_by_corruption(runs)]


def _over_levels(found: Sequence[Mapping[str, Any]], family: str, key: str) -> dict[float, float]:
    """Average a score over all shifts of a family at each level; where 0 is a level, it is the unchanged inputs."""
    first = "none" if family in ("corruptions", "rotation") else ""
    levels: dict[float, list[float]] = {}
    if any(one["family"] == family for one in found):
        for one in found:
            if one["family"] in (family, first) and key in one["scores"]:
                levels.setdefault(one["level"], []).append(one["scores"][key])
    return {level: float(np.mean(levels[level])) for level in sorted(levels)}


def _capital(text: str) -> str:
    return text if text.startswith("m") and text[1:2].isupper() else text[0].upper() + text[1:]


def _by_corruption(runs: Runs) -> list[Figure]:
    names = [one["name"] for one in runs[0].assessment["shifts"] if one["family"] == "corruptions"]
    names = list(dict.fromkeys(names))
    key = next((k for k in ("accuracy", "miou") if names and k in runs[0].scores), None)
    if key is None:
        return []
    values = []
    for run in runs:
        of = [[s["scores"][key] for s in run.assessment["shifts"] if s["name"] == name] for name in names]
        values.append([float(np.mean(one)) for one in of])
    title = _SCORES[key][0]
    return [
        Figure(
            key="by-corruption",
            title=f"{_capital(title)} under each corruption",
            kind="bars",
            x="corruption",
            y=title,
            caption="Means over the five severities.",
            series=(_mean_line("", tuple(name.replace("_", " ") for name in names), values),),
            percent="y",
        )
    ]


def segmentation(runs: Runs, classes: Sequence[str]) -> list[Figure]:
    """Draw the IoU of each class."""
    values = [run.assessment["curves"].get("iou") for run in runs]
    if None in values:
        return []
    names = tuple(_name(classes, number) for number in range(len(values[0])))
    there = [number for number in range(len(names)) if not np.isnan([one[number] for one in values]).any()]
    kept = [[one[number] for number in there] for one in values]
    return [
        Figure(
            key="iou",
            title="Intersection over union of each class",
            kind="bars",
            x="class",
            y="IoU",
            caption="Of the pixels that are this class or are taken for it, the share that are both.",
            series=(_mean_line("", tuple(names[number] for number in there), kept),),
            percent="y",
        )
    ]


def training(runs: Runs) -> list[Figure]:
    """Draw the likelihood of the held-out data over the epochs."""
    lines = []
    for run in runs:
        entries = [e for e in run.record["history"] if "nll" in e.get("validation", {}) and "epoch" in e]
        lines.append({e["epoch"]: e["validation"]["nll"] for e in entries})
    epochs = [epoch for epoch in lines[0] if all(epoch in line for line in lines)]
    if len(epochs) < 2:
        return []
    return [
        Figure(
            key="history",
            title="Held-out NLL while training",
            kind="lines",
            x="epoch",
            y="NLL of one draw",
            caption="On the part of the training data that is held out, with one draw of the weights an epoch.",
            series=(_mean_line("", tuple(map(float, epochs)), [[line[e] for e in epochs] for line in lines]),),
            log="y" if all(line[e] > _FLOOR for line in lines for e in epochs) else "",
        )
    ]


def of_method(runs: Runs) -> list[Figure]:
    """Take what the method itself draws: points of all seeds, and other figures of the first."""
    figures = {f["key"]: Figure.from_json(f) for f in runs[0].assessment["figures"]}
    for run in runs[1:]:
        for found in map(Figure.from_json, run.assessment["figures"]):
            known = figures.get(found.key)
            if known is not None and found.kind == "points" and len(found.series[0].x) == 1:
                figures[found.key] = _with_points(known, found)
    return list(figures.values())


def _with_points(known: Figure, found: Figure) -> Figure:
    merged = []
    more = {series.name: series for series in found.series}
    for series in known.series:
        other = more.get(series.name)
        x, y = (other.x, other.y) if other else ((), ())
        merged.append(Series(series.name, (*series.x, *x), (*series.y, *y)))
    return Figure.from_json({**known.to_json(), "series": [vars(series) for series in merged]})


def _added(runs: Runs, name: str) -> Any:
    parts = [run.assessment["curves"].get(name) for run in runs]
    return None if None in parts else np.sum([np.asarray(part, float) for part in parts], axis=0)


def _mean_line(name: str, x: tuple[Any, ...], lines: Sequence[Sequence[float]]) -> Series:
    """Average over seeds, with a band from the least to the most."""
    values = np.asarray(lines, float)
    band = (tuple(values.min(0)), tuple(values.max(0))) if len(lines) > 1 else ((), ())
    return Series(name, x, tuple(values.mean(0)), *band)


def _name(classes: Sequence[str], number: int) -> str:
    return classes[number] if classes else f"class {number}"
