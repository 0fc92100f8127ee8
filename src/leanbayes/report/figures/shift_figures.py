"""Figures of shift: scores over the levels of each kind of shift, and for each corruption."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.seed_lines import Runs, in_all, mean_line

_SCORES = {  # name, and which axis is shown in percent
    "accuracy": ("accuracy", "y"),
    "miou": ("mIoU", "y"),
    "rmse": ("RMSE", ""),
    "nll": ("NLL", ""),
    "ece": ("ECE", ""),
    "entropy": ("mean entropy", ""),
    "std": ("mean predicted std", ""),
}
_FAMILIES = {  # x axis, title, caption, and scores that are plotted
    "corruptions": (
        "severity of the corruption",
        "by severity of the corruption",
        "Mean over all corruptions. Severity 0 means the same examples without corruption.",
        "accuracy miou rmse nll ece",
    ),
    "rotation": ("degrees", "by rotation", "Rotated test images.", "accuracy rmse nll entropy std"),
    "noise": (
        "signal-to-noise ratio, in dB",
        "by noise level",
        "White noise relative to the power of each input; more noise is to the left. Uncertainty should rise with it.",
        "accuracy miou rmse nll entropy std",
    ),
    "labels": (
        "concentration",
        "under label shift",
        "Test examples are resampled with class proportions from a Dirichlet distribution. The smaller its "
        "concentration, the more a few classes dominate.",
        "accuracy ece",
    ),
}
_NOTABLE = 0.02  # relative fall of the uncertainty from which on a figure says so
_Place = tuple[str, float]  # name and level of a shift


def shifts(runs: Runs) -> list[Figure]:
    """Plot the scores over the levels of each kind of shift."""
    figures = []
    for family, (x, over, caption, keys) in _FAMILIES.items():
        for key in keys.split():
            title, percent = _SCORES[key]
            found = _in_all_runs(runs, family, key)
            if found:
                # Level 0 of these two kinds is the unchanged inputs.
                clean = _in_all_runs(runs, "none", key) if family in ("corruptions", "rotation") else {}
                levels = _means(clean | found, lambda place: place[1])
                line = mean_line("", sorted(levels), np.transpose([levels[one] for one in sorted(levels)]))
                figures.append(
                    Figure(
                        key=f"{family}-{key}",
                        title=f"{_capital(title)} {over}",
                        kind="lines",
                        x=x,
                        y=title,
                        caption=caption,
                        series=(line,),
                        percent=percent,
                        log="x" if family == "labels" else "",
                        warning=_falls(line) if family == "noise" and key in ("entropy", "std") else "",
                    )
                )
    return [*figures, *_by_corruption(runs)]


def _falls(line: Series) -> str:
    """Say if the uncertainty is lower under the worst noise, which comes first, than under less, or always the same."""
    highest = int(np.argmax(line.y))
    if max(line.y) - min(line.y) <= 1e-3 * abs(max(line.y)):
        return "The uncertainty does not respond to noise."
    if line.y[0] >= (1 - _NOTABLE) * line.y[highest]:
        return ""
    return (
        f"The uncertainty falls under the worst noise: from {line.y[highest]:.2f} at {line.x[highest]:.0f} dB to "
        f"{line.y[0]:.2f} at {line.x[0]:.0f} dB.".replace("-", "\u2212")
    )


def _in_all_runs(runs: Runs, family: str, key: str) -> dict[_Place, list[float]]:
    """Return a score of every run at each shift of a family that all runs have."""
    own = [
        {(s["name"], s["level"]): s["scores"][key] for s in shifts if s["family"] == family and key in s["scores"]}
        for shifts in (run.evaluation["shifts"] for run in runs)
    ]
    return {place: [one[place] for one in own] for place in in_all(own)}


def _means(found: Mapping[_Place, list[float]], group: Callable[[_Place], Any]) -> dict[Any, Any]:
    """Average over the shifts of each group, separately for each run."""
    groups: dict[Any, list[list[float]]] = {}
    for place, values in found.items():
        groups.setdefault(group(place), []).append(values)
    return {name: np.mean(values, axis=0) for name, values in groups.items()}


def _capital(text: str) -> str:
    return text if text.startswith("m") and text[1:2].isupper() else text[0].upper() + text[1:]


def _by_corruption(runs: Runs) -> list[Figure]:
    """Plot mIoU, accuracy or RMSE, whichever exists first, for each corruption."""
    for key in ("miou", "accuracy", "rmse"):
        found = _means(_in_all_runs(runs, "corruptions", key), lambda place: place[0])
        if found:
            title, percent = _SCORES[key]
            names = [name.replace("_", " ") for name in found]
            return [
                Figure(
                    key="by-corruption",
                    title=f"{_capital(title)} by corruption",
                    kind="bars",
                    x="corruption",
                    y=title,
                    caption="Mean over the five severities.",
                    series=(mean_line("", names, np.transpose(list(found.values()))),),
                    percent=percent,
                )
            ]
    return []
