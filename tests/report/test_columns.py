"""The columns of tables: their values, intervals and winners (checked with scipy), and explanations."""

import math
import re

import numpy as np
import pytest
from evaluated_cases import DECIBELS, changed, run, runs, with_scaled
from scipy import stats

from leanbayes.report import EvaluatedRun, Table, document_of
from leanbayes.report.columns import columns, known_keys, table
from leanbayes.report.glossary import GLOSSARY


def with_score(one: EvaluatedRun, name: str, value: float) -> EvaluatedRun:
    return changed(one, "evaluation", "scores", name, value=value)


def with_scores(name: str, **values: list[float]) -> list[EvaluatedRun]:
    """Runs of several methods, one per value of a score."""
    return [with_score(run(method, seed), name, v) for method, of in values.items() for seed, v in enumerate(of)]


def winners(name: str, **values: list[float]) -> tuple[str, ...]:
    return table(with_scores(name, **values)).winners.get(name, ())


def keys(shown: Table) -> list[str]:
    return [column.key for column in shown.columns]


# -- columns and values -----------------------------------------------------------------------------------------------


def test_only_metrics_with_values_have_columns() -> None:
    found = keys(table(runs({"a": 0, "b": 0})))
    assert found[:3] == ["accuracy", "nll", "ece"]
    assert "entropy_wrong" not in found  # it is nan in all runs
    assert not {"rmse", "miou", "top5", "train_peak_mb", "corruptions:rmse"} & {*found}
    assert found.index("ood:letters") + 1 == found.index("ood:noisy")
    assert {"corruptions:accuracy", "rotation:nll", "noise:ece", "noise:spearman", "file_ratio"} <= {*found}


def test_one_value_is_enough_for_a_column() -> None:
    shown = table([run("a", 0), with_score(run("b", 0), "entropy_wrong", 1.5)])
    assert "entropy_wrong" in keys(shown)
    cells = {row.name: row.cells["entropy_wrong"].mean for row in shown.rows}
    assert math.isnan(cells["a"])
    assert cells["b"] == 1.5


def test_columns_have_a_fixed_order() -> None:
    every = {key: 1.0 for key in reversed(known_keys())}
    assert [column.key for column in columns([every])] == known_keys()
    assert len({column.title for column in columns([every])}) == len(known_keys())


