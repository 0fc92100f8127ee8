"""Made-up evaluated runs of classifiers, for tests of reports."""

import copy
import io
import math
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from leanbayes.report import EvaluatedRun

CLASSES, EXAMPLES, BINS = 6, 200, 15
NAMES = ("zero", "one", "two", "three", "four", "five")
CORRUPTIONS = ("fog", "gaussian_noise")
DECIBELS = (40, 20, 10, 5, 1, -3, -6)


def bins(random: np.random.Generator, examples: int = EXAMPLES) -> list[list[float]]:
    """Sums of confidence, correct predictions and examples in each bin, of which the first is empty."""
    counts = np.concatenate([[0], random.multinomial(examples, np.ones(BINS - 1) / (BINS - 1))])
    return [(counts * (np.arange(BINS) + 0.5) / BINS).tolist(), random.binomial(counts, 0.6).tolist(), counts.tolist()]


def scores_of(random: np.random.Generator, quality: float) -> dict[str, float]:
    return {
        "accuracy": 0.8 + quality + 0.001 * random.normal(),
        "nll": 0.5 - quality + 0.001 * random.normal(),
        "ece": 0.05 + 0.01 * random.random(),
        "entropy": 0.4 + 0.1 * random.random(),
    }


def shifts(random: np.random.Generator, quality: float) -> list[dict[str, Any]]:
    places: list[tuple[str, str, float]] = [("none", "none", 0)]
    places += [("corruptions", name, level) for name in CORRUPTIONS for level in range(1, 6)]
    places += [("rotation", "rotation", angle) for angle in (15, 90, 180)]
    places += [("noise", "noise", decibels) for decibels in DECIBELS]
    places += [("labels", "labels", concentration) for concentration in (10.0, 1.0, 0.1)]
    return [
        {"family": family, "name": name, "level": level, "scores": scores_of(random, quality)}
        for family, name, level in places
    ]


def ood(random: np.random.Generator) -> dict[str, Any]:
    measures = ("max_probability", "entropy", "mutual_information")
    kinds = ("auroc", "aupr_in", "aupr_out", "fpr95", "fpr85")
    return {
        "examples": 50,
        "by": {measure: {kind: random.random() for kind in kinds} for measure in measures},
        "entropy": random.multinomial(50, np.ones(30) / 30).tolist(),
    }


def mistakes(random: np.random.Generator) -> dict[str, list[Any]]:
    """Wrong answers to 20 of the examples."""
    index = random.choice(EXAMPLES, 20, replace=False)
    truth = index % CLASSES
    return {
        "index": index.tolist(),
        "truth": truth.tolist(),
        "answer": ((truth + 1) % CLASSES).tolist(),
        "confidence": np.sort(random.random(20))[::-1].tolist(),
    }


def costs(size: int) -> dict[str, Any]:
    names = (
        "trainable stored file_bytes samples predict_flops predict_effective_flops predict_bytes_moved "
        "predict_peak_bytes predict_ms_per_1000"
    ).split()
    ours = {name: float(size * (number + 1)) for number, name in enumerate(names)}
    ours["samples"] = 30
    plain = {name: 100.0 * (number + 1) for number, name in enumerate(names)}
    return {
        "examples": 20,
        "ours": ours,
        "plain": plain,
        "ratios": {name: ours[name] / plain[name] for name in names},
        "train_flops": 3.0 * size,
    }


def record(seed: int, size: int) -> dict[str, Any]:
    return {
        "status": "finished",
        "config": {
            "data": "digits",
            "examples": "abc",
            "classes": list(NAMES),
            "model": {"name": "mlp"},
            "recipe": {"epochs": 5, "batch_size": 16, "temperature": 1.0, "samples": 2, "seed": seed},
        },
        "command": f"leanbayes fit --seed {seed}",
        "versions": {"leanbayes": "0.1.0", "torch": "2.13.0"},
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 4, "threads": 1, "gpus": []},
        "history": [{"step": 8 * e, "epoch": e, "validation": {"nll": 1 / e + 0.01 * seed}} for e in range(1, 5)],
        "scores": {},
        "costs": {"trainable": size, "stored": size, "file_bytes": 4 * size, "epoch_seconds": [0.1, 0.3, 0.2 + size]},
    }


