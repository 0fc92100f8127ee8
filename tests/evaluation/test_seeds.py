"""Statistics over seeds against scipy and many repetitions; what has no answer gives nan and no warning."""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from training_cases import expect

from leanbayes.evaluation.seeds import anova, paired_test, spearman, summarise, winners

NAN = math.nan
ACCURACY = [0.91, 0.93, 0.92, 0.95, 0.90]
OTHER = [0.90, 0.94, 0.90, 0.92, 0.89]


def all_nan(*values: float) -> bool:
    return all(map(math.isnan, values))


# -- one method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_a_summary_is_that_of_scipy(level: float) -> None:
    found = summarise(ACCURACY, level)
    low, high = stats.t.interval(level, 4, np.mean(ACCURACY), stats.sem(ACCURACY))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.mean == pytest.approx(np.mean(ACCURACY))
    assert found.std == pytest.approx(np.std(ACCURACY, ddof=1))
    assert (found.count, found.values) == (5, tuple(ACCURACY))
    assert summarise(ACCURACY) == summarise(ACCURACY, 0.95)


def test_the_interval_has_the_true_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    found = [summarise(random.normal(3.0, 2.0, 4).tolist(), 0.9) for _ in range(3000)]
    assert np.mean([s.low <= 3 <= s.high for s in found]) == pytest.approx(0.9, abs=0.02)


def test_one_value_has_no_interval() -> None:
    found = summarise([0.5])
    assert (found.mean, found.count, found.values) == (0.5, 1, (0.5,))
    assert all_nan(found.low, found.high, found.std)


def test_equal_values_leave_no_doubt() -> None:
    found = summarise([0.1] * 3)  # whose sum is not 0.3 in binary
    assert (found.mean, found.low, found.high, found.std) == (0.1, 0.1, 0.1, 0)


def test_a_nan_is_not_hidden_in_a_mean() -> None:
    found = summarise([0.5, NAN, 0.6])
    assert all_nan(found.mean, found.low, found.high, found.std)
    assert found.count == 3
    infinite = summarise([0.5, math.inf])
    assert infinite.mean == math.inf
    assert all_nan(infinite.low, infinite.high, infinite.std)


def test_whole_numbers_and_arrays_are_values() -> None:
    assert summarise([1, 2, 3]) == summarise([1.0, 2.0, 3.0]) == summarise(np.array([1, 2, 3]))  # type: ignore[arg-type]
    assert all(type(value) is float for value in summarise([1, 2]).values)


def test_nothing_and_a_level_that_is_none_are_refused() -> None:
    expect(lambda: summarise([]), "at least one value")
    for level in (0.0, 1.0, 95, NAN):
        expect(partial(summarise, ACCURACY, level), f"level={level}")


# -- two methods ------------------------------------------------------------------------------------------------------


def test_a_paired_test_is_that_of_scipy() -> None:
    found = paired_test(ACCURACY, OTHER)
    expected = stats.ttest_rel(ACCURACY, OTHER)
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.difference == pytest.approx(np.mean(ACCURACY) - np.mean(OTHER))
    wide = paired_test(ACCURACY, OTHER, 0.99)
    assert (wide.low, wide.high) == pytest.approx(tuple(expected.confidence_interval(0.99)))


def test_the_pairs_count_and_not_the_spread_of_the_seeds() -> None:
    seeds = [10.0, 20.0, 30.0, 40.0]
    better = [10.5, 20.6, 30.4, 40.5]
    assert paired_test(better, seeds).p_value < 0.002
    assert paired_test(better[::-1], seeds).p_value > 0.9


numbers = st.floats(-100, 100).map(lambda x: round(x, 3))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_the_interval_has_0_where_chance_may_have_been_and_the_sides_may_change(pairs: list) -> None:
    a, b = zip(*pairs, strict=True)
    found, other = paired_test(a, b), paired_test(b, a)
    assert (other.difference, other.low, other.high) == (-found.difference, -found.high, -found.low)
    assert other.p_value == pytest.approx(found.p_value, rel=1e-9, abs=0, nan_ok=True)
    if math.isnan(found.p_value):
        assert found.low == found.high != 0  # all alike
        return
    assert 0 <= found.p_value <= 1
    if abs(found.p_value - 0.05) > 1e-6:
        assert (found.low <= 0 <= found.high) == (found.p_value > 0.05)