def test_costs_are_converted_to_the_units_of_the_columns() -> None:
    one = run(size=200)
    found, costs = one.metrics(), one.evaluation["costs"]
    expected = {
        "kilo_trained": 0.2,
        "kilo_stored": 0.4,
        "file_kb": 0.6,
        "epoch_ms": 300,  # the median
        "predict_ms_per_1000": costs["ours"]["predict_ms_per_1000"],
        "predict_mflops": costs["ours"]["predict_effective_flops"] / 1e6,
        "predict_moved_mb": costs["ours"]["predict_bytes_moved"] / 1e6,
        "predict_peak_mb": costs["ours"]["predict_peak_bytes"] / 1e6,
        "file_ratio": 2,
        "predict_time_ratio": 2,
        "predict_flops_ratio": 2,
        "predict_moved_ratio": 2,
        "predict_peak_ratio": 2,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert "train_peak_mb" not in found
    # 32 steps of 16 examples, each with two forward passes, and backward passes of twice their FLOPs.
    assert found["train_gflops"] == pytest.approx(3 * 2 * 32 * 16 * 600 / 1e9)
    assert found["train_flops_ratio"] == pytest.approx(2 * 600 / costs["plain"]["predict_flops"])
    assert "train_gflops" not in changed(one, "record", "history", value=[]).metrics()
    on_gpu = changed(one, "record", "costs", "peak_memory_bytes", value=3_000_000)
    assert on_gpu.metrics()["train_peak_mb"] == 3


def test_metrics_under_shift_are_means_over_all_levels() -> None:
    one = run()
    found = one.metrics()
    for family, levels in (("corruptions", 10), ("rotation", 3), ("noise", 7)):
        for key in ("accuracy", "nll", "ece"):
            values = [shift["scores"][key] for shift in one.evaluation["shifts"] if shift["family"] == family]
            assert len(values) == levels
            assert found[f"{family}:{key}"] == pytest.approx(np.mean(values))
    for score in ("entropy", "mutual_information"):
        aurocs = {name: found["by"][score]["auroc"] for name, found in one.evaluation["ood"].items()}
        found = one.metrics(score)
        assert {name: found[f"ood:{name}"] for name in aurocs} == aurocs
        assert found["ood"] == pytest.approx(np.mean([*aurocs.values()]))


# -- uncertainty and noise --------------------------------------------------------------------------------------------


def noisy(uncertainties: list[float], key: str = "entropy") -> dict[str, float]:
    """The metrics of a run with this uncertainty at each level of noise, from 40 to -6 dB."""
    shifts = [
        {"family": "noise", "name": "noise", "level": level, "scores": {key: uncertainty}}
        for level, uncertainty in zip(DECIBELS, uncertainties, strict=False)
    ]
    return changed(run(), "evaluation", "shifts", value=shifts).metrics()


@pytest.mark.parametrize("key", ["entropy", "std"])
def test_uncertainty_that_rises_with_the_noise_is_correlated_with_it(key: str) -> None:
    assert noisy([0.1, 0.2, 0.3, 0.35, 0.5, 0.8, 1.2], key)["noise:spearman"] == pytest.approx(1)
    assert noisy([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], key)["noise:spearman"] == pytest.approx(-1)
    mixed = [0.1, 0.3, 0.2, 0.5, 0.4, 0.4, 0.9]
    expected = stats.spearmanr([-level for level in DECIBELS], mixed).statistic
    assert noisy(mixed, key)["noise:spearman"] == pytest.approx(expected)


def test_levels_without_a_value_do_not_count_for_the_correlation() -> None:
    found = noisy([0.1, math.nan, 0.3, 0.2, 0.5, math.inf, 1.2])
    expected = stats.spearmanr([-40, -10, -5, -1, 6], [0.1, 0.3, 0.2, 0.5, 1.2]).statistic
    assert found["noise:spearman"] == pytest.approx(expected)


def test_constant_uncertainty_and_missing_noise_have_no_correlation() -> None:
    assert "noise:spearman" not in changed(run(), "evaluation", "shifts", value=[]).metrics()
    assert "noise:spearman" not in noisy([math.nan] * 7)
    for uncertainties in ([0.3] * 7, [0.1, 0.2]):
        found = noisy(uncertainties)
        assert math.isnan(found["noise:spearman"])
        assert "noise:spearman" not in [column.key for column in columns([found])]


def test_the_correlation_has_its_own_column() -> None:
    column = next(column for column in columns([noisy([0.1, 0.2, 0.3])]) if column.key == "noise:spearman")
    assert (column.title, column.group, column.best, column.form) == (
        "uncertainty follows noise",
        "shift",
        "high",
        "decimal",
    )


# -- OOD data ---------------------------------------------------------------------------------------------------------


def detecting(method: str, seed: int, **aurocs: tuple[float, float]) -> EvaluatedRun:
    """A run with the AUROC of letters and of noisy inputs by each score."""
    one = run(method, seed)
    for score in ("max_probability", "entropy", "mutual_information"):
        for name, auroc in zip(("letters", "noisy"), aurocs.get(score, (0.5, 0.5)), strict=True):
            one = changed(one, "evaluation", "ood", name, "by", score, "auroc", value=auroc)
    return one


def test_ood_data_are_detected_by_the_best_score_of_each_method() -> None:
    some = [
        detecting("plain", 0, entropy=(0.8, 0.7), max_probability=(0.81, 0.6)),
        detecting("plain", 1, entropy=(0.8, 0.7), max_probability=(0.9, 0.6)),
        detecting("mean-field", 0, entropy=(0.85, 0.8), mutual_information=(0.8, 0.89)),
        detecting("mean-field", 1, entropy=(0.85, 0.8), mutual_information=(0.8, 0.91)),
    ]
    shown = table(some)
    cells = {row.name: row.cells for row in shown.rows}
    assert [cells["plain"][key].mean for key in ("ood:letters", "ood:noisy", "ood")] == pytest.approx([0.8, 0.7, 0.75])
    assert cells["mean-field"]["ood:noisy"].mean == pytest.approx(0.9)
    assert cells["mean-field"]["ood:letters"].mean == pytest.approx(0.8)  # one score for all data
    assert "entropy for plain; mutual information for mean-field" in shown.note


def test_six_columns_are_main() -> None:
    def main(keys: list[str]) -> list[str]:
        return [column.key for column in columns([dict.fromkeys(keys, 1.0)]) if column.main]

    classes = ["accuracy", "nll", "ece", "error_at_90", "ood", "predict_time_ratio"]
    assert main([*known_keys(), "ood:letters"]) == classes
    assert main(["accuracy", "nll", "ece", "aurc", "corruptions:nll", "file_kb"]) == [
        "accuracy", "nll", "ece", "corruptions:nll"
    ]  # fmt: skip
    assert main(["rmse", "nll", "interval_error", "crps", "coverage_95", "width_95", "predict_time_ratio"]) == [
        "rmse", "nll", "crps", "interval_error", "coverage_95", "predict_time_ratio"
    ]  # fmt: skip


def test_the_plain_network_with_temperature_is_a_method_of_its_own() -> None:
    some = with_scores("nll", a=[0.10, 0.20, 0.30], deterministic=[0.26, 0.35, 0.47], b=[0.21, 0.30, 0.41])
    scaled = {0: 0.16, 1: 0.25, 2: 0.371}
    some = [with_scaled(one, nll=scaled[one.seed]) if one.method == "deterministic" else one for one in some]
    found = table(some)
    assert [row.name for row in found.rows] == ["a", "deterministic", "deterministic + temperature", "b"]
    assert (found.plain, found.scaled) == ("deterministic", "deterministic + temperature")
    rows = {row.name: row.cells for row in found.rows}
    assert rows[found.scaled]["nll"].values == (0.16, 0.25, 0.371)
    assert rows[found.scaled]["file_kb"] == rows["deterministic"]["file_kb"]
    assert set(found.better_than_plain["nll"]) == {"a", "b", found.scaled}
    assert found.better_than_scaled["nll"] == ("a",)
    without = table([one for one in some if one.method != "deterministic"])
    assert (without.plain, without.scaled) == ("", "")


# -- intervals --------------------------------------------------------------------------------------------------------


def test_cells_have_the_mean_and_its_interval_over_seeds() -> None:
    values = [0.31, 0.29, 0.36, 0.30]
    shown = table(with_scores("nll", a=values, b=[0.5] * 4))
    a, b = (row.cells["nll"] for row in shown.rows)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (a.mean, a.low, a.high) == pytest.approx((np.mean(values), low, high))
    assert a.values == tuple(values)
    assert (b.mean, b.low, b.high) == (0.5, 0.5, 0.5)
    assert [row.runs for row in shown.rows] == [4, 4]


def test_one_seed_has_no_interval() -> None:
    cell = table([run()]).rows[0].cells["nll"]
    assert math.isnan(cell.low)
    assert math.isnan(cell.high)
    assert cell.mean == cell.values[0]


def test_seeds_are_paired_in_any_order_of_the_runs() -> None:
    found = with_scores("nll", a=[0.1, 0.2, 0.3], b=[0.11, 0.21, 0.31001])
    assert table(found).winners["nll"] == ("a",)
    shuffled = [found[place] for place in (5, 0, 4, 2, 1, 3)]
    assert table(shuffled).winners["nll"] == ("a",)
    assert [row.name for row in table(shuffled).rows] == ["b", "a"]
    assert table(shuffled).rows[0].cells["nll"].values == (0.11, 0.21, 0.31001)


# -- winners ----------------------------------------------------------------------------------------------------------


def test_a_winner_is_better_by_a_paired_test() -> None:
    good, bad, unclear = [0.10, 0.20, 0.30], [0.16, 0.25, 0.37], [0.10, 0.40, 0.20]
    assert stats.ttest_rel(good, bad).pvalue < 0.025
    assert stats.ttest_rel(good, unclear).pvalue > 0.1
    assert winners("nll", a=good, b=bad) == ("a",)
    assert winners("accuracy", a=good, b=bad) == ("b",)
    assert winners("nll", a=good, b=bad, c=unclear) == ("a",)  # c may be better or worse than b
    assert winners("nll", a=good, b=bad, c=[0.101, 0.2, 0.302]) == ("a", "c")


def test_methods_better_than_the_plain_network_are_marked() -> None:
    good, fair, plain = [0.10, 0.20, 0.30], [0.13, 0.23, 0.3301], [0.16, 0.25, 0.37]
    found = table(with_scores("nll", a=good, b=fair, deterministic=plain))
    assert found.plain == "deterministic"
    assert found.winners["nll"] == found.better_than_plain["nll"] == ("a", "b")
    assert found.better_than_all["nll"] == "a"
    assert "better than deterministic" in found.note
    assert winners("nll", a=good, b=fair, other=plain) == ("a",)
    assert table(with_scores("nll", a=good, b=fair, other=plain)).plain == ""


def test_costs_that_are_measured_badly_are_not_tied() -> None:
    place = ("evaluation", "costs", "ours", "predict_ms_per_1000")
    values = {
        "deterministic": [100.0, 95.0, 105.0],
        "ensemble": [180.0, 257.0, 334.0],
        "slow": [1300.0, 1310.0, 1290.0],
    }
    found = table(
        [changed(run(method, seed), *place, value=v) for method, of in values.items() for seed, v in enumerate(of)]
    )
    logs = np.log([values["ensemble"], values["deterministic"]])
    assert 2 * stats.ttest_rel(*logs).pvalue > 0.02  # barely worse, if at all
    assert found.winners["predict_ms_per_1000"] == ("deterministic",)


def test_costs_are_compared_by_their_ratios() -> None:
    def timed(**values: list[float]) -> Table:
        place = ("evaluation", "costs", "ours", "predict_ms_per_1000")
        return table(
            [changed(run(method, seed), *place, value=v) for method, of in values.items() for seed, v in enumerate(of)]
        )

    plain, noisy, slow = [16.0, 15.9, 16.2], [400.0, 700.0, 823.0], [36000.0, 36100.0, 36200.0]
    assert np.mean(noisy) == 641
    found = timed(deterministic=plain, noisy=noisy, slow=slow)
    assert found.winners["predict_ms_per_1000"] == ("deterministic",)
    assert found.better_than_plain.get("predict_ms_per_1000") is None
    # In milliseconds, the noisy times would be close to those of the plain network, compared with an hour.
    high = stats.t.interval(0.95, 2, 625, stats.sem(np.subtract(noisy, plain)))[1]
    assert high < 36000
    assert stats.ttest_rel(np.log(noisy), np.log(plain)).pvalue < 0.01
    weak = timed(deterministic=plain, noisy=[60.0, 1263.0, 600.0], slow=[40.0, 41.0, 40.0])
    assert weak.winners["predict_ms_per_1000"] == ("deterministic",)


def test_constant_ratios_are_compared_exactly_beside_those_that_vary() -> None:
    ratios = {"deterministic": [1.02] * 3, "mc-dropout": [68.61] * 3, "ssvi": [0.5, 0.51, 0.52]}
    found = table(
        [
            changed(run(method, seed), "evaluation", "costs", "ratios", "predict_bytes_moved", value=value)
            for method, of in ratios.items()
            for seed, value in enumerate(of)
        ]
    )
    assert found.winners["predict_moved_ratio"] == ("ssvi",)
    without = table(
        [
            changed(run(method, seed), "evaluation", "costs", "ratios", "predict_bytes_moved", value=value)
            for method, of in {**ratios, "ssvi": [1.5, 1.51, 1.52]}.items()
            for seed, value in enumerate(of)
        ]
    )
    assert without.winners["predict_moved_ratio"] == ("deterministic",)


def test_equal_methods_have_no_winner() -> None:
    assert winners("nll", a=[0.1, 0.2, 0.3], b=[0.1, 0.3, 0.2]) == ()
    assert winners("nll", a=[0.1, 0.2, 0.3], b=[0.1, 0.2, 0.3]) == ()


def test_neutral_columns_have_no_winner() -> None:
    assert winners("mutual_information", a=[0.1, 0.1, 0.1], b=[0.5, 0.5, 0.5]) == ()


def test_a_method_without_a_value_neither_wins_nor_makes_another_win() -> None:
    assert winners("nll", a=[0.1, 0.2, 0.3], b=[math.nan] * 3) == ()
    assert winners("nll", a=[0.1, 0.2, 0.3], b=[0.2, 0.3, math.nan]) == ()
    assert winners("nll", a=[0.1, 0.2, 0.3], b=[0.16, 0.25, 0.37], c=[math.nan] * 3) == ("a",)
    assert winners("nll", a=[0.1, 0.2, 0.3], b=[math.inf] * 3, c=[0.1, 0.3, 0.2]) == ()


def test_one_seed_or_different_seeds_have_winners_only_for_counts() -> None:
    for found, words in (
        ([run("a", 0, 0.1, 200), run("b", 0, 0.0, 300)], "train more seeds"),
        ([run("a", 0, 0.1, 200), run("b", 1, 0.0, 300)], "train more seeds"),
        ([run("a", s, 0.1, 200) for s in (0, 1)] + [run("b", s, 0.0, 300) for s in (0, 2)], "different seeds"),
        ([run("a", s, 0.1, 200) for s in (0, 1)] + [run("b", 0, 0.0, 300)], "different seeds"),
    ):
        shown = table(found)
        assert words in shown.note
        assert set(shown.winners) == {
            "kilo_trained", "kilo_stored", "file_kb", "file_ratio", "predict_mflops", "predict_flops_ratio",
            "predict_moved_mb", "predict_moved_ratio", "predict_peak_mb", "predict_peak_ratio", "train_gflops",
            "train_flops_ratio",
        }  # fmt: skip
        assert set(shown.winners.values()) == {("a",)}


def test_equal_counts_have_no_winner() -> None:
    shown = table([run("a", 0, size=200), run("b", 0, size=200)])
    assert shown.winners == {}
    three = table([run("a", 0, size=200), run("b", 0, size=200), run("c", 0, size=300)])
    assert three.winners["file_kb"] == ("a", "b")


def test_counts_that_vary_over_seeds_are_compared_like_other_metrics() -> None:
    sizes = {"a": [200, 900, 210], "b": [300, 310, 305]}
    found = [run(method, seed, size=size) for method, of in sizes.items() for seed, size in enumerate(of)]
    assert "file_kb" not in table(found).winners  # by the first seed alone, a would win
    close = {"a": [200, 201, 202], "b": [300, 310, 305]}
    found = [run(method, seed, size=size) for method, of in close.items() for seed, size in enumerate(of)]
    assert table(found).winners["file_kb"] == ("a",)


def test_infinite_counts_do_not_win() -> None:
    some = [
        changed(one, "evaluation", "costs", "ratios", "file_bytes", value=math.inf) for one in runs({"a": 0, "b": 0})
    ]
    assert "file_ratio" not in table(some).winners
    assert table(some).winners["file_kb"] == ("a",)


def test_a_single_method_does_not_win() -> None:
    shown = table(runs({"a": 0.1}))
    assert shown.winners == {}
    assert "star" not in shown.note


# -- glossary ---------------------------------------------------------------------------------------------------------


def test_the_glossary_explains_the_titles_of_columns() -> None:
    every = {**{key: 1.0 for key in known_keys()}, "ood:letters": 1.0}
    for column in columns([every]):
        assert column.help.endswith("."), column.key
        if column.group in ("quality", "uncertainty", "out of distribution"):
            term = {"width_95": "95 % interval"}.get(column.key, column.title)
            assert any(known in term for known in GLOSSARY), column.title
    assert "width" in GLOSSARY["95 % interval"]
    for term in ("corrupted", "uncertainty follows noise", "FLOPs", "moved"):
        assert term in GLOSSARY


@pytest.mark.parametrize("term", GLOSSARY)
def test_every_entry_of_the_glossary_has_two_sentences(term: str) -> None:
    text = GLOSSARY[term].replace("et al. ", "et al ")
    assert text == text.strip()
    assert text.endswith(".")
    assert len(re.findall(r"[.?!](?: (?=[A-Z0-9])|$)", text)) == 2, text


def test_a_document_has_the_glossary() -> None:
    assert document_of([run()]).glossary == GLOSSARY
