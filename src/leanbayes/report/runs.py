"""A trained run as reports see it: its record, what `assess` found, and from them one flat set of figures."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanbayes.evaluation.cost import training_flops
from leanbayes.evaluation.seeds import spearman
from leanbayes.flops import Flops


@dataclass(frozen=True)
class AssessedRun:
    """One training of a method: its `run.json`, and what `leanbayes.evaluation.assess` found."""

    method: str  # as the report calls it
    seed: int
    record: Mapping[str, Any]
    assessment: Mapping[str, Any]

    @property
    def scores(self) -> Mapping[str, float]:
        """Scores on the test data."""
        return self.assessment["scores"]

    def figures(self) -> dict[str, float]:
        """Return all that a table may show, by the keys of its columns."""
        found = self.assessment
        costs = {**in_columns(self.record["costs"]), **_predicting(found["costs"]), **self._training_work()}
        values = {**found["scores"], **_means(found["shifts"]), **_doubt_and_noise(found["shifts"]), **costs}
        values |= found.get("explanation", {})
        for name, one in found["ood"].items():
            values[f"ood:{name}"] = one["by"]["entropy"]["auroc"]
        return values

    def _training_work(self) -> dict[str, float]:
        """Count the work of the whole training, and that of the plain network with as many examples."""
        costs, recipe, history = self.assessment["costs"], self.record["config"]["recipe"], self.record["history"]
        if not history:
            return {}
        forward, seen = costs["train_flops"], history[-1]["step"] * recipe["batch_size"]
        work = training_flops(Flops(effective=round(forward)), seen, 1, recipe["samples"]).effective
        ratio = forward * recipe["samples"] / costs["plain"]["predict_flops"]
        return {"train_gflops": work / 1e9, "train_flops_ratio": ratio}


def by_method(runs: Iterable[AssessedRun]) -> dict[str, list[AssessedRun]]:
    """Sort runs into methods, and those of each by their seeds."""
    groups: dict[str, list[AssessedRun]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return {method: sorted(group, key=lambda run: run.seed) for method, group in groups.items()}


def in_columns(costs: Mapping[str, Any]) -> dict[str, float]:
    """Bring the costs of a training to the units of the columns."""
    values = {"kilo_trained": costs["trainable"] / 1e3, "kilo_stored": costs["stored"] / 1e3}
    if "file_bytes" in costs:
        values["file_kb"] = costs["file_bytes"] / 1e3
    if costs.get("epoch_seconds"):
        values["epoch_ms"] = 1e3 * statistics.median(costs["epoch_seconds"])
    if "peak_memory_bytes" in costs:
        values["train_peak_mb"] = costs["peak_memory_bytes"] / 1e6
    return values


def _predicting(costs: Mapping[str, Any]) -> dict[str, float]:
    """Bring the costs of a model and of its predictions to the units of the columns."""
    ours, ratios = costs["ours"], costs["ratios"]
    return {
        "kilo_trained": ours["trainable"] / 1e3,
        "kilo_stored": ours["stored"] / 1e3,
        "file_kb": ours["file_bytes"] / 1e3,
        "file_ratio": ratios["file_bytes"],
        "predict_ms_per_1000": ours["predict_ms_per_1000"],
        "predict_time_ratio": ratios["predict_ms_per_1000"],
        "predict_mflops": ours["predict_effective_flops"] / 1e6,
        "predict_flops_ratio": ratios["predict_effective_flops"],
        "predict_moved_mb": ours["predict_bytes_moved"] / 1e6,
        "predict_moved_ratio": ratios["predict_bytes_moved"],
        "predict_peak_mb": ours["predict_peak_bytes"] / 1e6,
        "predict_peak_ratio": ratios["predict_peak_bytes"],
    }


def _means(shifts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average accuracy, likelihood and calibration over all levels of each kind of shift."""
    values = {}
    for family in ("corruptions", "rotation", "noise"):
        scores = [one["scores"] for one in shifts if one["family"] == family]
        for key in ("accuracy", "nll", "ece", "rmse", "miou"):
            found = [one[key] for one in scores if key in one]
            if found:
                values[f"{family}:{key}"] = statistics.fmean(found)
    return values


def _doubt_and_noise(shifts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Correlate the ranks of the noise and of the mean doubt: 1 where doubt rises at every level."""
    levels = [one for one in shifts if one["family"] == "noise"]
    for key in ("entropy", "std"):
        found = [
            (-one["level"], one["scores"][key]) for one in levels if math.isfinite(one["scores"].get(key, math.nan))
        ]
        if found:
            return {"noise:spearman": spearman(*zip(*found, strict=True)).statistic}
    return {}
