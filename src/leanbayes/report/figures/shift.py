"""Figures of shift: the scores over the levels of each kind, and under each corruption."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from leanbayes.figures import Figure
from leanbayes.report.figures.lines import Runs, in_all, mean_line

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
        "Means over all corruptions; severity 0 is the same examples, unchanged.",
        "accuracy miou rmse nll ece",
    ),
    "rotation": ("degrees", "over the rotation", "Test images, turned.", "accuracy rmse nll entropy std"),
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
_Place = tuple[str, float]  # name and level of a shift


def shifts(runs: Runs) -> list[Figure]:
    """Draw the scores over the levels of each kind of shift."""
    figures = []
    for family, (x, over, caption, keys) in _FAMILIES.items():
        for key in keys.split():
            title, percent = _SCORES[key]
            found = _in_all_runs(runs, family, key)
            if found:
                # Where 0 is a level, it is the unchanged inputs.
                clean = _in_all_runs(runs, "none", key) if family in ("corruptions", "rotation") else {}
                levels = _means(clean | found, lambda place: place[1])
                figures.append(
                    Figure(
                        key=f"{family}-{key}",
                        title=f"{_capital(title)} {over}",
                        kind="lines",
                        x=x,
                        y=title,
                        caption=caption,
                        series=(mean_line("", sorted(levels), np.transpose([levels[one] for one in sorted(levels)])),),
                        percent=percent,
                        log="x" if family == "labels" else "",
                    )
                )
    return [*figures, *_by_corruption(runs)]


def _in_all_runs(runs: Runs, family: str, key: str) -> dict[_Place, list[float]]:
    """Return a score of every run at each shift of a family that all of them have."""
    own = [
        {(s["name"], s["level"]): s["scores"][key] for s in shifts if s["family"] == family and key in s["scores"]}
        for shifts in (run.assessment["shifts"] for run in runs)
    ]
    return {place: [one[place] for one in own] for place in in_all(own)}


def _means(found: Mapping[_Place, list[float]], group: Callable[[_Place], Any]) -> dict[Any, Any]:
    """Average over the shifts of each group, run by run."""
    groups: dict[Any, list[list[float]]] = {}
    for place, values in found.items():
        groups.setdefault(group(place), []).append(values)
    return {name: np.mean(values, axis=0) for name, values in groups.items()}


def _capital(text: str) -> str:
    return text if text.startswith("m") and text[1:2].isupper() else text[0].upper() + text[1:]


def _by_corruption(runs: Runs) -> list[Figure]:
    """Draw the first of these scores that there is, under each corruption."""
    for key in ("miou", "accuracy", "rmse"):
        found = _means(_in_all_runs(runs, "corruptions", key), lambda place: place[0])
        if found:
            title, percent = _SCORES[key]
            names = [name.replace("_", " ") for name in found]
            return [
                Figure(
                    key="by-corruption",
                    title=f"{_capital(title)} under each corruption",
                    kind="bars",
                    x="corruption",
                    y=title,
                    caption="Means over the five severities.",
                    series=(mean_line("", names, np.transpose(list(found.values()))),),
                    percent=percent,
                )
            ]
    return []
