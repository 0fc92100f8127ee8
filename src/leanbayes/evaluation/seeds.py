"""Statistics over seeds: means with confidence intervals, and significant differences between methods.

Runs are paired: the i-th value of each method comes from the same seed. Intervals and tests are computed by scipy.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leanbayes.errors import LeanBayesError, missing_package

LEVEL = 0.95  # default confidence level of intervals
_ROUNDING = 1e-12  # relative size of differences that come from floating point: 0.3 - 0.2 is not 0.2 - 0.1


@dataclass(frozen=True)
class Summary:
    """A mean, its confidence interval from `low` to `high`, and the standard deviation of the `count` values."""

    mean: float
    low: float
    high: float
    std: float
    count: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class PairedTest:
    """A mean difference, its confidence interval, and the p-value."""

    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Ranking:
    """Methods compared with the one that has the best mean. Methods in none of the three parts are undecided.

    Attributes:
        best: The method with the best mean; None if no comparison is possible.
        tied: Methods shown to be nearly as good: closer to the best one than to any that is significantly worse.
        worse: Methods that are significantly worse than the best one.
    """

    best: str | None = None
    tied: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()


@dataclass(frozen=True)
class Test:
    """A test statistic and its p-value."""

    statistic: float
    p_value: float


_UNDEFINED = Test(math.nan, math.nan)


def summarize(values: Sequence[float], level: float = LEVEL) -> Summary:
    """Return the mean with Student's confidence interval, mean ± t·std/√n.

    A single value has no interval: low, high and std are nan. If a value is nan, so is the mean.
    """
    if not 0 < level < 1:
        raise LeanBayesError(f"level={level} must be between 0 and 1, such as 0.95.")
    values = tuple(map(float, values))
    count = len(values)
    if not count:
        raise LeanBayesError("There is nothing to summarize: pass at least one value.")
    if count == 1 or not _finite(values):
        return Summary(sum(values) / count, math.nan, math.nan, math.nan, count, values)
    # Exact sums, so that equal values have a std of exactly 0.
    mean, std = statistics.mean(values), statistics.stdev(values)
    half = float(_scipy_stats().t.ppf((1 + level) / 2, count - 1)) * std / math.sqrt(count)
    return Summary(mean, mean - half, mean + half, std, count, values)


def paired_test(a: Sequence[float], b: Sequence[float], level: float = LEVEL, *, counted: bool = False) -> PairedTest:
    """Test whether the mean of a - b over the same seeds differs from 0, by a two-sided t-test.

    With one pair or a nan, all that is undefined is nan. Differences that are all 0 have p = 1. Other differences that
    are all equal, up to rounding, have no variance to test against, and occur by chance for discrete scores, such as
    accuracy, so p is that of the sign test, 2^(1 - n), and the interval is unknown. Only constants that were counted,
    such as bytes, are compared exactly: p = 0 if they differ.
    """
    _check_pairs(a, b)
    of = summarize([float(x) - float(y) for x, y in zip(a, b, strict=True)], level)
    rounding = _ROUNDING * max(abs(float(value)) for value in (*a, *b))
    if math.isnan(of.std):
        p = math.nan
    elif of.std <= rounding and abs(of.mean) <= rounding:
        return PairedTest(of.mean, of.mean, of.mean, 1.0)
    elif of.std <= rounding:
        if counted and len({*a}) == len({*b}) == 1:
            return PairedTest(of.mean, of.mean, of.mean, 0.0)
        return PairedTest(of.mean, math.nan, math.nan, 2.0 ** (1 - of.count))
    else:
        t = of.mean * math.sqrt(of.count) / of.std
        p = 2 * float(_scipy_stats().t.sf(abs(t), of.count - 1))
    return PairedTest(of.mean, of.low, of.high, p)


def anova(groups: Sequence[Sequence[float]]) -> Test:
    """Return F and the p-value of a one-way analysis of variance, which tests whether all groups have the same mean.

    Both are nan if undefined: all values are equal, every group has one value, or a value is nan. Groups that are
    constant but differ have F = ∞ and p = 0.
    """
    numbers = [tuple(map(float, group)) for group in groups]
    if len(numbers) < 2 or not all(numbers):
        raise LeanBayesError("An analysis of variance compares groups: pass at least two nonempty ones.")
    if not all(map(_finite, numbers)) or all(len(group) == 1 for group in numbers):
        return _UNDEFINED
    if all(len(set(group)) == 1 for group in numbers):
        return _UNDEFINED if len(set(numbers[0]).union(*numbers)) == 1 else Test(math.inf, 0.0)
    found = _scipy_stats().f_oneway(*numbers)
    return Test(float(found.statistic), float(found.pvalue))


def spearman(x: Sequence[float], y: Sequence[float]) -> Test:
    """Return Spearman's rank correlation and its p-value (by Student's t).

    Both are nan if undefined: there are fewer than three pairs, x or y is constant, or a value is nan.
    """
    _check_pairs(x, y)
    x, y = tuple(map(float, x)), tuple(map(float, y))
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return _UNDEFINED
    found = _scipy_stats().spearmanr(x, y)
    return Test(float(found.statistic), float(found.pvalue))


def rank(
    values: Mapping[str, Sequence[float]],
    best: Literal["high", "low"],
    margin: float = math.inf,
    *,
    counted: bool = False,
) -> Ranking:
    """Compare all methods with the one that has the best mean, by paired t-tests over seeds.

    A method is significantly worse if its test is significant at 95 %, with Holm's correction for the number of
    comparisons (Holm 1979). A method that is not is tied only if the test has enough power: the 95 % interval of its
    distance from the best one must end below half the distance of the nearest method that is significantly worse, and
    below the margin. Without power, "not significantly worse" would only say that a method is noisy. Of equal means,
    the first is the best. The selection of the best method by the same values is not corrected for.

    Args:
        values: The values of each method, one per seed, in the same order of seeds. Methods with a nan or an infinity
            are left out.
        best: Whether "high" or "low" values are better.
        margin: A distance from the best one at which a method is not nearly as good, whatever the others are.
        counted: Whether the values are counts, whose constants are compared exactly.

    Raises:
        LeanBayesError: If best is invalid, or the methods have different numbers of values.
    """
    values = _oriented(values, best)
    if not values or len(next(iter(values.values()))) == 1:
        return Ranking()
    means = {name: summarize(of).mean for name, of in values.items()}
    first = max(means, key=lambda name: means[name])
    tests = {name: paired_test(values[first], of, counted=counted) for name, of in values.items() if name != first}
    worse = _significant(tests)
    nearest = min((tests[name].difference for name in worse), default=-math.inf)
    tied = tuple(name for name, test in tests.items() if name not in worse and test.high < min(nearest / 2, margin))
    return Ranking(first, tied, tuple(name for name in tests if name in worse))


def winners(values: Mapping[str, Sequence[float]], best: Literal["high", "low"], *, counted: bool = False) -> list[str]:
    """Return the best method and those tied with it by `rank`, in the given order.

    If no method is significantly worse than the best one, there is no winner.
    """
    found = rank(values, best, counted=counted)
    return [name for name in values if found.worse and name in (found.best, *found.tied)]


def better_than(
    reference: str, values: Mapping[str, Sequence[float]], best: Literal["high", "low"], *, counted: bool = False
) -> list[str]:
    """Return the methods that are significantly better than a reference, in the given order.

    They are those whose paired t-test against the reference is significant at 95 %, with Holm's correction for the
    number of other methods. Arguments and errors are those of `rank`.
    """
    values = _oriented(values, best)
    if reference not in values or len(values[reference]) == 1:
        return []
    tests = {
        name: paired_test(of, values[reference], counted=counted) for name, of in values.items() if name != reference
    }
    return [name for name in tests if name in _significant(tests) and tests[name].difference > 0]


def _oriented(values: Mapping[str, Sequence[float]], best: str) -> dict[str, list[float]]:
    """Return the values of methods without nan and infinity, with such signs that high values are better."""
    if best not in ("high", "low"):
        raise LeanBayesError(f"best={best!r} must be 'high' or 'low'.")
    lengths = {name: len(of) for name, of in values.items()}
    if len(set(lengths.values())) > 1:
        raise LeanBayesError(
            f"Methods are compared seed by seed, but have {lengths} runs: train all with the same seeds."
        )
    sign = 1 if best == "high" else -1
    return {name: [sign * float(value) for value in of] for name, of in values.items() if len(of) and _finite(of)}


def _significant(tests: Mapping[str, PairedTest]) -> set[str]:
    """Return the tests that are significant with Holm's correction for their number."""
    found: set[str] = set()
    for name in sorted(tests, key=lambda name: (math.isnan(tests[name].p_value), tests[name].p_value)):
        if not tests[name].p_value * (len(tests) - len(found)) < 1 - LEVEL:  # also stops at nan
            break
        found.add(name)
    return found


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _check_pairs(a: Sequence[float], b: Sequence[float]) -> None:
    if len(a) != len(b) or not len(a):
        raise LeanBayesError(f"{len(a)} values and {len(b)} are not pairs: pass two sequences of the same length.")


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise missing_package("Statistics over seeds need scipy", "report") from None
    return stats
