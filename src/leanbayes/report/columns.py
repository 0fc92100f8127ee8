"""The columns of tables in the terminal and in the report, and the winners of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from leanbayes.evaluation.seeds import Ranking, Summary, better_than, rank, summarize
from leanbayes.report.document import Cell, Column, Form, Row, Table
from leanbayes.report.evaluated_run import (
    OOD_SCORES,
    EvaluatedRun,
    best_ood_score,
    by_method,
    plain_method,
    with_temperature,
)

Best = Literal["high", "low"]
_PLAIN, _COSTS = "relative to plain", "cost"
_CLOSE = math.log(1.25)  # costs that differ by more are not tied

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
        "error_at_90",
        "error at 90 %",
        "quality",
        "low",
        "percent",
        "Share of wrong answers among the 90 % of the examples that the model is most certain of.",
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
_ALL_OOD = Column(
    "ood",
    "AUROC unknown",
    "out of distribution",
    "high",
    "percent",
    "Probability that an unknown input is more uncertain than a test example, averaged over all OOD data.",
)
# The columns that the page shows at first: the first of each line that has values.
_MAIN = (
    ("accuracy", "rmse"),
    ("nll",),
    ("ece", "interval_error"),
    ("error_at_90", "miou", "crps"),
    ("ood", "coverage_95", "corruptions:nll", "noise:nll"),
    ("predict_time_ratio", "predict_ms_per_1000"),
)


def columns(rows: Sequence[Mapping[str, float]]) -> list[Column]:
    """Return the columns for which some row has a value."""
    present = dict.fromkeys(key for row in rows for key, value in row.items() if not math.isnan(value))
    ood = (_auroc(key) for key in present if key.startswith(_OOD))
    every = (*_QUALITY, _ALL_OOD, *ood, *_RATIOS, *_SHIFT, *_UNCERTAINTY, *_EXPLANATION, *_COST)
    main = {next((key for key in keys if key in present), "") for keys in _MAIN}
    return [replace(column, main=column.key in main) for column in every if column.key in present]


def known_keys() -> list[str]:
    """Return the keys of all possible columns, except those of OOD data sets, which start with `ood:`."""
    return [column.key for column in (*_QUALITY, _ALL_OOD, *_RATIOS, *_SHIFT, *_UNCERTAINTY, *_EXPLANATION, *_COST)]


def _auroc(key: str) -> Column:
    name = key.removeprefix(_OOD)
    text = f"Probability that an example of {name} is more uncertain than a test example."
    return Column(key, f"AUROC {name}", "out of distribution", "high", "percent", text)


def table(runs: Sequence[EvaluatedRun]) -> Table:
    """Return the table of all methods, with means and intervals over seeds, and the winners of each column.

    The plain network with temperature is a method of its own, if it was evaluated.
    """
    plain = plain_method(by_method(runs))
    groups = by_method(with_temperature(runs))
    scaled = next((method for method in groups if method not in {run.method for run in runs}), "")
    scores = {method: best_ood_score(group) for method, group in groups.items()}
    metrics = {method: [run.metrics(scores[method]) for run in group] for method, group in groups.items()}
    shown = columns([row for rows in metrics.values() for row in rows])
    values = {
        column.key: {method: [row.get(column.key, math.nan) for row in rows] for method, rows in metrics.items()}
        for column in shown
    }
    rows = tuple(
        Row(method, {key: _cell(summarize(of[method])) for key, of in values.items()}, len(group))
        for method, group in groups.items()
    )
    paired = _are_paired(groups)
    found = {column.key: _compared(column, values[column.key], plain, scaled, paired) for column in shown}
    notes = (_note(groups, plain, paired), _note_on_ood(groups, scores))
    return Table(
        tuple(shown),
        rows,
        {key: of.stars for key, of in found.items() if of.stars},
        interval="95 % interval of the mean over seeds",
        note=" ".join(filter(None, notes)),
        plain=plain,
        scaled=scaled,
        better_than_plain={key: of.better_than_plain for key, of in found.items() if of.better_than_plain},
        better_than_scaled={key: of.better_than_scaled for key, of in found.items() if of.better_than_scaled},
        better_than_all={key: of.better_than_all for key, of in found.items() if of.better_than_all},
    )


class _Compared(NamedTuple):
    """What is significant in one column."""

    stars: tuple[str, ...] = ()
    better_than_plain: tuple[str, ...] = ()
    better_than_scaled: tuple[str, ...] = ()
    better_than_all: str = ""


def _are_paired(groups: Mapping[str, Sequence[EvaluatedRun]]) -> bool:
    """Whether all methods have the same seeds, and more than one."""
    seeds = {tuple(run.seed for run in group) for group in groups.values()}
    return len(seeds) == 1 and len(seeds.pop()) > 1


def _compared(
    column: Column, values: Mapping[str, Sequence[float]], plain: str, scaled: str, paired: bool
) -> _Compared:
    """Compare the methods in one column: counts exactly, other metrics by tests over seeds.

    Costs are compared by their ratios, so by logarithms: 641 ms is not close to 16 ms because another method needs an
    hour. Methods without a value are left out.
    """
    known = {method: of for method, of in values.items() if all(map(math.isfinite, of))}
    if column.best is None or len(known) < 2:
        return _Compared()
    if column.key in _COUNTED and all(len(set(of)) == 1 for of in known.values()):
        counts = {method: of[0] for method, of in known.items()}
        ranking = _ranked(counts, column.best)
        better, better_than_scaled = (_beat(counts, reference, column.best) for reference in (plain, scaled))
    elif paired:
        margin = math.inf
        if column.group in (_COSTS, _PLAIN) and all(min(of) > 0 for of in known.values()):
            known = {method: [math.log(value) for value in of] for method, of in known.items()}
            margin = _CLOSE
        counted = column.key in _COUNTED
        ranking = rank(known, column.best, margin, counted=counted)
        better, better_than_scaled = (
            better_than(reference, known, column.best, counted=counted) for reference in (plain, scaled)
        )
    else:
        return _Compared()
    leading = {ranking.best, *ranking.tied} if ranking.worse else set()
    alone = ranking.best if len(ranking.worse) == len(values) - 1 else None
    stars = tuple(method for method in known if method in leading.union(better))
    return _Compared(stars, tuple(better), tuple(better_than_scaled), alone or "")


def _ranked(values: Mapping[str, float], best: Best) -> Ranking:
    """Return the ranking by exact values."""
    most = (max if best == "high" else min)(values.values())
    leading = [method for method, value in values.items() if value == most]
    return Ranking(leading[0], tuple(leading[1:]), tuple(method for method in values if method not in leading))


def _beat(values: Mapping[str, float], reference: str, best: Best) -> list[str]:
    """Return the methods with a better exact value than a reference, if there is one."""
    if reference not in values:
        return []
    sign = 1 if best == "high" else -1
    return [method for method, value in values.items() if sign * value > sign * values[reference]]


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


def _note_on_ood(groups: Mapping[str, Sequence[EvaluatedRun]], scores: Mapping[str, str]) -> str:
    """Say by which uncertainty each method detects OOD data."""
    by_score: dict[str, list[str]] = {}
    for method, group in groups.items():
        if any(run.evaluation["ood"] for run in group):
            by_score.setdefault(OOD_SCORES[scores[method]], []).append(method)
    if not by_score:
        return ""
    if len(by_score) == 1:
        return f"Unknown inputs are detected by {next(iter(by_score))}, the best score of each method."
    parts = "; ".join(f"{score} for {', '.join(methods)}" for score, methods in by_score.items())
    return f"Unknown inputs are detected by the best score of each method: {parts}."
