"""Statistics over seeds agree with scipy and with many repetitions; undefined values are nan without a warning."""

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

from leanbayes.evaluation.seeds import anova, better_than, paired_test, rank, spearman, summarize, winners

NAN = math.nan
ACCURACY = [0.91, 0.93, 0.92, 0.95, 0.90]
OTHER = [0.90, 0.94, 0.90, 0.92, 0.89]


def all_nan(*values: float) -> bool:
    return all(map(math.isnan, values))


# -- one method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_a_summary_is_that_of_scipy(level: float) -> None:
    found = summarize(ACCURACY, level)
    low, high = stats.t.interval(level, 4, np.mean(ACCURACY), stats.sem(ACCURACY))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.mean == pytest.approx(np.mean(ACCURACY))
    assert found.std == pytest.approx(np.std(ACCURACY, ddof=1))
    assert (found.count, found.values) == (5, tuple(ACCURACY))
    assert summarize(ACCURACY) == summarize(ACCURACY, 0.95)


def test_the_interval_contains_the_true_mean_with_its_nominal_probability() -> None:
    random = np.random.default_rng(0)
    found = [summarize(random.normal(3.0, 2.0, 4).tolist(), 0.9) for _ in range(3000)]
    assert np.mean([s.low <= 3 <= s.high for s in found]) == pytest.approx(0.9, abs=0.02)


def test_one_value_has_no_interval() -> None:
    found = summarize([0.5])
    assert (found.mean, found.count, found.values) == (0.5, 1, (0.5,))
    assert all_nan(found.low, found.high, found.std)


def test_equal_values_have_a_std_of_0() -> None:
    found = summarize([0.1] * 3)  # whose sum is not 0.3 in binary
    assert (found.mean, found.low, found.high, found.std) == (0.1, 0.1, 0.1, 0)


def test_a_nan_value_gives_a_nan_mean() -> None:
    found = summarize([0.5, NAN, 0.6])
    assert all_nan(found.mean, found.low, found.high, found.std)
    assert found.count == 3
    infinite = summarize([0.5, math.inf])
    assert infinite.mean == math.inf
    assert all_nan(infinite.low, infinite.high, infinite.std)


def test_integers_and_arrays_are_accepted() -> None:
    assert summarize([1, 2, 3]) == summarize([1.0, 2.0, 3.0]) == summarize(np.array([1, 2, 3]))  # type: ignore[arg-type]
    assert all(type(value) is float for value in summarize([1, 2]).values)


def test_empty_values_and_invalid_levels_raise_errors() -> None:
    expect(lambda: summarize([]), "at least one value")
    for level in (0.0, 1.0, 95, NAN):
        expect(partial(summarize, ACCURACY, level), f"level={level}")


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


def test_only_paired_differences_matter_and_not_the_variance_over_seeds() -> None:
    seeds = [10.0, 20.0, 30.0, 40.0]
    better = [10.5, 20.6, 30.4, 40.5]
    assert paired_test(better, seeds).p_value < 0.002
    assert paired_test(better[::-1], seeds).p_value > 0.9


numbers = st.floats(-100, 100).map(lambda x: round(x, 3))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_the_interval_contains_0_unless_significant_and_is_antisymmetric(pairs: list) -> None:
    a, b = zip(*pairs, strict=True)
    found, other = paired_test(a, b), paired_test(b, a)
    expected = (-found.difference, -found.high, -found.low)
    assert (other.difference, other.low, other.high) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    assert other.p_value == pytest.approx(found.p_value, rel=1e-9, abs=0)
    assert 0 <= found.p_value <= 1
    if math.isnan(found.low):  # all differences are equal
        assert found.p_value == stats.binomtest(len(a), len(a)).pvalue
        return
    if abs(found.p_value - 0.05) > 1e-6:
        assert (found.low <= 0 <= found.high) == (found.p_value > 0.05)


def test_equal_differences_are_decided_without_a_variance() -> None:
    same = paired_test(ACCURACY, ACCURACY)
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    shifted = paired_test([2.0, 3.0, 5.0], [1.5, 2.5, 4.5])
    assert shifted.difference == 0.5
    assert all_nan(shifted.low, shifted.high)
    # Values that vary may differ equally by chance: the sign test of scipy.
    assert shifted.p_value == stats.binomtest(3, 3).pvalue == 0.25
    for count in (2, 5, 9):
        found = paired_test([place / 8 + 0.5 for place in range(count)], [place / 8 for place in range(count)])
        assert found.p_value == pytest.approx(stats.binomtest(count, count).pvalue)
    # Constants are no samples.
    exact = paired_test([68.61] * 3, [1.02] * 3, counted=True)
    assert exact.difference == pytest.approx(67.59)
    assert exact.p_value == 0
    assert exact.low == exact.high == exact.difference