def test_differences_that_are_all_alike_have_no_spread_to_judge_by() -> None:
    same = paired_test(ACCURACY, ACCURACY)
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    shifted = paired_test([2.0, 3.0, 5.0], [1.5, 2.5, 4.5])
    assert (shifted.difference, shifted.low, shifted.high) == (0.5, 0.5, 0.5)
    assert math.isnan(shifted.p_value)


def test_one_pair_or_a_nan_is_no_test() -> None:
    one = paired_test([0.5], [0.25])
    assert one.difference == 0.25
    assert all_nan(one.low, one.high, one.p_value)
    bad = paired_test([0.5, NAN], [0.25, 0.5])
    assert all_nan(bad.difference, bad.low, bad.high, bad.p_value)


@pytest.mark.parametrize("call", [paired_test, spearman])
def test_what_is_not_in_pairs_is_refused(call: Callable[[Sequence[float], Sequence[float]], object]) -> None:
    expect(lambda: call([1, 2, 3], [1, 2]), "3 values and 2", "no pairs")
    expect(lambda: call([], []), "no pairs")


# -- several groups, and ranks ----------------------------------------------------------------------------------------


def test_an_analysis_of_variance_is_that_of_scipy() -> None:
    three: list[list[float]] = [[1, 1], [1, 2], [5]]
    for groups in ([ACCURACY, OTHER], [ACCURACY, OTHER[:2], [0.8, 0.85, 0.9]], three):
        found, expected = anova(groups), stats.f_oneway(*groups)
        assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))


def test_an_analysis_of_variance_without_variance() -> None:
    undefined: list[list[list[float]]] = [
        [[1, 1], [1, 1]],
        [[1], [2], [3]],
        [[1, 2], [NAN, 2]],
        [[1, 2], [math.inf, 2]],
    ]
    for groups in undefined:
        found = anova(groups)
        assert all_nan(found.statistic, found.p_value), groups
    apart = anova([[1, 1], [2, 2, 2], [1]])
    assert (apart.statistic, apart.p_value) == (math.inf, 0)
    refused: list[list[list[float]]] = [[], [[1, 2, 3]], [[1, 2], []]]
    for groups in refused:
        expect(partial(anova, groups), "at least two")


def test_a_rank_correlation_is_that_of_scipy() -> None:
    for x, y in ((ACCURACY, OTHER), ([1, 2, 2, 3, 9], [4, 4, 1, 0, 7]), ([1, 2, 3], [9, 8, 8])):
        found, expected = spearman(x, y), stats.spearmanr(x, y)
        assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    for y, sign in (([1, 10, 100, 1000], 1), ([0.5, 0.2, 0.1, -7], -1)):
        found = spearman([1, 2, 3, 4], y)
        assert (found.statistic, found.p_value) == pytest.approx((sign, 0))


def test_ranks_that_do_not_exist_have_no_correlation() -> None:
    for x, y in (
        ([1, 1, 1], [1, 2, 3]),
        ([1, 2, 3], [0.1, 0.1, 0.1]),
        ([1, 2], [3, 4]),
        ([1], [1]),
        ([1, NAN, 2], [1, 2, 3]),
    ):
        found = spearman(x, y)
        assert all_nan(found.statistic, found.p_value), (x, y)
    assert spearman([1, 2, math.inf], [-math.inf, 5, 6]).statistic == pytest.approx(1)


# -- winners ----------------------------------------------------------------------------------------------------------


def runs(random: np.random.Generator, means: Sequence[float], count: int = 8) -> dict[str, list[float]]:
    """Methods with noise that they share, from the seed, and a tenth of their own."""
    seed = random.normal(size=count)
    return {f"m{i}": (mean + seed + 0.1 * random.normal(size=count)).tolist() for i, mean in enumerate(means)}


def test_the_best_wins_alone_where_the_pairs_tell() -> None:
    values = runs(np.random.default_rng(0), [0.0, 1.0, 0.5, -1.0])
    assert winners(values, "high") == ["m1"]
    assert winners(values, "low") == ["m3"]


