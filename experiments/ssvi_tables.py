"""The tables on SSVI: what its paper has and what we have, and what its removal criteria have in common."""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NETWORK = "resnet-18"
SPARSE_FILES = ("cifar10_resnet18", "cifar10_ssvi", "cifar10_ssvi_paper", "cifar100_ssvi")
SPARSE_COLUMNS = {
    "accuracy": ("accuracy", "{:.2%}", 1.0),
    "nll": ("NLL", "{:.3f}", 1.0),
    "debiased_classwise_error": ("class-wise error", "{:.4f}", 1.0),
    "ece": ("ECE", "{:.4f}", 1.0),
}
SPARSE_COSTS = {
    "train_gflops": ("10¹⁵ FLOPs to train", "{:.1f}", 1e-6),
    "file_kb": ("MB on disk", "{:.2f}", 1e-3),
    "epoch_ms": ("s/epoch", "{:.2f}", 1e-3),
}
# Tables 1 to 3 of Li et al. 2024, by density; the last does not say which one it is for. Their ECE is class-wise.
SSVI_PAPER: dict[str, dict[float, dict[str, Any]]] = {
    "cifar10": {
        1.0: {"accuracy": 0.9513, "debiased_classwise_error": 0.004, "train_gflops": 1.1e8},
        0.1: {"accuracy": 0.9458, "debiased_classwise_error": 0.005, "train_gflops": 1.1e7},
        0.05: {
            "accuracy": 0.9374,
            "nll": 0.218,
            "debiased_classwise_error": 0.006,
            "train_gflops": 5.7e6,
            "ood": {"cifar100": (0.86, 0.84), "svhn": (0.93, 0.96)},
        },
    },
    "cifar100": {
        1.0: {"accuracy": 0.7820, "debiased_classwise_error": 0.0016, "train_gflops": 1.2e8},
        0.1: {
            "accuracy": 0.7581,
            "nll": 0.983,
            "debiased_classwise_error": 0.0017,
            "train_gflops": 1.14e7,
            "ood": {"cifar10": (0.80, 0.77), "svhn": (0.85, 0.91)},
        },
        0.05: {"accuracy": 0.7383, "debiased_classwise_error": 0.0018, "train_gflops": 6e6},
    },
}
PAPER_EPOCHS, PAPER_DRAWS = 200, 5
OOD_SCORES = ("auroc", "aupr_out")
WHOLE = {"svhn": 26_032}  # AUPR of a part of it cannot be compared: it follows the proportion of the two kinds


