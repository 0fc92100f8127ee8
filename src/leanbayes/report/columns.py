"""The columns of tables, for the terminal and the report alike, and the winners of each."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from leanbayes.evaluation.seeds import Summary, summarise, winners
from leanbayes.report.document import Cell, Column, Form, Row, Table
from leanbayes.report.runs import AssessedRun, by_method

Best = Literal["high", "low"]
_PLAIN = "over the plain network"

_QUALITY = (
    Column("accuracy", "accuracy", "quality", "high", "percent", "Share of the test examples that are answered right."),
    Column("top5", "top-5", "quality", "high", "percent", "The true class is among the five most probable."),
    Column("miou", "mIoU", "quality", "high", "percent", "Intersection over union, averaged over the classes."),
    Column("rmse", "RMSE", "quality", "low", "number", "Root of the mean squared error, in the target's unit."),
    Column("nll", "NLL", "quality", "low", "decimal", "Minus the log of the probability given to the truth, in nats."),
    Column("crps", "CRPS", "quality", "low", "number", "Distance of the predicted distribution from the truth."),
    Column("brier", "Brier", "quality", "low", "decimal", "Squared distance of the probabilities from the truth."),
    Column("ece", "ECE", "quality", "low", "decimal", "Gap between confidence and accuracy, 15 bins of equal width."),
    Column("adaptive_ece", "adaptive ECE", "quality", "low", "decimal", "The same with 15 bins of equal mass."),
    Column(
        "debiased_classwise_error",
        "class-wise error",
        "quality",
        "low",
        "decimal",
        "Debiased L2 calibration error over all classes, which some papers print as ECE.",
    ),
    Column("aurc", "AURC", "quality", "low", "decimal", "Mean risk when the least sure answers are withheld first."),
    Column(
        "coverage_at_1_percent",
        "coverage at 1 % risk",
        "quality",
        "high",
        "percent",
        "Share of the examples that can be answered with at most 1 % of mistakes.",
    ),
    Column(
        "interval_error",
        "interval error",
        "quality",
        "low",
        "decimal",
        "Gap between what intervals claim and the share of truths inside, over levels from 5 to 95 %.",
    ),
    Column("coverage_95", "95 % interval", "quality", None, "percent", "Share of the truths inside: 95 % is right."),
    Column("width_95", "its width", "quality", None, "number", "Mean width: narrow is good where the interval holds."),
)
_UNCERTAINTY = (
    Column("entropy_right", "entropy if right", "uncertainty", None, "decimal", "Mean entropy of the right answers."),
    Column("entropy_wrong", "entropy if wrong", "uncertainty", None, "decimal", "Mean entropy of the wrong answers."),
    Column(
        "mutual_information",
        "mutual information",
        "uncertainty",
        None,
        "decimal",
        "How much the draws disagree: what more data could remove.",
    ),
    Column("epistemic_std", "epistemic std", "uncertainty", None, "number", "How far the draws' means lie apart."),
)
_EXPLANATION = (
    Column("infidelity", "infidelity", "explanation", "low", "decimal", "How badly saliency maps foretell the output."),
    Column("sensitivity_max", "sensitivity", "explanation", "low", "decimal", "How much the maps change nearby."),
    Column("saliency_std", "map spread", "explanation", None, "decimal", "How far the maps of the draws lie apart."),
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
            ("rotation", "rotated", "On test images turned by 15 to 180 degrees"),
            ("noise", "noisy", "On test inputs with noise, from 40 to −6 dB"),
        )
        for key, shown, best, form in _UNDER_SHIFT
    ),
    Column(
        "noise:spearman",
        "doubt follows noise",
        "shift",
        "high",
        "decimal",
        "Rank correlation of the noise with the mean entropy or std: 1 means that doubt rises at every level.",
    ),
)
_COST = (
    Column("kilo_trained", "trained ×1000", "cost", "low", "number", "Numbers that training adjusts, in thousands."),
    Column("kilo_stored", "stored ×1000", "cost", "low", "number", "Numbers that the model keeps, in thousands."),
    Column("file_kb", "file kB", "cost", "low", "number", "Size of the saved model."),
    Column("epoch_ms", "train ms/epoch", "cost", "low", "number", "Median time of a pass over the training data."),
    Column(
        "train_gflops", "train GFLOPs", "cost", "low", "number", "Counted work of the training; zeros cost nothing."
    ),
    Column("train_peak_mb", "train peak MB", "cost", "low", "number", "Most GPU memory that training has taken."),
    Column("predict_ms_per_1000", "predict ms/1000", "cost", "low", "number", "Time to predict 1000 examples."),
    Column("predict_mflops", "MFLOPs", "cost", "low", "number", "Counted work of one prediction; zeros cost nothing."),
    Column("predict_moved_mb", "moved MB", "cost", "low", "number", "Memory traffic of one example's prediction."),
    Column("predict_peak_mb", "peak MB", "cost", "low", "number", "Memory that predicting one batch takes at most."),
)
_RATIOS = (
    Column("file_ratio", "file × plain", _PLAIN, "low", "times", "Size of the saved model over the plain network's."),
    Column(
        "predict_time_ratio",
        "predict × plain",
        _PLAIN,
        "low",
        "times",
        "Prediction time over a call of the plain network without this library.",
    ),
    Column("train_flops_ratio", "train FLOPs × plain", _PLAIN, "low", "times", "Counted work of the training, too."),
    Column("predict_flops_ratio", "FLOPs × plain", _PLAIN, "low", "times", "Counted work over the plain network's."),
    Column("predict_moved_ratio", "moved × plain", _PLAIN, "low", "times", "Memory traffic over the plain network's."),
    Column("predict_peak_ratio", "peak × plain", _PLAIN, "low", "times", "Peak memory over the plain network's."),
)
# Counted, not measured: where all runs of a method have the same, the least needs no interval to be the least.
_COUNTED = frozenset(
    "kilo_trained kilo_stored file_kb file_ratio train_gflops train_flops_ratio predict_mflops predict_flops_ratio "
    "predict_moved_mb predict_moved_ratio predict_peak_mb predict_peak_ratio".split()
)
_DOUBT = (*_UNCERTAINTY, *_EXPLANATION)
_OOD = "ood:"


def columns(rows: Sequence[Mapping[str, float]]) -> list[Column]:
    """Return the columns that some of the rows have figures for."""
    there = dict.fromkeys(key for row in rows for key, value in row.items() if not math.isnan(value))
    ood = (_auroc(key) for key in there if key.startswith(_OOD))
    return [column for column in (*_QUALITY, *_RATIOS, *_SHIFT, *ood, *_DOUBT, *_COST) if column.key in there]


def known_keys() -> list[str]:
    """Return the keys of all columns there can be, beside those of data of another kind, which begin with `ood:`."""
    return [column.key for column in (*_QUALITY, *_RATIOS, *_SHIFT, *_DOUBT, *_COST)]


def _auroc(key: str) -> Column:
    name = key.removeprefix(_OOD)
    text = f"By entropy: how often an example of {name} looks less sure than one of the test data."
    return Column(key, f"AUROC {name}", "out of distribution", "high", "percent", text)


def table(runs: Sequence[AssessedRun]) -> Table:
    """Lay methods out beside each other, with means and intervals over their seeds, and the winners of each column."""
    groups = by_method(runs)
    figures = {method: [run.figures() for run in group] for method, group in groups.items()}
    shown = columns([row for rows in figures.values() for row in rows])
    values = {
        column.key: {method: [row.get(column.key, math.nan) for row in rows] for method, rows in figures.items()}
        for column in shown
    }
    rows = tuple(
        Row(method, {key: _cell(summarise(of[method])) for key, of in values.items()}, len(group))
        for method, group in groups.items()
    )
    paired = _are_paired(groups)
    best = {column.key: _winners(column, values[column.key], paired) for column in shown}
    return Table(
        tuple(shown),
        rows,
        {key: names for key, names in best.items() if names},
        interval="95 % interval of the mean over seeds",
        note=_note(groups, paired),
    )


def _are_paired(groups: Mapping[str, Sequence[AssessedRun]]) -> bool:
    """Whether all methods have the same seeds, and more than one."""
    seeds = {tuple(run.seed for run in group) for group in groups.values()}
    return len(seeds) == 1 and len(seeds.pop()) > 1


def _winners(column: Column, values: Mapping[str, Sequence[float]], paired: bool) -> tuple[str, ...]:
    """Name the methods that nothing is shown to be better than: by counts, or by intervals over seeds.

    Methods without a figure do not take part. Where all others are alike, none has won.
    """
    known = {method: of for method, of in values.items() if all(map(math.isfinite, of))}
    if column.best is None or len(known) < 2:
        return ()
    if column.key in _COUNTED and all(len(set(of)) == 1 for of in known.values()):
        best = (max if column.best == "high" else min)(of[0] for of in known.values())
        found = [method for method, of in known.items() if of[0] == best]
    else:
        found = winners(known, column.best) if paired else []
    return tuple(found) if len(found) < len(known) else ()


def _cell(summary: Summary) -> Cell:
    return Cell(summary.mean, summary.low, summary.high, summary.values)


def _note(groups: Mapping[str, Sequence[AssessedRun]], paired: bool) -> str:
    if len(groups) < 2:
        return ""
    if paired:
        return (
            "A star marks the methods that no other is shown to beat, by paired differences to the best mean over "
            "seeds (95 % in each column, corrected by Holm for the number of methods). Where all are alike, none is "
            "marked. Counts are compared as they are."
        )
    if all(len(group) == 1 for group in groups.values()):
        return "One seed tells no interval, so no winner is named but by counts: train more seeds."
    return "The methods have different seeds, so no winner is named but by counts."