def test_methods_that_cannot_be_told_apart_win_together_in_the_given_order() -> None:
    values = {"a": [1.0, 2.0, 3.0], "bad": [0.0, 1.0, 2.1], "b": [1.1, 1.9, 3.1], "c": [1.0, 2.0, 3.0]}
    assert winners(values, "high") == ["a", "b", "c"]
    assert winners(values, "low") == ["bad"]


def test_the_rule_is_holms_against_the_best() -> None:
    """By scipy's own adjustment of scipy's own tests."""
    random = np.random.default_rng(1)
    corrected = 0
    for _ in range(60):
        values = runs(random, random.normal(0, 0.1, 5).tolist(), 5)
        best = max(values, key=lambda name: np.mean(values[name]))
        others = [name for name in values if name != best]
        p = np.array([stats.ttest_rel(values[best], values[name]).pvalue for name in others])
        order = np.argsort(p)
        adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
        worse = {others[i] for i, value in zip(order, adjusted, strict=True) if value < 0.05}
        assert winners(values, "high") == [name for name in values if name not in worse]
        corrected += len(worse) != (p < 0.05).sum()
    assert corrected > 5  # the correction matters


def test_equal_methods_are_seldom_told_apart() -> None:
    random = np.random.default_rng(2)
    alone = [len(winners(runs(random, [0.0, 0.0], 6), "high")) == 1 for _ in range(1500)]
    assert np.mean(alone) == pytest.approx(0.05, abs=0.017)


def test_differences_that_are_all_alike_tell_nothing() -> None:
    assert winners({"a": [1.0, 2.0], "b": [1.0, 2.0]}, "high") == ["a", "b"]
    # One test image in each of two seeds is no proof.
    assert winners({"a": [570 / 599, 580 / 599], "b": [569 / 599, 579 / 599]}, "high") == ["a", "b"]
    assert winners({"a": [1.0, 2.0], "b": [1.5, 2.5]}, "high") == ["a", "b"]
    # It does not hide that another is told from the best.
    values = {"a": [1.5, 2.5, 3.5], "b": [2.0, 3.0, 4.0], "c": [0.0, 1.01, 1.99]}
    assert winners(values, "high") == ["a", "b"]


def test_scores_that_come_in_steps_have_no_more_false_winners_than_others() -> None:
    random = np.random.default_rng(0)
    for seeds in (2, 3):
        steps = np.rint(random.normal(550, 1.5, (2000, 2, seeds))) / 599
        told = sum(len(winners({"a": list(a), "b": list(b)}, "high")) == 1 for a, b in steps)
        assert told < 0.07 * len(steps)


def test_one_seed_has_no_winner() -> None:
    assert winners({"a": [1.0], "b": [100.0]}, "high") == []
    assert winners({}, "high") == []


def test_a_method_that_failed_never_wins() -> None:
    for bad in (NAN, math.inf, -math.inf):
        values = {"failed": [bad, 9.0, 9.0], "a": [1.0, 2.0, 3.1], "b": [0.0, 1.0, 2.0]}
        assert winners(values, "high") == ["a"]
        assert winners(values, "low") == ["b"]
    assert winners({"a": [NAN, 1.0], "b": [1.0, NAN]}, "high") == []
    assert winners({"a": [NAN, 1.0], "b": [1.0, 2.0]}, "high") == ["b"]


def test_what_cannot_be_compared_is_refused() -> None:
    expect(lambda: winners({"a": [1, 2, 3], "b": [1, 2]}, "high"), "seed by seed", "'a': 3", "'b': 2")
    expect(lambda: winners({"a": [1, 2]}, "best"), "'high' or 'low'")  # type: ignore[arg-type]


# -- scipy ------------------------------------------------------------------------------------------------------------


def test_without_scipy_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    expect(lambda: summarise(ACCURACY), "pip install 'leanbayes[report]'")
    assert summarise([0.5]).mean == 0.5


def test_the_import_does_not_need_scipy() -> None:
    code = "import sys; sys.modules['scipy'] = None; import leanbayes.evaluation.seeds"
    subprocess.run([sys.executable, "-c", code], check=True)
