"""The summary says what beats the plain network, with numbers that are significant by SciPy."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
from evaluated_cases import changed, run, runs
from scipy import stats

from leanbayes.report import Cell, Column, Document, Row, Table, document_of
from leanbayes.report.summary import best_method, listed, summary_sentences


def test_the_summary_asks_first_what_beats_the_plain_network() -> None:
    document = document_of(runs({"mean-field": 0.1, "deterministic": 0.0, "ensemble": 0.05}))
    test = stats.f_oneway(*(row.cells["nll"].values for row in document.table.rows))
    means = {row.name: {key: cell.mean for key, cell in row.cells.items()} for row in document.table.rows}
    plain = means["deterministic"]
    for sentence, name in zip(document.summary, ("mean-field", "ensemble"), strict=False):
        own = means[name]
        assert sentence == (
            f"{name} is significantly better than the plain network in NLL ({own['nll']:.3g} instead of "
            f"{plain['nll']:.3g}), accuracy ({100 * own['accuracy']:.1f} % instead of {100 * plain['accuracy']:.1f} %)"
            f", corrupted accuracy ({100 * own['corruptions:accuracy']:.1f} % instead of "
            f"{100 * plain['corruptions:accuracy']:.1f} %) and 2 more metrics."
        )
    assert document.summary[2] == (
        "mean-field is significantly better than all other methods in NLL, accuracy, corrupted accuracy, corrupted NLL "
        "and noisy NLL."
    )
    # The ECE of these runs is pure noise, of which 5 % is significant.
    assert document.summary[3:] == ("ensemble is significantly better than all other methods in ECE.",)
    for key in ("accuracy", "nll", "corruptions:nll"):
        values = {row.name: row.cells[key].values for row in document.table.rows}
        assert 2 * stats.ttest_rel(values["mean-field"], values["deterministic"]).pvalue < 0.05
        assert 2 * stats.ttest_rel(values["mean-field"], values["ensemble"]).pvalue < 0.05
    variance = f"of the NLL between methods: F = {test.statistic:.3g}, p = {test.pvalue:.2g}"
    assert document.facts["analysis of variance"] == variance


def test_the_summary_of_the_plain_network_and_one_method_has_one_sentence() -> None:
    better = document_of(runs({"deterministic": 0.0, "mean-field": 0.1})).summary
    assert [sentence.partition(" in ")[0] for sentence in better] == [
        "mean-field is significantly better than the plain network"
    ]
    assert document_of(runs({"deterministic": 0.1, "mean-field": 0.0})).summary == (
        "No method is significantly better than the plain network in any quality metric.",
    )


ONE_SEED = "With one seed per method, nothing can be shown to be better than all others: train more seeds."
NO_WINNER = "No method is significantly better than all others in any quality metric."


def claims(document: Document) -> list[str]:
    return [
        sentence
        for sentence in document.summary
        if "better than all" in sentence and sentence not in (NO_WINNER, ONE_SEED)
    ]


def test_the_summary_has_no_winners_without_significance() -> None:
    for some in (
        runs({"a": 0.0, "b": 0.0}, seeds=(0,)),  # one seed
        [run("a", 0, 0.1), run("a", 1, 0.1), run("b", 0), run("b", 2)],  # different seeds
        [dataclasses.replace(one, method=name) for name in "ab" for one in runs({"same": 0.1})],  # all equal
    ):
        document = document_of(some)
        assert claims(document) == []
        assert document.summary[0] in (NO_WINNER, ONE_SEED)


def test_shared_winners_are_not_in_the_summary() -> None:
    values = {"a": [0.10, 0.20, 0.30], "b": [0.16, 0.25, 0.37], "c": [0.101, 0.20, 0.302]}
    some = [
        changed(run(method, seed), "evaluation", "scores", "crps", value=value)
        for method, of in values.items()
        for seed, value in enumerate(of)
    ]
    document = document_of(some)
    assert document.table.winners["crps"] == ("a", "c")
    assert not any("CRPS" in sentence for sentence in document.summary)


def test_winners_over_methods_without_a_value_are_not_in_the_summary() -> None:
    values = {"a": [0.10, 0.20, 0.30], "b": [0.16, 0.25, 0.37], "c": [math.nan] * 3}
    some = [
        changed(run(method, seed), "evaluation", "scores", "crps", value=value)
        for method, of in values.items()
        for seed, value in enumerate(of)
    ]
    document = document_of(some)
    assert document.table.winners["crps"] == ("a",)
    assert not any("CRPS" in sentence for sentence in document.summary)


def test_one_method_has_no_summary() -> None:
    assert document_of(runs({"a": 0.0})).summary == ()


def test_a_missing_nll_has_no_analysis_of_variance() -> None:
    some = [
        changed(one, "evaluation", "scores", "nll", value=math.nan) if one.method == "b" else one
        for one in runs({"a": 0.0, "b": 0.0})
    ]
    assert not any("variance" in sentence for sentence in document_of(some).summary)


# -- the words --------------------------------------------------------------------------------------------------------

PLAIN, SCALED = "deterministic", "deterministic + temperature"
COLUMNS = (
    Column("nll", "NLL", "quality", "low", "decimal"),
    Column("error_at_90", "error at 90 %", "quality", "low", "percent"),
    Column("ood:noisy", "AUROC noisy", "out of distribution", "high", "percent"),
    Column("ece", "ECE", "quality", "low", "decimal"),
)
VALUES = {
    PLAIN: (0.31, 0.02, 0.801, 0.06),
    SCALED: (0.25, 0.02, 0.81, 0.03),
    "vdp": (0.24, 0.011, 0.953, 0.02),
    "ssvi": (0.28, 0.015, 0.9, 0.05),
}


def compared(better: dict[str, Sequence[str]], than_scaled: dict[str, Sequence[str]], runs: int = 3) -> Table:
    rows = tuple(
        Row(name, {column.key: Cell(value) for column, value in zip(COLUMNS, values, strict=True)}, runs)
        for name, values in VALUES.items()
    )
    return Table(
        COLUMNS,
        rows,
        plain=PLAIN,
        scaled=SCALED,
        better_than_plain={key: tuple(names) for key, names in better.items()},
        better_than_scaled={key: tuple(names) for key, names in than_scaled.items()},
    )


def test_the_first_sentence_is_about_what_beats_the_plain_network_with_temperature() -> None:
    shown = compared(
        {"nll": ["vdp", "ssvi", SCALED], "ood:noisy": ["vdp"], "error_at_90": ["vdp"], "ece": ["ssvi"]},
        {"ood:noisy": ["vdp"], "error_at_90": ["vdp"]},
    )
    assert summary_sentences(shown) == [
        "vdp is significantly better than the plain network, with and without temperature, in errors among its 90 % "
        "most certain answers (1.1 % instead of 2.0 %) and noticing noisy inputs (AUROC 95.3 % instead of 80.1 %); "
        "than the plain network without temperature also in NLL.",
        "ssvi is significantly better than the plain network in NLL (0.28 instead of 0.31) and calibration (ECE 0.05 "
        "instead of 0.06), but not than the plain network with temperature.",
    ]
    assert best_method(shown) == "vdp"


def test_what_beats_temperature_comes_first_even_if_it_beats_less() -> None:
    shown = compared({"nll": ["vdp"], "ece": ["vdp"], "ood:noisy": ["ssvi"]}, {"ood:noisy": ["ssvi"]})
    assert [sentence.split()[0] for sentence in summary_sentences(shown)] == ["ssvi", "vdp"]
    assert best_method(shown) == "ssvi"


def test_without_significance_the_best_has_the_lowest_nll() -> None:
    shown = compared({}, {})
    assert best_method(shown) == "vdp"
    assert summary_sentences(shown) == [
        "No method is significantly better than the plain network in any quality metric."
    ]
    assert summary_sentences(compared({}, {}, runs=1)) == [
        "With one seed per method, nothing can be shown to be better than the plain network: train more seeds."
    ]
    alone = dataclasses.replace(shown, rows=shown.rows[:2])
    assert best_method(alone) == SCALED  # there is no other
    assert best_method(dataclasses.replace(shown, rows=shown.rows[:1], scaled="")) == PLAIN


@pytest.mark.parametrize(("parts", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")])
def test_lists_end_with_and(parts: list[str], text: str) -> None:
    assert listed(parts) == text
