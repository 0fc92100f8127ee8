"""What runs with several seeds say: a mean with its interval, and which methods can be told apart.

Runs are paired: the i-th number of each method is from the same seed. Intervals and tests are scipy's.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leanbayes.errors import LeanBayesError

LEVEL = 0.95  # of every interval, unless another is asked for


@dataclass(frozen=True)
class Summary:
    """A mean, its interval from `low` to `high`, and the standard deviation of the `count` values."""

    mean: float
    low: float
    high: float
    std: float
    count: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class PairedTest:
    """A mean difference, its interval, and the probability of one as large by chance."""

    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Test:
    """A statistic, and the probability of one as large by chance."""

    statistic: float
    p_value: float


_UNDEFINED = Test(math.nan, math.nan)


def summarise(values: Sequence[float], level: float = LEVEL) -> Summary:
    """Mean ± t·std/√n, Student's interval.

    One value has no interval: low, high and std are nan. With a nan among the values, so is the mean.
    """
    if not 0 < level < 1:
        raise LeanBayesError(f"level={level} must lie between 0 and 1: 0.95 is the usual one.")
    values = tuple(map(float, values))
    count = len(values)
    if not count:
        raise LeanBayesError("There is nothing to summarise: pass at least one value.")
    if count == 1 or not _finite(values):
        return Summary(sum(values) / count, math.nan, math.nan, math.nan, count, values)
    # Exact sums: equal values have a std of 0, and not one of rounding errors.
    mean, std = statistics.mean(values), statistics.stdev(values)
    half = float(_scipy_stats().t.ppf((1 + level) / 2, count - 1)) * std / math.sqrt(count)
    return Summary(mean, mean - half, mean + half, std, count, values)


def paired_test(a: Sequence[float], b: Sequence[float], level: float = LEVEL) -> PairedTest:
    """Two-sided t-test of the mean of a - b over the same seeds, with its interval.

    One pair, or a nan: nan but for what is known. Differences that are all 0 have p = 1. Others that are all alike have
    no spread to judge them by, and p is nan: of scores that come in steps, such as an accuracy, they are no rarity.
    """
    _check_pairs(a, b)
    of = summarise([float(x) - float(y) for x, y in zip(a, b, strict=True)], level)
    if math.isnan(of.std):
        p = math.nan
    elif of.std == 0:
        p = 1.0 if of.mean == 0 else math.nan
    else:
        t = of.mean * math.sqrt(of.count) / of.std
        p = 2 * float(_scipy_stats().t.sf(abs(t), of.count - 1))
    return PairedTest(of.mean, of.low, of.high, p)


def anova(groups: Sequence[Sequence[float]]) -> Test:
    """One-way analysis of variance: F, and the probability of one as large if all groups had one mean.

    nan where it is not defined: all values equal, one value in every group, or a nan. Groups that are constant, but
    not the same, have F = ∞ and p = 0.
    """
    numbers = [tuple(map(float, group)) for group in groups]
    if len(numbers) < 2 or not all(numbers):
        raise LeanBayesError("An analysis of variance compares groups: pass at least two, each with a value.")
    if not all(map(_finite, numbers)) or all(len(group) == 1 for group in numbers):
        return _UNDEFINED
    if all(len(set(group)) == 1 for group in numbers):
        return _UNDEFINED if len(set(numbers[0]).union(*numbers)) == 1 else Test(math.inf, 0.0)
    found = _scipy_stats().f_oneway(*numbers)
    return Test(float(found.statistic), float(found.pvalue))


def spearman(x: Sequence[float], y: Sequence[float]) -> Test:
    """Spearman's rank correlation, and the probability of one as large by chance (by Student's t).

    nan where it is not defined: fewer than three pairs, x or y constant, or a nan.
    """
    _check_pairs(x, y)
    x, y = tuple(map(float, x)), tuple(map(float, y))
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return _UNDEFINED
    found = _scipy_stats().spearmanr(x, y)
    return Test(float(found.statistic), float(found.pvalue))


def winners(values: Mapping[str, Sequence[float]], best: Literal["high", "low"]) -> list[str]:
    """Name the methods that cannot be told from the one with the best mean, itself included, in the given order.

    A method is told from it where the interval of their paired difference leaves 0 out, at 95 % with Holm's
    correction for the number of comparisons (Holm 1979). So a sole winner is better than every other method. One
    seed has no interval and no winner; a method with a nan or an infinity is never one. Of equal means the first is
    the best. That the best was chosen by the same numbers is not corrected for.
    """
    if best not in ("high", "low"):
        raise LeanBayesError(f"best={best!r} must be 'high' or 'low': whether more of the score is better.")
    lengths = {name: len(of) for name, of in values.items()}
    if len(set(lengths.values())) > 1:
        raise LeanBayesError(
            f"Methods are compared seed by seed, and these have {lengths} runs: give all the same seeds."
        )
    means = {name: summarise(of).mean for name, of in values.items() if _finite(of)}
    if not means or set(lengths.values()) == {1}:
        return []
    first = max(means, key=lambda name: means[name] if best == "high" else -means[name])
    p_values = {name: paired_test(values[first], values[name]).p_value for name in means if name != first}
    worse: set[str] = set()
    for name in sorted(p_values, key=lambda name: (math.isnan(p_values[name]), p_values[name])):
        if not p_values[name] * (len(p_values) - len(worse)) < 1 - LEVEL:  # nor where it is nan
            break
        worse.add(name)
    return [name for name in means if name not in worse]


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _check_pairs(a: Sequence[float], b: Sequence[float]) -> None:
    if len(a) != len(b) or not len(a):
        raise LeanBayesError(f"{len(a)} values and {len(b)} are no pairs: pass one of each for every run.")


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise LeanBayesError("Statistics over seeds need scipy: pip install 'leanbayes[report]'.") from None
    return stats