def run(method: str = "mean-field", seed: int = 0, quality: float = 0.0, size: int = 200) -> EvaluatedRun:
    """One run; the higher the quality, the better its scores, apart from a little noise."""
    random = np.random.default_rng([seed, len(method), int(1e4 * quality)])
    answered = np.sort(random.random(20)).cumsum()
    found = {
        "settings": {"samples": None, "rule": None, "shifts": [], "shift_examples": 100, "ood_examples": 50, "seed": 0},
        "scores": {**scores_of(random, quality), "entropy_wrong": math.nan, "examples": EXAMPLES},
        "curves": {
            "reliability": bins(random),
            "class_reliability": [bins(random) for _ in range(CLASSES)],
            "risk_coverage": [(answered / answered[-1]).tolist(), np.sort(random.random(20)).tolist()],
            "entropy_edges": np.linspace(0, math.log(CLASSES), 31).tolist(),
            "entropy_right": random.multinomial(150, np.ones(30) / 30).tolist(),
            "entropy_wrong": random.multinomial(50, np.ones(30) / 30).tolist(),
        },
        "mistakes": mistakes(random),
        "asking": {"threshold": 0.8, "asked": 0.1, "wrong": 0.01, "wrong_without": 0.05},
        "scaled": {},
        "shift_examples": 100,
        "shifts": shifts(random, quality),
        "ood": {"letters": ood(random), "noisy": ood(random)},
        "pruning": {
            by: [{"share": share, **scores_of(random, quality - share)} for share in (0.0, 0.5, 0.9)]
            for by in ("magnitude", "snr")
        },
        "explanation": {"infidelity": random.random(), "sensitivity_max": random.random()},
        "costs": costs(size),
        "figures": [],
        "galleries": [],
        "notes": [],
    }
    return EvaluatedRun(method, seed, record(seed, size), found)


def runs(qualities: dict[str, float], seeds: Sequence[int] = (0, 1, 2)) -> list[EvaluatedRun]:
    """Runs of several methods."""
    return [
        run(method, seed, quality, 200 + 100 * number)
        for number, (method, quality) in enumerate(qualities.items())
        for seed in seeds
    ]


def changed(one: EvaluatedRun, *path: str, value: Any) -> EvaluatedRun:
    """A copy of a run with another value in its evaluation or record; None removes the value."""
    parts = {"record": copy.deepcopy(one.record), "evaluation": copy.deepcopy(one.evaluation)}
    place: Any = parts
    for name in path[:-1]:
        place = place[name]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return EvaluatedRun(one.method, one.seed, **parts)


def with_scaled(one: EvaluatedRun, **scores: float) -> EvaluatedRun:
    """A run of a plain network that was also evaluated with temperature."""
    found = one.evaluation
    kept = {key: found[key] for key in ("curves", "mistakes", "asking", "shifts", "ood")}
    scaled = {"temperature": 1.5, "scores": {**found["scores"], **scores}, **kept}
    return changed(one, "evaluation", "scaled", value=scaled)


def picture(index: int) -> dict[str, Any]:
    """The picture of a test example, as a run stores it."""
    return {"index": index, "pngs": [png(3, 2, shade=index)], "caption": f"caption {index}", "alt": f"alt {index}"}


def png(width: int, height: int, label: str = "", shade: int = 0) -> dict[str, str]:
    """An image of one shade, as a run stores it."""
    file = io.BytesIO()
    Image.new("L", (width, height), shade % 256).save(file, "PNG")
    return {"data": b64encode(file.getvalue()).decode(), "label": label}