def overlap_table(record: dict[str, Any], title: str) -> str:
    """Lay out which share of the weights two removal criteria would both remove, at three points of a training."""
    machine, exchanges, criteria = record["machine"], record["exchanges"], record["criteria"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    default = record["method"]["removal"]
    chosen = [exchanges[0], exchanges[len(exchanges) // 2], exchanges[-1]]
    pairs = list(itertools.combinations(range(5), 2))
    lines = [
        f"## {title}\n",
        f"`{record['command']}`\n",
        f"{where}, torch {record['versions']['torch']}, {len(exchanges)} exchanges. Intersection over union of what "
        f"`{default}`, which was trained with, and another criterion would remove; and the mean over the pairs of the "
        "first five, as in the paper.\n",
        "| | " + " | ".join(f"step {one['step']:,}" for one in chosen) + " |",
        "|---|" + "---:|" * len(chosen),
    ]
    for number, name in enumerate(criteria):
        if name != default:
            values = (one["iou"][criteria.index(default)][number] for one in chosen)
            lines.append(f"| `{name}` | {' | '.join(f'{value:.3f}' for value in values)} |")
    means = (statistics.fmean(one["iou"][a][b] for a, b in pairs) for one in chosen)
    return "\n".join([*lines, f"| mean of pairs | {' | '.join(f'{value:.3f}' for value in means)} |"])


def sparse_tables(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Lay out what the paper on SSVI has and what we have: a table a data set that SSVI was trained on."""
    entries = list(entries)
    for data, paper in SSVI_PAPER.items():
        ours = [one for one in entries if one["data"] == data]
        if not any(one["name"].startswith("SSVI") for one in ours):
            continue
        theirs = [
            {"name": "paper", "density": density, "epochs": PAPER_EPOCHS, "draws": PAPER_DRAWS, **figures}
            for density, figures in paper.items()
        ]
        others = list(dict.fromkeys(name for one in theirs for name in one.get("ood", ())))
        titles = ["density", "epochs", "draws", *(title for title, _, _ in SPARSE_COLUMNS.values())]
        titles += [f"AUROC / AUPR {name}" for name in others] + [title for title, _, _ in SPARSE_COSTS.values()]
        lines = [f"**{NETWORK} on {data}**\n", f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
        for one in sorted([*theirs, *ours], key=lambda one: (-one["density"], one["name"] != "paper")):
            cells = [f"{one['density']:.0%}", str(one["epochs"]), str(one["draws"]), *written(one, SPARSE_COLUMNS)]
            pairs = (one.get("ood", {}).get(name) for name in others)
            cells += ["" if pair is None else " / ".join(f"{value:.2f}" for value in pair) for pair in pairs]
            lines.append(f"| {one['name']} | {' | '.join([*cells, *written(one, SPARSE_COSTS)])} |")
        yield "\n".join(lines)


def written(figures: dict[str, Any], columns: dict[str, tuple[str, str, float]]) -> list[str]:
    """Write the figures of some columns; one that is not known is left empty."""
    known = ((figures.get(key), form, factor) for key, (_, form, factor) in columns.items())
    return ["" if value is None else form.format(value * factor) for value, form, factor in known]


def sparse_entries(results: Path) -> list[dict[str, Any]]:
    """Bring together what is known of SSVI and of dense mean-field; what `ssvi.py draws` found wins over the rest."""
    found: dict[str, dict[str, Any]] = {}
    for name in SPARSE_FILES:
        record = read(results / f"{name}.json")
        for method, figures in record["summary"]["methods"].items() if record else ():
            runs = [run for run in record["results"] if run["name"] == method]
            settings = runs[0]["method"]
            draws = record["look"]["samples"] or settings.get("samples", 1)
            means = {key: figure["mean"] for key, figure in figures.items()}
            found |= sparse_entry(record["source"]["name"], settings, record["recipe"], draws, means, runs)
    scored = [run for path in sorted((results / "ssvi").glob("draws*.json")) for run in read(path)["results"]]
    of_network = [run for run in scored if run["model"]["name"] == NETWORK]
    for _, group in itertools.groupby(sorted(of_network, key=but_for_seed), key=but_for_seed):
        runs = list(group)
        first, columns = runs[0], SPARSE_COLUMNS | SPARSE_COSTS
        known = [key for key in columns if all(run["figures"].get(key) is not None for run in runs)]
        means = {key: statistics.fmean(run["figures"][key] for run in runs) for key in known}
        which = (first["source"]["name"], first["method"], first["recipe"], first["samples"])
        for key, entry in sparse_entry(*which, means, runs).items():
            entry["ood"] = found.get(key, entry)["ood"] | entry["ood"]
            found[key] = entry
    return list(found.values())


def but_for_seed(run: dict[str, Any]) -> str:
    """Tell what a run is, without its seed."""
    recipe = {key: value for key, value in run["recipe"].items() if key != "seed"}
    return json.dumps([run["source"]["name"], run["method"], recipe, run["samples"]])


def sparse_entry(
    data: str,
    method: dict[str, Any],
    recipe: dict[str, Any],
    draws: int,
    figures: dict[str, float],
    runs: list[dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Make the line of a method, under a key that tells it from others; none of one that the page is not about."""
    if method["type"] not in ("SSVI", "MeanField"):
        return {}
    paper = (method.get("densities"), method["rule"]) == ("uniform", "local")
    names = dict.fromkeys(name for run in runs for name in run["ood"])
    seen = {name: [run["ood"][name] for run in runs if name in run["ood"]] for name in names}
    pairs = {
        name: tuple(statistics.fmean(of["by"]["entropy"][key] for of in seen[name]) for key in OOD_SCORES)
        for name in seen
        if all(of["examples"] >= WHOLE.get(name, 0) for of in seen[name])
    }
    entry = {
        "data": data,
        "name": method["type"] + (", the paper's settings" if paper else ""),
        "density": method.get("density", 1.0),
        "epochs": recipe["epochs"],
        "draws": draws,
        "ood": pairs,
        **figures,
    }
    return {json.dumps([data, method, recipe["epochs"], recipe["temperature"], draws]): entry}


def read(path: Path) -> dict[str, Any]:
    """Read what was measured; nothing where there is no such file."""
    return json.loads(path.read_text()) if path.is_file() else {}