def test_one_pair_or_a_nan_has_no_p_value() -> None:
    one = paired_test([0.5], [0.25])
    assert one.difference == 0.25
    assert all_nan(one.low, one.high, one.p_value)
    bad = paired_test([0.5, NAN], [0.25, 0.5])
    assert all_nan(bad.difference, bad.low, bad.high, bad.p_value)


@pytest.mark.parametrize("call", [paired_test, spearman])
def test_unpaired_values_raise_an_error(call: Callable[[Sequence[float], Sequence[float]], object]) -> None:
    expect(lambda: call([1, 2, 3], [1, 2]), "3 values and 2", "not pairs")
    expect(lambda: call([], []), "not pairs")


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


def test_undefined_rank_correlations_are_nan() -> None:
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
    """Methods with shared noise per seed, and a tenth of separate noise."""
    seed = random.normal(size=count)
    return {f"m{i}": (mean + seed + 0.1 * random.normal(size=count)).tolist() for i, mean in enumerate(means)}


def test_a_significantly_better_method_wins_alone() -> None:
    values = runs(np.random.default_rng(0), [0.0, 1.0, 0.5, -1.0])
    assert winners(values, "high") == ["m1"]
    assert winners(values, "low") == ["m3"]


def test_methods_that_are_shown_to_be_nearly_equal_win_together_in_the_given_order() -> None:
    values = {"a": [1.0, 2.0, 3.0], "bad": [0.0, 1.0, 2.1], "b": [1.1, 1.9, 3.1], "c": [1.0, 2.0, 3.0]}
    assert winners(values, "high") == ["a", "b", "c"]
    assert winners(values, "low") == ["bad"]


def test_a_method_without_power_does_not_win() -> None:
    """641 ms is not significantly worse than 16 ms if it was measured badly, but it is not as good."""
    values = {"plain": [16.0, 15.9, 16.2], "slow": [33.0, 33.1, 32.7], "noisy": [120.0, 1300.0, 503.0]}
    assert stats.ttest_rel(values["plain"], values["noisy"]).pvalue > 0.1
    assert winners(values, "low") == ["plain"]
    assert rank(values, "low").worse == ("slow",)
    values["noisy"] = [16.1, 15.9, 16.3]
    assert winners(values, "low") == ["plain", "noisy"]


def test_constants_are_compared_exactly_beside_methods_that_vary() -> None:
    """Memory traffic is the same for all seeds, but that of a sparse network depends on its mask."""
    values = {"plain": [1.02] * 3, "mc-dropout": [68.61] * 3, "same": [1.02] * 3, "sparse": [1.3, 1.31, 1.29]}
    assert winners(values, "low", counted=True) == ["plain", "same"]
    assert rank(values, "low", counted=True).worse == ("mc-dropout", "sparse")
    assert better_than("mc-dropout", values, "low", counted=True) == ["plain", "same", "sparse"]
    assert better_than("plain", values, "low", counted=True) == []


def test_scores_that_are_equal_for_all_seeds_by_chance_are_not_exact() -> None:
    """Two seeds often have the same accuracy on a hundred examples."""
    values = {"plain": [0.97, 0.97], "other": [0.98, 0.98]}
    assert paired_test(values["other"], values["plain"]).p_value == stats.binomtest(2, 2).pvalue == 0.5
    assert winners(values, "high") == better_than("plain", values, "high") == []
    # One test image in each seed, where floating-point numbers give 0.00166944908180300 twice and ...311 once.
    right = {"plain": [591, 590, 591], "other": [592, 591, 592]}
    shares = {name: [count / 599 for count in of] for name, of in right.items()}
    assert len({x - y for x, y in zip(*shares.values(), strict=True)}) == 2
    assert paired_test(shares["other"], shares["plain"]).p_value == 0.25
    assert winners(shares, "high") == better_than("plain", shares, "high") == []
    six = {name: 3 * of for name, of in values.items()}
    assert paired_test(six["other"], six["plain"]).p_value == pytest.approx(stats.binomtest(6, 6).pvalue)
    assert winners(six, "high") == better_than("plain", six, "high") == ["other"]


def test_a_tie_is_closer_to_the_best_than_to_any_worse_method() -> None:
    """The interval is that of scipy."""
    random = np.random.default_rng(3)
    ties = far = 0
    for _ in range(100):
        values = runs(random, random.normal(0, 0.15, 5).tolist(), 5)
        found = rank(values, "high")
        away = {name: np.subtract(values[str(found.best)], of) for name, of in values.items() if name != found.best}
        nearest = min((away[name].mean() for name in found.worse), default=-math.inf)
        for name, of in away.items():
            high = stats.t.interval(0.95, 4, of.mean(), stats.sem(of))[1]
            assert (name in found.tied) == (name not in found.worse and high < nearest / 2)
            near = rank(values, "high", margin=0.1).tied
            assert (name in near) == (name not in found.worse and high < min(nearest / 2, 0.1))
        ties += len(found.tied)
        far += len(found.tied) - len(near)
    assert ties > 10
    assert far > 3


