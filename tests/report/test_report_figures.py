"""The values in the figures of the report, computed by hand from the evaluation of each run."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from evaluated_cases import BINS, CLASSES, CORRUPTIONS, DECIBELS, NAMES, changed, run, runs
from scipy import stats

from leanbayes.report import EvaluatedRun, figures
from leanbayes.report.figure import Figure, Series
from leanbayes.report.figures.pruning_curve import pruning_figure

SEEDS = runs({"mean-field": 0.0})
ONE = SEEDS[:1]


def curve(one: EvaluatedRun, name: str) -> Any:
    return np.asarray(one.evaluation["curves"][name], float)


def by_key(found: list[Figure]) -> dict[str, Figure]:
    assert len({figure.key for figure in found}) == len(found)
    return {figure.key: figure for figure in found}


def assert_band(series: Series, lines: Any) -> None:
    """Check that a line is the mean over seeds, and that its band reaches from the minimum to the maximum."""
    values = np.asarray(lines, float)
    assert series.y == pytest.approx(values.mean(0), nan_ok=True)
    if len(values) == 1:
        assert series.low == series.high == ()
    else:
        assert series.low == pytest.approx(values.min(0))
        assert series.high == pytest.approx(values.max(0))


# -- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("some", [ONE, SEEDS], ids=["one seed", "three seeds"])
def test_reliability_sums_the_bins_of_all_seeds(some: list[EvaluatedRun]) -> None:
    found = by_key(figures.calibration(some, NAMES))
    assert list(found) == ["reliability", "class-reliability"]
    confidence, right, count = sum(curve(one, "reliability") for one in some)
    filled = [number for number in range(BINS) if count[number] >= 10 * len(some)]
    assert 3 < len(filled) < BINS
    series = found["reliability"].series[0]
    assert series.x == pytest.approx([confidence[n] / count[n] for n in filled])
    assert series.y == pytest.approx([right[n] / count[n] for n in filled])
    assert series.labels == tuple(f"{round(count[n] / len(some))} examples" for n in filled)
    assert series.sizes == pytest.approx([count[n] / count.sum() for n in filled])
    assert "fewer than 10" in found["reliability"].caption


def test_intervals_of_bins_are_those_of_wilson_for_one_run() -> None:
    bins = np.zeros((3, BINS))
    bins[:, 12] = 0.83 * 40, 31, 40
    bins[:, 14] = 0.99 * 60, 60, 60
    some = [changed(one, "evaluation", "curves", "reliability", value=bins.tolist()) for one in SEEDS]
    for runs_ in (some[:1], some):  # other seeds predict the same examples, so that they do not narrow the interval
        series = by_key(figures.calibration(runs_, ()))["reliability"].series[0]
        for k, (right, count) in enumerate(((31, 40), (60, 60))):
            expected = stats.binomtest(right, count).proportion_ci(method="wilson")
            assert (series.low[k], series.high[k]) == pytest.approx((expected.low, expected.high))


def test_overconfidence_is_said() -> None:
    def warning(right: int) -> str:
        bins = np.zeros((3, BINS))
        bins[:, 14] = 0.97 * 100, right, 100
        bins[:, 10] = 0.70 * 12, 8, 12
        one = changed(run(), "evaluation", "curves", "reliability", value=bins.tolist())
        return by_key(figures.calibration([one], ()))["reliability"].warning

    assert warning(97) == warning(94) == ""  # the interval reaches the diagonal
    assert warning(80) == "Overconfident: of the answers with about 97% confidence, 80% are right."


def test_the_five_classes_with_the_largest_gaps_are_plotted() -> None:
    sums = sum(curve(one, "class_reliability") for one in SEEDS)
    gaps = [sum(abs(sums[k, 0, b] - sums[k, 1, b]) for b in range(BINS)) for k in range(CLASSES)]
    worst = sorted(sorted(range(CLASSES), key=lambda k: -gaps[k])[:5])
    figure = by_key(figures.calibration(SEEDS, NAMES))["class-reliability"]
    assert [series.name for series in figure.series] == [NAMES[k] for k in worst]
    assert len(worst) == 5 < CLASSES
    assert "the 5 classes with the largest gaps" in figure.caption
    for series, k in zip(figure.series, worst, strict=True):
        there = [b for b in range(BINS) if sums[k, 2, b] >= 30]
        assert series.x == pytest.approx([sums[k, 0, b] / sums[k, 2, b] for b in there])
        assert series.y == pytest.approx([sums[k, 1, b] / sums[k, 2, b] for b in there])


def test_bins_with_few_examples_are_not_plotted() -> None:
    bins = np.zeros((2, 3, BINS))
    bins[0, :, 3] = 0.25 * 10, 4, 10
    bins[0, :, 4] = 0.3 * 9, 1, 9  # too few
    bins[1, :, 2] = 0.2 * 9, 1, 9
    one = changed(run(), "evaluation", "curves", "class_reliability", value=bins.tolist())
    figure = by_key(figures.calibration([one], ()))["class-reliability"]
    (series,) = figure.series
    assert series.name == "class 0"
    assert (*series.x, *series.y) == pytest.approx((0.25, 0.4))
    assert "all classes" in figure.caption


def test_interval_coverage_is_plotted_over_the_nominal_probability() -> None:
    shares = [np.linspace(0.1, 0.9, 19) + 0.01 * seed for seed in range(3)]
    some = [
        changed(one, "evaluation", "curves", value={"intervals": s.tolist()})
        for one, s in zip(SEEDS, shares, strict=True)
    ]
    (figure,) = figures.calibration(some, ())
    assert figure.key == "intervals"
    assert figure.diagonal
    assert figure.series[0].x == pytest.approx([0.05 * k for k in range(1, 20)])
    assert_band(figure.series[0], shares)


# -- uncertainty ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("some", [ONE, SEEDS], ids=["one seed", "three seeds"])
def test_risk_is_interpolated_to_a_grid_of_coverages(some: list[EvaluatedRun]) -> None:
    (figure,) = figures.selective(some)
    series = figure.series[0]
    assert series.x == pytest.approx([k / 100 for k in range(1, 101)])
    lines = []
    for one in some:
        coverage, risk = one.evaluation["curves"]["risk_coverage"]
        line = []
        for share in series.x:
            assert isinstance(share, float)
            after = next((k for k, c in enumerate(coverage) if c >= share - 1e-12), len(coverage) - 1)
            if after == 0:
                line.append(risk[0])
                continue
            part = (share - coverage[after - 1]) / (coverage[after] - coverage[after - 1])
            line.append(risk[after - 1] + part * (risk[after] - risk[after - 1]))
        lines.append(line)
    assert_band(series, lines)
    assert series.y[-1] == pytest.approx(np.mean([curve(one, "risk_coverage")[1, -1] for one in some]))


def test_entropy_histograms_are_summed_over_seeds_and_normalized() -> None:
    (figure,) = figures.entropies(SEEDS)
    assert [series.name for series in figure.series] == ["correct", "wrong", "letters", "noisy"]
    edges = np.linspace(0, math.log(CLASSES), 31)
    for series in figure.series:
        if series.name in ("correct", "wrong"):
            key = "entropy_right" if series.name == "correct" else "entropy_wrong"
            counts = sum(curve(one, key) for one in SEEDS)
        else:
            counts = sum(np.array(one.evaluation["ood"][series.name]["entropy"]) for one in SEEDS)
        assert series.x == pytest.approx([(low + high) / 2 for low, high in pairwise(edges)])
        assert series.y == pytest.approx(counts / counts.sum())
        assert sum(series.y) == pytest.approx(1)


def test_empty_entropy_histograms_are_not_plotted() -> None:
    one = changed(run(), "evaluation", "curves", "entropy_wrong", value=[0] * 30)
    (figure,) = figures.entropies([one])
    assert [series.name for series in figure.series] == ["correct", "letters", "noisy"]


def test_ood_detection_has_a_bar_for_each_measure_and_data_set() -> None:
    (figure,) = figures.ood_detection(SEEDS)
    assert [series.name for series in figure.series] == ["1 − confidence", "entropy", "mutual information"]
    measures = ("max_probability", "entropy", "mutual_information")
    for series, measure in zip(figure.series, measures, strict=True):
        assert series.x == ("letters", "noisy")
        found = [[one.evaluation["ood"][kind]["by"][measure]["auroc"] for kind in series.x] for one in SEEDS]
        assert_band(series, found)


def test_figures_say_what_a_method_fails_at() -> None:
    flat = changed(run(), "evaluation", "curves", "risk_coverage", value=[[0.01, 0.5, 1.0], [0.2, 0.2, 0.2]])
    assert "Abstaining does not help" in figures.selective([flat])[0].warning
    good = changed(run(), "evaluation", "curves", "risk_coverage", value=[[0.01, 0.5, 1.0], [0.0, 0.1, 0.2]])
    assert figures.selective([good])[0].warning == ""
    perfect = changed(run(), "evaluation", "curves", "risk_coverage", value=[[0.01, 1.0], [0.0, 0.0]])
    assert figures.selective([perfect])[0].warning == ""

    def detected(**aurocs: float) -> str:
        one = run()
        for name, auroc in aurocs.items():
            for measure in ("max_probability", "entropy", "mutual_information"):
                one = changed(one, "evaluation", "ood", name, "by", measure, "auroc", value=auroc)
        return figures.ood_detection([one])[0].warning

    assert detected(letters=0.9, noisy=0.51) == ""
    assert detected(letters=0.9, noisy=0.42) == "Worse than chance, whatever the measure: noisy (42%)."

    def noisy(*entropies: float) -> str:
        shifts = [
            {"family": "noise", "name": "noise", "level": level, "scores": {"entropy": entropy}}
            for level, entropy in zip((20, 5, -3, -6), entropies, strict=True)
        ]
        (figure,) = figures.shifts([changed(run(), "evaluation", "shifts", value=shifts)])
        return figure.warning

    assert noisy(0.4, 0.4, 0.4, 0.4) == "The uncertainty does not respond to noise."
    assert noisy(0.1, 0.4, 0.8, 0.79) == noisy(0.1, 0.4, 0.8, 0.9) == ""
    assert (
        noisy(0.1, 0.4, 0.8, 0.5) == "The uncertainty falls under the worst noise: from 0.80 at −3 dB to 0.50 at −6 dB."
    )


# -- shift ------------------------------------------------------------------------------------------------------------


def level_scores(one: EvaluatedRun, key: str, **where: Any) -> list[float]:
    found = one.evaluation["shifts"]
    return [shift["scores"][key] for shift in found if all(shift[name] == value for name, value in where.items())]


@pytest.mark.parametrize("some", [ONE, SEEDS], ids=["one seed", "three seeds"])
def test_scores_are_plotted_over_the_levels_of_each_shift(some: list[EvaluatedRun]) -> None:
    found = by_key(figures.shifts(some))
    assert list(found) == [
        *(f"corruptions-{key}" for key in ("accuracy", "nll", "ece")),
        *(f"rotation-{key}" for key in ("accuracy", "nll", "entropy")),
        *(f"noise-{key}" for key in ("accuracy", "nll", "entropy")),
        *(f"labels-{key}" for key in ("accuracy", "ece")),
        "by-corruption",
    ]
    for name, levels in (
        ("corruptions", [0, 1, 2, 3, 4, 5]),
        ("rotation", [0, 15, 90, 180]),
        ("noise", sorted(DECIBELS)),
        ("labels", [0.1, 1, 10]),
    ):
        for key in ("accuracy", "nll", "ece", "entropy"):
            figure = found.get(f"{name}-{key}")
            if figure is None:
                continue
            assert figure.series[0].x == tuple(levels)
            lines = [
                [np.mean(level_scores(one, key, family=name if level else "none", level=level)) for level in levels]
                for one in some
            ]
            assert_band(figure.series[0], lines)
            assert figure.log == ("x" if name == "labels" else "")
    assert found["corruptions-accuracy"].percent == "y"
    assert found["corruptions-accuracy"].title == "Accuracy by severity of the corruption"
    assert found["corruptions-nll"].percent == ""


def test_bars_of_corruptions_are_means_over_severities() -> None:
    figure = by_key(figures.shifts(SEEDS))["by-corruption"]
    assert figure.series[0].x == ("fog", "gaussian noise")
    lines = [[np.mean(level_scores(one, "accuracy", name=name)) for name in CORRUPTIONS] for one in SEEDS]
    assert_band(figure.series[0], lines)


def with_scores(one: EvaluatedRun, *names: str) -> EvaluatedRun:
    shifts = [
        {**shift, "scores": {name: 0.1 * number for number, name in enumerate(names)}}
        for shift in one.evaluation["shifts"]
        if shift["family"] not in ("rotation", "labels")
    ]
    return changed(one, "evaluation", "shifts", value=shifts)


def test_segmentations_and_regressions_have_their_own_scores_under_shift() -> None:
    dense = by_key(figures.shifts([with_scores(run(), "accuracy", "miou", "nll", "ece", "entropy")]))
    assert {"corruptions-miou", "noise-miou", "noise-entropy", "by-corruption"} <= {*dense}
    assert dense["by-corruption"].title == "mIoU by corruption"
    assert dense["by-corruption"].series[0].y == pytest.approx((0.1, 0.1))
    real = by_key(figures.shifts([with_scores(run(), "rmse", "nll", "std")]))
    assert {"corruptions-rmse", "corruptions-nll", "noise-rmse", "noise-std", "by-corruption"} <= {*real}
    assert real["by-corruption"].percent == ""
    assert not any("entropy" in key or "accuracy" in key for key in real)


# -- inside the model -------------------------------------------------------------------------------------------------


def test_classes_that_do_not_occur_have_no_iou() -> None:
    values = [[0.5, math.nan, 0.7, 0.1], [0.6, math.nan, 0.8, math.nan], [0.4, math.nan, 0.9, 0.3]]
    some = [changed(one, "evaluation", "curves", "iou", value=of) for one, of in zip(SEEDS, values, strict=True)]
    (figure,) = figures.segmentation(some, NAMES)
    assert figure.series[0].x == ("zero", "two")
    assert_band(figure.series[0], [[of[0], of[2]] for of in values])
    nowhere = [changed(one, "evaluation", "curves", "iou", value=[math.nan] * 2) for one in SEEDS]
    assert figures.segmentation(nowhere, NAMES) == []


def test_a_constant_measure_is_not_plotted() -> None:
    kinds = ONE[0].evaluation["ood"]
    same = {
        kind: {**one, "by": {**one["by"], "mutual_information": {**one["by"]["entropy"], "auroc": 0.5}}}
        for kind, one in kinds.items()
    }
    (figure,) = figures.ood_detection([changed(ONE[0], "evaluation", "ood", value=same)])
    assert [series.name for series in figure.series] == ["1 − confidence", "entropy"]


@pytest.mark.parametrize("some", [SEEDS])
def test_the_accuracy_after_pruning_is_plotted_over_the_share(some: list[EvaluatedRun]) -> None:
    (figure,) = figures.pruning(some)
    assert figure.title == "Accuracy after pruning"
    assert [series.name for series in figure.series] == ["by |μ|", "by |μ|/σ"]
    for series, by in zip(figure.series, ("magnitude", "snr"), strict=True):
        values = np.array([[point["accuracy"] for point in one.evaluation["pruning"][by]] for one in some])
        assert series.x == (0.0, 0.5, 0.9)
        assert series.y == pytest.approx(values.mean(0))
        assert series.low == pytest.approx(values.min(0))
        assert series.high == pytest.approx(values.max(0))
    without = [changed(one, "evaluation", "pruning", value={}) for one in some]
    assert figures.pruning(without) == []
    only = [*some[:-1], changed(some[-1], "evaluation", "pruning", "snr", value=None)]
    assert [series.name for series in figures.pruning(only)[0].series] == ["by |μ|"]


def test_a_pruning_figure_shows_each_curve() -> None:
    curves = {
        "magnitude": [{"share": 0.0, "accuracy": 0.9}, {"share": 0.5, "accuracy": 0.8}],
        "snr": [{"share": 0.0, "accuracy": 0.9}, {"share": 0.9, "accuracy": 0.7}],
    }
    figure = pruning_figure(curves, "accuracy")
    assert [(one.name, one.x, one.y) for one in figure.series] == [
        ("magnitude", (0.0, 0.5), (0.9, 0.8)),
        ("snr", (0.0, 0.9), (0.9, 0.7)),
    ]
    assert (figure.y, figure.percent) == ("accuracy", "xy")
    assert Figure.from_json(figure.to_json()) == figure


def test_the_error_of_a_pruned_regression_is_not_in_percent() -> None:
    figure = pruning_figure({"": [{"share": 0.0, "rmse": 1.5}, {"share": 1.0, "rmse": 2.5}]}, "rmse")
    assert (figure.y, figure.percent) == ("rmse", "x")
    assert figure.series[0].y == (1.5, 2.5)


def test_training_is_plotted_over_the_epochs_that_all_seeds_have() -> None:
    (figure,) = figures.training(SEEDS)
    assert figure.series[0].x == (1, 2, 3, 4)
    assert_band(figure.series[0], [[1 / epoch + 0.01 * seed for epoch in range(1, 5)] for seed in range(3)])
    assert figure.log == "y"
    shorter = changed(SEEDS[1], "record", "history", value=[{"step": 1}, *SEEDS[1].record["history"][1:3]])
    (figure,) = figures.training([SEEDS[0], shorter])
    assert figure.series[0].x == (2, 3)
    assert figures.training([changed(run(), "record", "history", value=[])]) == []


def test_a_negative_nll_is_plotted_on_a_linear_axis() -> None:
    history = [{"epoch": epoch, "validation": {"nll": 1.5 - epoch}} for epoch in (1, 2, 3)]
    (figure,) = figures.training([changed(run(), "record", "history", value=history)])
    assert figure.log == ""
    assert figure.series[0].y == (0.5, -0.5, -1.5)


def point(x: float, y: float, name: str = "", **more: Any) -> Figure:
    return Figure("size", "Size", "points", "MB", "NLL", "Small is good.", (Series(name, (x,), (y,), **more),), log="x")


def with_figures(one: EvaluatedRun, *found: Figure) -> EvaluatedRun:
    return changed(one, "evaluation", "figures", value=[figure.to_json() for figure in found])


def test_single_points_are_joined_over_seeds_and_clouds_are_those_of_the_first_seed() -> None:
    cloud = Figure("plane", "Plane", "points", "μ", "σ", "", (Series("", (1, 2), (3, 4)),))
    other = Figure("plane", "Plane", "points", "μ", "σ", "", (Series("", (5, 6), (7, 8)),))
    some = [with_figures(SEEDS[0], point(1, 0.5), cloud), with_figures(SEEDS[1], point(2, 0.6), other)]
    found = by_key(figures.of_method(some))
    assert found["plane"] == cloud
    assert found["size"].series == (Series("", (1, 2), (0.5, 0.6), labels=("seed 0", "seed 1")),)
    assert found["size"].log == "x"
    assert figures.of_method(some[:1]) == [point(1, 0.5), cloud]


def test_points_are_joined_by_name() -> None:
    some = [
        with_figures(SEEDS[0], point(1, 0.5, "small", labels=("5 %",))),
        with_figures(SEEDS[1], point(2, 0.6, "large")),
    ]
    (figure,) = figures.of_method([*some, SEEDS[2]])
    assert figure.series == (Series("small", (1,), (0.5,), labels=("5 %, seed 0",)),)


# -- figures that some runs lack --------------------------------------------------------------------------------------


def test_figures_show_only_what_all_runs_of_a_method_have() -> None:
    fewer = SEEDS[1]
    fewer = changed(fewer, "evaluation", "ood", "letters", value=None)
    kept = [s for s in fewer.evaluation["shifts"] if s["family"] != "rotation" and s["level"] not in (40, 5)]
    fewer = changed(fewer, "evaluation", "shifts", value=[s for s in kept if s["name"] != "fog"])
    some = [SEEDS[0], fewer]
    (entropies,) = figures.entropies(some)
    assert [series.name for series in entropies.series] == ["correct", "wrong", "noisy"]
    (detection,) = figures.ood_detection(some)
    assert {series.x for series in detection.series} == {("noisy",)}
    shifts = by_key(figures.shifts(some))
    assert not any(key.startswith("rotation") for key in shifts)
    assert shifts["noise-nll"].series[0].x == (-6, -3, 1, 10, 20)
    severities = shifts["corruptions-nll"].series[0]
    assert severities.x == (0, 1, 2, 3, 4)  # at 5 only the first run has this corruption
    expected = [
        [level_scores(one, "nll", name="gaussian_noise" if level else "none", level=level)[0] for level in range(5)]
        for one in some
    ]
    assert_band(severities, expected)
    assert shifts["by-corruption"].series[0].x == ("gaussian noise",)


@pytest.mark.parametrize("first", [True, False])
def test_figures_of_shift_and_ood_data_need_them_in_all_runs(first: bool) -> None:
    none = changed(changed(SEEDS[1], "evaluation", "ood", value={}), "evaluation", "shifts", value=[])
    some = [none, SEEDS[0]] if first else [SEEDS[0], none]
    assert figures.ood_detection(some) == figures.shifts(some) == []
    assert [series.name for series in figures.entropies(some)[0].series] == ["correct", "wrong"]


@pytest.mark.parametrize("first", [True, False])
def test_curves_that_one_run_lacks_are_not_plotted(first: bool) -> None:
    none = changed(SEEDS[1], "evaluation", "curves", value={})
    some = [none, SEEDS[0]] if first else [SEEDS[0], none]
    assert figures.calibration(some, NAMES) == figures.selective(some) == figures.entropies(some) == []
    assert figures.segmentation(some, NAMES) == []
