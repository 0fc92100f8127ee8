"""One line from the values of several runs, and other helpers that the figures share."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from leanbayes.report.evaluated_run import EvaluatedRun
from leanbayes.report.figure import Series

Runs = Sequence[EvaluatedRun]


def curves(runs: Runs, name: str) -> list[Any] | None:
    """Return a curve of every run, or None if some run lacks it."""
    found = [run.evaluation["curves"].get(name) for run in runs]
    return None if any(one is None for one in found) else found


def added(runs: Runs, name: str) -> Any:
    """Sum the bins of all runs, or return None if some run lacks them."""
    found = curves(runs, name)
    return None if found is None else np.sum(np.asarray(found, float), axis=0)


def mean_line(name: str, x: Iterable[Any], lines: ArrayLike) -> Series:
    """Average lines (seeds, points) over the seeds, with a band from the minimum to the maximum."""
    values = np.asarray(lines, float)
    band = (tuple(values.min(0)), tuple(values.max(0))) if len(values) > 1 else ((), ())
    return Series(name, tuple(x), tuple(values.mean(0)), *band)


def in_all(parts: Sequence[Iterable[Any]]) -> list[Any]:
    """Return the items that all parts have, in the order of the first."""
    others = [set(part) for part in parts[1:]]
    return [one for one in parts[0] if all(one in other for other in others)]


def class_name(classes: Sequence[str], number: int) -> str:
    """Return the name of a class, or its number if the classes have no names."""
    return classes[number] if classes else f"class {number}"