def test_methods_better_than_a_reference_are_those_of_holm() -> None:
    random = np.random.default_rng(4)
    corrected = 0
    for _ in range(60):
        values = runs(random, random.normal(0, 0.1, 5).tolist(), 5)
        others = [name for name in values if name != "m0"]
        p = np.array([stats.ttest_rel(values[name], values["m0"]).pvalue for name in others])
        order = np.argsort(p)
        adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
        significant = {others[i] for i, value in zip(order, adjusted, strict=True) if value < 0.05}
        for best, sign in (("high", 1), ("low", -1)):
            better = [n for n in others if n in significant and sign * (np.mean(values[n]) - np.mean(values["m0"])) > 0]
            assert better_than("m0", values, best) == better  # type: ignore[arg-type]
        corrected += len(significant) != (p < 0.05).sum()
    assert corrected > 3
    assert better_than("unknown", values, "high") == []
    assert better_than("a", {"a": [1.0], "b": [2.0]}, "high") == []
    assert better_than("a", {"a": [NAN, 1.0], "b": [2.0, 3.0]}, "high") == []


def test_the_rule_is_holms_against_the_best() -> None:
    """The expected result uses the tests and the correction of scipy."""
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
        found = rank(values, "high")
        assert found.best == best
        assert set(found.worse) == worse
        corrected += len(worse) != (p < 0.05).sum()
    assert corrected > 5  # the correction matters


def test_equal_methods_are_seldom_significantly_different() -> None:
    random = np.random.default_rng(2)
    alone = [bool(winners(runs(random, [0.0, 0.0], 6), "high")) for _ in range(1500)]
    assert np.mean(alone) == pytest.approx(0.05, abs=0.017)


def test_equal_differences_of_varying_values_are_not_significant() -> None:
    assert winners({"a": [1.0, 2.0], "b": [1.0, 2.0]}, "high") == []
    # A difference of one test image in each of two seeds is not significant.
    assert winners({"a": [570 / 599, 580 / 599], "b": [569 / 599, 579 / 599]}, "high") == []
    assert winners({"a": [1.0, 2.0], "b": [1.5, 2.5]}, "high") == []
    # Another method can still be significantly worse than the best, but no interval shows that a is nearly as good.
    values = {"a": [1.5, 2.5, 3.5], "b": [2.0, 3.0, 4.0], "c": [0.0, 1.01, 1.99]}
    assert winners(values, "high") == ["b"]


def test_discrete_scores_have_no_more_false_winners() -> None:
    random = np.random.default_rng(0)
    for seeds in (2, 3):
        steps = np.rint(random.normal(550, 1.5, (2000, 2, seeds))) / 599
        significant = sum(bool(winners({"a": list(a), "b": list(b)}, "high")) for a, b in steps)
        assert significant < 0.07 * len(steps)


def test_one_seed_has_no_winner() -> None:
    assert winners({"a": [1.0], "b": [100.0]}, "high") == []
    assert winners({}, "high") == []


def test_a_method_that_failed_never_wins() -> None:
    for bad in (NAN, math.inf, -math.inf):
        values = {"failed": [bad, 9.0, 9.0], "a": [1.0, 2.0, 3.1], "b": [0.0, 1.0, 2.0]}
        assert winners(values, "high") == ["a"]
        assert winners(values, "low") == ["b"]
    assert winners({"a": [NAN, 1.0], "b": [1.0, NAN]}, "high") == []
    assert winners({"a": [NAN, 1.0], "b": [1.0, 2.0]}, "high") == []


def test_invalid_comparisons_raise_errors() -> None:
    expect(lambda: winners({"a": [1, 2, 3], "b": [1, 2]}, "high"), "seed by seed", "'a': 3", "'b': 2")
    expect(lambda: winners({"a": [1, 2]}, "best"), "'high' or 'low'")  # type: ignore[arg-type]


# -- scipy ------------------------------------------------------------------------------------------------------------


def test_the_error_without_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    expect(lambda: summarize(ACCURACY), "pip install '.[report]'")
    assert summarize([0.5]).mean == 0.5


def test_the_import_does_not_need_scipy() -> None:
    code = "import sys; sys.modules['scipy'] = None; import leanbayes.evaluation.seeds"
    subprocess.run([sys.executable, "-c", code], check=True)
