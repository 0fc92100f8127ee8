"""Figures of what doubt is good for: withholding answers, and telling what was never seen."""

from collections.abc import Sequence

import numpy as np

from leanbayes.figures import Figure, Series
from leanbayes.report.figures.lines import Runs, added, curves, in_all, mean_line

_GRID = np.linspace(0.01, 1, 100)  # of the coverage
_MEASURES = {"max_probability": "1 − confidence", "entropy": "entropy", "mutual_information": "mutual information"}


def selective(runs: Runs) -> list[Figure]:
    """Draw the risk over the coverage."""
    found = curves(runs, "risk_coverage")
    if found is None:
        return []
    return [
        Figure(
            key="risk-coverage",
            title="Risk over coverage",
            kind="lines",
            x="share of the examples that are answered",
            y="share of these answers that are wrong",
            caption="The model answers what it is most sure of and leaves the rest to a person. A good one makes few "
            "mistakes until it answers nearly everything.",
            series=(mean_line("", _GRID, [np.interp(_GRID, coverage, risk) for coverage, risk in found]),),
            percent="xy",
        )
    ]


def entropies(runs: Runs) -> list[Figure]:
    """Draw how the entropy is distributed for right and wrong answers, and on data of another kind."""
    edges = curves(runs, "entropy_edges")
    if edges is None:
        return []
    parts = {name: added(runs, f"entropy_{name}") for name in ("right", "wrong")}
    for name in in_all([run.assessment["ood"] for run in runs]):
        parts[name] = np.sum([run.assessment["ood"][name]["entropy"] for run in runs], axis=0)
    middles = tuple((np.asarray(edges[0][:-1]) + np.asarray(edges[0][1:])) / 2)
    return [
        Figure(
            key="entropies",
            title="Entropy in and out of the distribution",
            kind="lines",
            x="entropy of the prediction, in nats",
            y="share of the examples",
            caption="A model that knows what it does not know is sure (left) where it is right, and unsure (right) "
            "where it is wrong or sees what it was not trained on.",
            series=tuple(
                Series(name, middles, tuple(counts / counts.sum())) for name, counts in parts.items() if counts.any()
            ),
            percent="y",
            apart=True,
        )
    ]


def detection(runs: Runs) -> list[Figure]:
    """Draw how well each measure of doubt tells other data from the test data."""
    found = [run.assessment["ood"] for run in runs]
    kinds = in_all(found)
    if not kinds:
        return []
    return [
        Figure(
            key="detection",
            title="Telling other data from the test data",
            kind="bars",
            x="data of another kind",
            y="AUROC",
            caption="How often an example of another kind looks less sure than a test example, by three measures of "
            "doubt. 50 % is guessing, 100 % is perfect.",
            series=tuple(
                mean_line(name, kinds, values)
                for measure, name in _MEASURES.items()
                if not _says_nothing(values := [[one[kind]["by"][measure]["auroc"] for kind in kinds] for one in found])
            ),
            percent="y",
            apart=True,
        )
    ]


def _says_nothing(aurocs: Sequence[Sequence[float]]) -> bool:
    """Whether a measure is the same for all examples, as mutual information is without draws."""
    return all(auroc == 0.5 for of_run in aurocs for auroc in of_run)
