"""A trained and evaluated run, and its metrics as one flat dict."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanbayes.core.flops import Flops
from leanbayes.evaluation.cost import training_flops
from leanbayes.evaluation.seeds import spearman

OOD_SCORES = {"entropy": "entropy", "mutual_information": "mutual information", "max_probability": "confidence"}
_MAIN_SCORES = ("accuracy", "miou", "rmse", "nll", "ece", "crps")


@dataclass(frozen=True)
class EvaluatedRun:
    """One trained model of a method, with its evaluation: what a report is made of.

    `evaluate_for_report` creates it from a model.

    Attributes:
        method: Name of the method in the report.
        seed: Seed of the training. Runs of one method with different seeds become one row.
        record: The record of the training, as in `run.json`.
        evaluation: What `evaluate_fully` returned.

    Example:
        >>> run = evaluate_for_report("mean-field", bnn, data)
        >>> run
        EvaluatedRun('mean-field', seed 0, digits, accuracy 0.972, nll 0.0981, ece 0.0123)
        >>> run.metrics()["predict_time_ratio"]
    """

    method: str
    seed: int
    record: Mapping[str, Any]
    evaluation: Mapping[str, Any]

    def __repr__(self) -> str:
        main = [f"{key} {self.scores[key]:.3g}" for key in _MAIN_SCORES if key in self.scores]
        parts = [repr(self.method), f"seed {self.seed}", str(self.record["config"]["data"]), *main]
        return f"EvaluatedRun({', '.join(parts)})"

    @property
    def scores(self) -> Mapping[str, float]:
        """The scores on the test data."""
        return self.evaluation["scores"]

    def metrics(self, ood_score: str = "entropy") -> dict[str, float]:
        """Return all metrics that a table may show, by the keys of its columns.

        Args:
            ood_score: The uncertainty by which OOD data are detected: "max_probability", "entropy" or
                "mutual_information".

        Returns:
            Scores on the test data, their means under each shift (such as "corruptions:nll"), AUROCs of OOD data (such
            as "ood:svhn") and their mean ("ood"), and costs.
        """
        found = self.evaluation
        costs = {**in_columns(self.record["costs"]), **_predicting(found["costs"]), **self._training_work()}
        values = {**found["scores"], **_means(found["shifts"]), **_uncertainty_and_noise(found["shifts"]), **costs}
        values |= found.get("explanation", {})
        for name, one in found["ood"].items():
            values[f"ood:{name}"] = one["by"][ood_score]["auroc"]
        if found["ood"]:
            values["ood"] = statistics.fmean(values[f"ood:{name}"] for name in found["ood"])
        return values

    def _training_work(self) -> dict[str, float]:
        """Return the FLOPs of the whole training, and their ratio to those of the deterministic network."""
        costs, recipe, history = self.evaluation["costs"], self.record["config"]["recipe"], self.record["history"]
        if not history:
            return {}
        forward, seen = costs["train_flops"], history[-1]["step"] * recipe["batch_size"]
        work = training_flops(Flops(effective=round(forward)), seen, 1, recipe["samples"]).effective
        ratio = forward * recipe["samples"] / costs["plain"]["predict_flops"]
        return {"train_gflops": work / 1e9, "train_flops_ratio": ratio}


def by_method(runs: Iterable[EvaluatedRun]) -> dict[str, list[EvaluatedRun]]:
    """Group runs by method, sorted by seed."""
    groups: dict[str, list[EvaluatedRun]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return {method: sorted(group, key=lambda run: run.seed) for method, group in groups.items()}


def plain_method(groups: Mapping[str, Sequence[EvaluatedRun]]) -> str:
    """Return the first method that is the plain (deterministic) network, or "" if there is none."""
    for method, runs in groups.items():
        kind = (runs[0].record["config"].get("method") or {}).get("type", method.partition(":")[0])
        if kind in ("Deterministic", "deterministic"):
            return method
    return ""


def with_temperature(runs: Sequence[EvaluatedRun]) -> list[EvaluatedRun]:
    """Add the plain network with temperature as another method, if others are compared with it."""
    plain = plain_method(by_method(runs))
    own = [run for run in runs if run.method == plain]
    if not own or len(own) == len(runs) or not all(run.evaluation["scaled"] for run in own):
        return [*runs]
    first = next(place for place, run in enumerate(runs) if run.method == plain)
    name = f"{plain} + temperature"
    alone: dict[str, Any] = {"scaled": {}, "pruning": {}, "explanation": {}, "figures": [], "galleries": []}
    added = [
        EvaluatedRun(name, run.seed, run.record, {**run.evaluation, **run.evaluation["scaled"], **alone}) for run in own
    ]
    return [*runs[: first + 1], *added, *runs[first + 1 :]]


def best_ood_score(runs: Sequence[EvaluatedRun]) -> str:
    """Return the uncertainty with the highest mean AUROC over all OOD data and runs; of equal ones, the first.

    One score is chosen for all of them, because a user has to choose one, too.
    """
    found = [one["by"] for run in runs for one in run.evaluation["ood"].values()]
    return max(OOD_SCORES, key=lambda score: sum(by[score]["auroc"] for by in found if score in by))


def ood_words(name: str) -> str:
    """Return what the examples of an OOD data set are called in a sentence."""
    return f"{name} inputs" if name in ("noisy", "rotated") else name


def in_columns(costs: Mapping[str, Any]) -> dict[str, float]:
    """Convert the costs of a training to the units of the columns."""
    values = {"kilo_trained": costs["trainable"] / 1e3, "kilo_stored": costs["stored"] / 1e3}
    if "file_bytes" in costs:
        values["file_kb"] = costs["file_bytes"] / 1e3
    if costs.get("epoch_seconds"):
        values["epoch_ms"] = 1e3 * statistics.median(costs["epoch_seconds"])
    if "peak_memory_bytes" in costs:
        values["train_peak_mb"] = costs["peak_memory_bytes"] / 1e6
    return values


def _predicting(costs: Mapping[str, Any]) -> dict[str, float]:
    """Convert the costs of a model and of its predictions to the units of the columns."""
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
    """Average accuracy, NLL and calibration over all levels of each kind of shift."""
    values = {}
    for family in ("corruptions", "rotation", "noise"):
        scores = [one["scores"] for one in shifts if one["family"] == family]
        for key in ("accuracy", "nll", "ece", "rmse", "miou"):
            found = [one[key] for one in scores if key in one]
            if found:
                values[f"{family}:{key}"] = statistics.fmean(found)
    return values


def _uncertainty_and_noise(shifts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the rank correlation of noise and mean uncertainty: 1 if the uncertainty rises at every level."""
    levels = [one for one in shifts if one["family"] == "noise"]
    for key in ("entropy", "std"):
        found = [
            (-one["level"], one["scores"][key]) for one in levels if math.isfinite(one["scores"].get(key, math.nan))
        ]
        if found:
            return {"noise:spearman": spearman(*zip(*found, strict=True)).statistic}
    return {}
