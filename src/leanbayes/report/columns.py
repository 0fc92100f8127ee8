"""The columns of tables in the terminal and in the report, and the winners of each."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from leanbayes.evaluation.seeds import Ranking, Summary, better_than, rank, summarize
from leanbayes.report.document import Cell, Column, Form, Row, Table
from leanbayes.report.evaluated_run import EvaluatedRun, by_method, plain_method

Best = Literal["high", "low"]
_PLAIN, _COSTS = "relative to the deterministic network", "cost"

_QUALITY = (
    Column("accuracy", "accuracy", "quality", "high", "percent", "Share of correct predictions on the test data."),
    Column("top5", "top-5", "quality", "high", "percent", "The true class is among the five most probable classes."),
    Column("miou", "mIoU", "quality", "high", "percent", "Mean intersection over union of the classes."),
    Column("rmse", "RMSE", "quality", "low", "number", "Root mean squared error, in the unit of the target."),
    Column("nll", "NLL", "quality", "low", "decimal", "Negative log-likelihood, in nats."),
    Column("crps", "CRPS", "quality", "low", "number", "Distance of the predicted distribution from the target."),
    Column("brier", "Brier", "quality", "low", "decimal", "Squared distance of the probabilities from the true class."),
    Column("ece", "ECE", "quality", "low", "decimal", "Gap between confidence and accuracy, 15 bins of equal width."),
    Column("adaptive_ece", "adaptive ECE", "quality", "low", "decimal", "ECE with 15 bins of equal mass."),
    Column(
        "debiased_classwise_error",
        "class-wise error",
        "quality",
        "low",
        "decimal",
        "Debiased L2 calibration error over all classes, which some papers report as ECE.",
    ),
    Column("aurc", "AURC", "quality", "low", "decimal", "Area under the risk-coverage curve."),
    Column(
        "coverage_at_1_percent",
        "coverage at 1 % risk",
        "quality",
        "high",
        "percent",
        "Largest share of the examples, the most certain first, with at most 1 % errors.",
    ),
    Column(
        "interval_error",
        "interval error",
        "quality",
        "low",
        "decimal",
        "Gap between nominal and actual coverage of intervals, over levels from 5 to 95 %.",
    ),
    Column("coverage_95", "95 % interval", "quality", None, "percent", "Share of the targets inside, ideally 95 %."),
    Column(
        "width_95",
        "interval width",
        "quality",
        None,
        "number",
        "Mean width: narrow is good if the coverage is 95 %.",
    ),
)
_UNCERTAINTY = (
    Column("entropy_right", "entropy if right", "uncertainty", None, "decimal", "Mean entropy of correct predictions."),
    Column("entropy_wrong", "entropy if wrong", "uncertainty", None, "decimal", "Mean entropy of wrong predictions."),
    Column(
        "mutual_information",
        "mutual information",
        "uncertainty",
        None,
        "decimal",
        "Disagreement between samples of the weights: the uncertainty that more data could reduce.",
    ),
    Column("epistemic_std", "epistemic std", "uncertainty", None, "number", "Std of the predicted means over samples."),
)
_EXPLANATION = (
    Column("infidelity", "infidelity", "explanation", "low", "decimal", "Error of saliency maps about changes."),
    Column("sensitivity_max", "sensitivity", "explanation", "low", "decimal", "Largest change of the maps nearby."),
    Column("saliency_std", "map std", "explanation", None, "decimal", "Relative std of the maps over samples."),
)
_UNDER_SHIFT: tuple[tuple[str, str, Best, Form], ...] = (
    ("accuracy", "accuracy", "high", "percent"),
    ("rmse", "RMSE", "low", "number"),
    ("miou", "mIoU", "high", "percent"),
    ("nll", "NLL", "low", "decimal"),
    ("ece", "ECE", "low", "decimal"),
)
_SHIFT = (
    *(
        Column(f"{family}:{key}", f"{title} {shown}", "shift", best, form, f"{what}, averaged over all levels.")
        for family, title, what in (
            ("corruptions", "corrupted", "On corrupted test images, at five severities"),
            ("rotation", "rotated", "On test images rotated by 15 to 180 degrees"),
            ("noise", "noisy", "On test inputs with noise, from 40 to −6 dB"),
        )
        for key, shown, best, form in _UNDER_SHIFT
    ),
    Column(
        "noise:spearman",
        "uncertainty follows noise",
        "shift",
        "high",
        "decimal",
        "Rank correlation of the noise with the mean entropy or std: 1 if uncertainty rises at every level.",
    ),
)
_COST = (
    Column("kilo_trained", "trained ×1000", _COSTS, "low", "number", "Trainable numbers, in thousands."),
    Column("kilo_stored", "stored ×1000", _COSTS, "low", "number", "Numbers in the model file, in thousands."),
    Column("file_kb", "file kB", _COSTS, "low", "number", "Size of the model file."),
    Column("epoch_ms", "train ms/epoch", _COSTS, "low", "number", "Median time per epoch."),
    Column(
        "train_gflops", "train GFLOPs", _COSTS, "low", "number", "FLOPs of the training; zero weights do not count."
    ),
    Column("train_peak_mb", "train peak MB", _COSTS, "low", "number", "Peak GPU memory of the training."),
    Column("predict_ms_per_1000", "predict ms/1000", _COSTS, "low", "number", "Time to predict 1000 examples."),
    Column("predict_mflops", "MFLOPs", _COSTS, "low", "number", "FLOPs per example; zero weights do not count."),
    Column("predict_moved_mb", "moved MB", _COSTS, "low", "number", "Memory traffic to predict one example."),
    Column("predict_peak_mb", "peak MB", _COSTS, "low", "number", "Peak memory to predict one batch."),
)
_RATIOS = (
    Column("file_ratio", "file × plain", _PLAIN, "low", "times", "Relative size of the model file."),
    Column(
        "predict_time_ratio",
        "predict × plain",
        _PLAIN,
        "low",
        "times",
        "Prediction time relative to a call of the deterministic network without this library.",
    ),
    Column("train_flops_ratio", "train FLOPs × plain", _PLAIN, "low", "times", "Relative FLOPs of the training."),
    Column("predict_flops_ratio", "FLOPs × plain", _PLAIN, "low", "times", "Relative FLOPs of a prediction."),
    Column("predict_moved_ratio", "moved × plain", _PLAIN, "low", "times", "Relative memory traffic of a prediction."),
    Column("predict_peak_ratio", "peak × plain", _PLAIN, "low", "times", "Relative peak memory of a prediction."),
)
# Counted, not measured: if all runs of a method have the same value, no interval is needed to find the lowest.
_COUNTED = frozenset(
    "kilo_trained kilo_stored file_kb file_ratio train_gflops train_flops_ratio predict_mflops predict_flops_ratio "
    "predict_moved_mb predict_moved_ratio predict_peak_mb predict_peak_ratio".split()
)
_OOD = "ood:"


def columns(rows: Sequence[Mapping[str, float]]) -> list[Column]:
    """Return the columns for which some row has a value."""
    present = dict.fromkeys(key for row in rows for key, value in row.items() if not math.isnan(value))
    ood = (_auroc(key) for key in present if key.startswith(_OOD))
    every = (*_QUALITY, *_RATIOS, *_SHIFT, *ood, *_UNCERTAINTY, *_EXPLANATION, *_COST)
    return [column for column in every if column.key in present]


def known_keys() -> list[str]:
    """Return the keys of all possible columns, except those of OOD data sets, which start with `ood:`."""
    return [column.key for column in (*_QUALITY, *_RATIOS, *_SHIFT, *_UNCERTAINTY, *_EXPLANATION, *_COST)]


def _auroc(key: str) -> Column:
    name = key.removeprefix(_OOD)
    text = f"Probability that an example of {name} has a higher entropy than a test example."
    return Column(key, f"AUROC {name}", "out of distribution", "high", "percent", text)


def table(runs: Sequence[EvaluatedRun]) -> Table:
    """Return the table of all methods, with means and intervals over seeds, and the winners of each column."""
    groups = by_method(runs)
    metrics = {method: [run.metrics() for run in group] for method, group in groups.items()}
    shown = columns([row for rows in metrics.values() for row in rows])
    values = {
        column.key: {method: [row.get(column.key, math.nan) for row in rows] for method, rows in metrics.items()}
        for column in shown
    }
    rows = tuple(
        Row(method, {key: _cell(summarize(of[method])) for key, of in values.items()}, len(group))
        for method, group in groups.items()
    )
    paired, plain = _are_paired(groups), plain_method(groups)
    found = {column.key: _compared(column, values[column.key], plain, paired) for column in shown}
    return Table(
        tuple(shown),
        rows,
        {key: of.stars for key, of in found.items() if of.stars},
        interval="95 % interval of the mean over seeds",
        note=_note(groups, plain, paired),
        plain=plain,
        better_than_plain={key: of.better_than_plain for key, of in found.items() if of.better_than_plain},
        better_than_all={key: of.better_than_all for key, of in found.items() if of.better_than_all},
    )


class _Compared(NamedTuple):
    """What is significant in one column."""

    stars: tuple[str, ...] = ()
    better_than_plain: tuple[str, ...] = ()
    better_than_all: str = ""


def _are_paired(groups: Mapping[str, Sequence[EvaluatedRun]]) -> bool:
    """Whether all methods have the same seeds, and more than one."""
    seeds = {tuple(run.seed for run in group) for group in groups.values()}
    return len(seeds) == 1 and len(seeds.pop()) > 1


def _compared(column: Column, values: Mapping[str, Sequence[float]], plain: str, paired: bool) -> _Compared:
    """Compare the methods in one column: counts exactly, other metrics by tests over seeds.

    Costs are compared by their ratios, so by logarithms: 641 ms is not close to 16 ms because another method needs an
    hour. Methods without a value are left out.
    """
    known = {method: of for method, of in values.items() if all(map(math.isfinite, of))}
    if column.best is None or len(known) < 2:
        return _Compared()
    if column.key in _COUNTED and all(len(set(of)) == 1 for of in known.values()):
        ranking, better = _by_counts({method: of[0] for method, of in known.items()}, plain, column.best)
    elif paired:
        if column.group in (_COSTS, _PLAIN) and all(min(of) > 0 for of in known.values()):
            known = {method: [math.log(value) for value in of] for method, of in known.items()}
        ranking, better = rank(known, column.best), better_than(plain, known, column.best)
    else:
        return _Compared()
    leading = {ranking.best, *ranking.tied} if ranking.worse else set()
    alone = ranking.best if len(ranking.worse) == len(values) - 1 else None
    return _Compared(tuple(method for method in known if method in leading.union(better)), tuple(better), alone or "")


def _by_counts(values: Mapping[str, float], plain: str, best: Best) -> tuple[Ranking, list[str]]:
    """Return the ranking, and the methods that are better than the plain network, by exact values."""
    sign = 1 if best == "high" else -1
    most = max(sign * value for value in values.values())
    leading = [method for method, value in values.items() if sign * value == most]
    worse = tuple(method for method in values if method not in leading)
    better = [method for method in values if sign * values[method] > sign * values.get(plain, math.inf * sign)]
    return Ranking(leading[0], tuple(leading[1:]), worse), better


def _cell(summary: Summary) -> Cell:
    return Cell(summary.mean, summary.low, summary.high, summary.values)


def _note(groups: Mapping[str, Sequence[EvaluatedRun]], plain: str, paired: bool) -> str:
    if len(groups) < 2:
        return ""
    if paired:
        beside = f"that are significantly better than {plain}, and those " if plain else ""
        return (
            f"A star marks methods {beside}that are the best or shown to be nearly as good, by paired t-tests over "
            "seeds (95 % per column, with Holm's correction). If nothing is significant, no method is marked. Counts "
            "are compared directly."
        )
    if all(len(group) == 1 for group in groups.values()):
        return "With one seed there are no intervals, so only counts have winners: train more seeds."
    return "The methods have different seeds, so only counts have winners."
