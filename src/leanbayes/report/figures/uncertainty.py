"""Figures of the uses of uncertainty: selective prediction and out-of-distribution (OOD) detection."""

from collections.abc import Sequence

import numpy as np

from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.seed_lines import Runs, added, curves, in_all, mean_line

_GRID = np.linspace(0.01, 1, 100)  # of the coverage
_MEASURES = {"max_probability": "1 − confidence", "entropy": "entropy", "mutual_information": "mutual information"}


def selective(runs: Runs) -> list[Figure]:
    """Plot the risk over the coverage."""
    found = curves(runs, "risk_coverage")
    if found is None:
        return []
    line = mean_line("", _GRID, [np.interp(_GRID, coverage, risk) for coverage, risk in found])
    half = line.y[len(line.y) // 2 - 1]
    return [
        Figure(
            key="risk-coverage",
            title="Risk over coverage",
            kind="lines",
            x="coverage: share of the examples that are predicted",
            y="risk: share of these predictions that are wrong",
            caption="The model predicts the examples it is most certain of and leaves the rest to a person. A good "
            "model makes few mistakes until the coverage is nearly 100 %.",
            series=(line,),
            percent="xy",
            warning="Abstaining does not help: the more certain half of its answers is wrong as often as all."
            if 0 < line.y[-1] <= half
            else "",
        )
    ]


def entropies(runs: Runs) -> list[Figure]:
    """Plot the distribution of the entropy for correct and wrong predictions and for OOD data."""
    edges = curves(runs, "entropy_edges")
    if edges is None:
        return []
    parts = {"correct": added(runs, "entropy_right"), "wrong": added(runs, "entropy_wrong")}
    for name in in_all([run.evaluation["ood"] for run in runs]):
        parts[name] = np.sum([run.evaluation["ood"][name]["entropy"] for run in runs], axis=0)
    middles = tuple((np.asarray(edges[0][:-1]) + np.asarray(edges[0][1:])) / 2)
    return [
        Figure(
            key="entropies",
            title="Entropy in and out of distribution",
            kind="lines",
            x="entropy of the prediction, in nats",
            y="share of the examples",
            caption="Entropy should be low (left) for correct predictions, and high (right) for wrong predictions and "
            "for OOD data.",
            series=tuple(
                Series(name, middles, tuple(counts / counts.sum())) for name, counts in parts.items() if counts.any()
            ),
            percent="y",
            apart=True,
        )
    ]


def ood_detection(runs: Runs) -> list[Figure]:
    """Plot how well each measure of uncertainty separates OOD data from the test data."""
    found = [run.evaluation["ood"] for run in runs]
    names = in_all(found)
    if not names:
        return []
    lines = tuple(
        mean_line(title, names, values)
        for measure, title in _MEASURES.items()
        if not _is_constant(values := [[one[name]["by"][measure]["auroc"] for name in names] for one in found])
    )
    return [
        Figure(
            key="detection",
            title="Detection of OOD data",
            kind="bars",
            x="OOD data set",
            y="AUROC",
            caption="The probability that an OOD example is more uncertain than a test example, for three measures of "
            "uncertainty. 50 % is chance, 100 % is perfect.",
            series=lines,
            warning=_unnoticed(lines),
            percent="y",
            apart=True,
        )
    ]


def _unnoticed(lines: Sequence[Series]) -> str:
    """Name the OOD data that are less uncertain than the test data by every measure."""
    best = {str(name): max(line.y[place] for line in lines) for place, name in enumerate(lines[0].x)} if lines else {}
    unnoticed = [f"{name} ({auroc:.0%})" for name, auroc in best.items() if auroc < 0.5]
    return f"Worse than chance, whatever the measure: {', '.join(unnoticed)}." if unnoticed else ""


def _is_constant(aurocs: Sequence[Sequence[float]]) -> bool:
    """Whether a measure is the same for all examples, as mutual information is for a single sample."""
    return all(auroc == 0.5 for of_run in aurocs for auroc in of_run)
