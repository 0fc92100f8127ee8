"""Tables on SSVI: our results against the paper, and the overlap of removal criteria."""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stored import read, seeds_of

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
PAPER_RECIPE = {"epochs": 200, "samples": 5, "seeds": 3}
# The figures of the page: the file with their task, and their captions.
FIGURES = {
    "density-*.svg": ("cifar10_density", "SSVI and RigL over the density, on all test images"),
    "init_std-*.svg": ("mnist_init_std", "SSVI and dense mean-field over the initial σ, on all test images"),
    "overlap.svg": ("ssvi/overlap", "Intersection over union of the weights that two criteria would remove"),
}
OOD_SCORES = ("auroc", "aupr_out")
WHOLE = {"svhn": 26_032}  # AUPR depends on the ratio of test to OOD examples, so that of a subset is not comparable


def overlap_table(record: dict[str, Any], title: str) -> str:
    """Format the overlap of the weights that two removal criteria would remove, at three points of training."""
    machine, exchanges, criteria = record["machine"], record["exchanges"], record["criteria"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    default = record["method"]["removal"]
    chosen = [exchanges[0], exchanges[len(exchanges) // 2], exchanges[-1]]
    pairs = list(itertools.combinations(range(5), 2))
    lines = [
        f"## {title}\n",
        f"`{record['command']}`\n",
        f"{where}, torch {record['versions']['torch']}, {len(exchanges)} exchanges. Intersection over union of the "
        f"weights that `{default}`, the training criterion, and another criterion would remove; and the mean over the "
        "pairs of the first five, as in the paper.\n",
        "| | " + " | ".join(f"step {one['step']:,}" for one in chosen) + " |",
        "|---|" + "---:|" * len(chosen),
    ]
    for number, name in enumerate(criteria):
        if name != default:
            values = (one["iou"][criteria.index(default)][number] for one in chosen)
            lines.append(f"| `{name}` | {' | '.join(f'{value:.3f}' for value in values)} |")
    means = (statistics.fmean(one["iou"][a][b] for a, b in pairs) for one in chosen)
    return "\n".join([*lines, f"| mean of pairs | {' | '.join(f'{value:.3f}' for value in means)} |"])


def flops_table(record: dict[str, Any]) -> str:
    """Format the FLOPs of a step relative to a dense network, by density and by how it is distributed over layers."""
    results = record["results"]
    paper = {
        density: SSVI_PAPER["cifar10"][density]["train_gflops"] / SSVI_PAPER["cifar10"][1.0]["train_gflops"]
        for density in (0.05, 0.1)
    }
    lines = [
        f"**FLOPs of a training step of {results[0]['network']}, relative to dense mean-field**\n",
        f"`{record['command']}`: counted, not timed; only products count, and a zero weight costs nothing. "
        "`erk` keeps small layers dense, which have many pixels; `uniform`, as in the paper, only the first one.\n",
        '| density | paper (its table 1) | `densities="erk"`, the default | `densities="uniform"` |',
        "|---:|---:|---:|---:|",
    ]
    for density in dict.fromkeys(one["density"] for one in results):
        share = {one["densities"]: f"{one['share']:.3f}×" for one in results if one["density"] == density}
        known = f"{paper[density]:.3f}×" if density in paper else ""
        lines.append(f"| {density:.0%} | {known} | {share['erk']} | {share['uniform']} |")
    return "\n".join(lines)


def sparse_figures(results: Path) -> Iterator[str]:
    """Format the figures with their captions."""
    for pattern, (name, caption) in FIGURES.items():
        record = read(results / f"{name}.json")
        for path in sorted((results / "ssvi").glob(pattern)):
            where = ""
            if record:
                task = f"{record['model']['name']} on {record['source']['name']}, {seeds_of(record)}"
                where = f" ({task}, {record['recipe']['epochs']} epochs)"
            yield f"![{path.stem}](../experiments/results/ssvi/{path.name})\n\n{caption}{where}."


def sparse_tables(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Format our results against the SSVI paper: one table per data set that SSVI was trained on."""
    entries = list(entries)
    for data, paper in SSVI_PAPER.items():
        ours = [one for one in entries if one["data"] == data]
        if not any(one["name"].startswith("SSVI") for one in ours):
            continue
        theirs = [
            {"name": "paper", "density": density, **PAPER_RECIPE, **metrics} for density, metrics in paper.items()
        ]
        others = list(dict.fromkeys(name for one in theirs for name in one.get("ood", ())))
        titles = ["density", "epochs", "samples", "seeds", *(title for title, _, _ in SPARSE_COLUMNS.values())]
        titles += [f"AUROC / AUPR {name}" for name in others] + [title for title, _, _ in SPARSE_COSTS.values()]
        lines = [f"**{NETWORK} on {data}**\n", f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
        for one in sorted([*theirs, *ours], key=lambda one: (-one["density"], one["name"] != "paper")):
            cells = [f"{one['density']:.0%}", *(str(one[key]) for key in ("epochs", "samples", "seeds"))]
            cells += written(one, SPARSE_COLUMNS)
            pairs = (one.get("ood", {}).get(name) for name in others)
            cells += ["" if pair is None else " / ".join(f"{value:.2f}" for value in pair) for pair in pairs]
            lines.append(f"| {one['name']} | {' | '.join([*cells, *written(one, SPARSE_COSTS)])} |")
        yield "\n".join(lines)


def written(metrics: dict[str, Any], columns: dict[str, tuple[str, str, float]]) -> list[str]:
    """Format the metrics of some columns; unknown ones are empty."""
    known = ((metrics.get(key), form, factor) for key, (_, form, factor) in columns.items())
    return ["" if value is None else form.format(value * factor) for value, form, factor in known]


def sparse_entries(results: Path) -> list[dict[str, Any]]:
    """Collect the results of SSVI and dense mean-field; those of `ssvi.py samples` take precedence."""
    found: dict[str, dict[str, Any]] = {}
    for name in SPARSE_FILES:
        record = read(results / f"{name}.json")
        for method, summaries in record["summary"]["methods"].items() if record else ():
            runs = [run for run in record["results"] if run["name"] == method]
            settings = runs[0]["method"]
            samples = record["evaluation"]["samples"] or settings.get("samples", 1)
            means = {key: summary["mean"] for key, summary in summaries.items()}
            found |= sparse_entry(record["source"]["name"], settings, record["recipe"], samples, means, runs)
    scored = [run for path in sorted((results / "ssvi").glob("draws*.json")) for run in read(path)["results"]]
    of_network = [run for run in scored if run["model"]["name"] == NETWORK]
    for _, group in itertools.groupby(sorted(of_network, key=without_seed), key=without_seed):
        runs = list(group)
        first, columns = runs[0], SPARSE_COLUMNS | SPARSE_COSTS
        known = [key for key in columns if all(run["metrics"].get(key) is not None for run in runs)]
        means = {key: statistics.fmean(run["metrics"][key] for run in runs) for key in known}
        which = (first["source"]["name"], first["method"], first["recipe"], first["samples"])
        for key, entry in sparse_entry(*which, means, runs).items():
            entry["ood"] = found.get(key, entry)["ood"] | entry["ood"]
            found[key] = entry
    return list(found.values())


def without_seed(run: dict[str, Any]) -> str:
    """Return a key of everything that a run is, except its seed."""
    recipe = {key: value for key, value in run["recipe"].items() if key != "seed"}
    return json.dumps([run["source"]["name"], run["method"], recipe, run["samples"]])


def sparse_entry(
    data: str,
    method: dict[str, Any],
    recipe: dict[str, Any],
    samples: int,
    metrics: dict[str, float],
    runs: list[dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the table entry of a method by a unique key; an empty dict for other methods."""
    if method["type"] not in ("SSVI", "MeanField"):
        return {}
    paper = (method.get("densities"), method["rule"]) == ("uniform", "local")
    names = dict.fromkeys(name for run in runs for name in run["ood"])
    detected = {name: [run["ood"][name] for run in runs if name in run["ood"]] for name in names}
    pairs = {
        name: tuple(statistics.fmean(of["by"]["entropy"][key] for of in detected[name]) for key in OOD_SCORES)
        for name in detected
        if all(of["examples"] >= WHOLE.get(name, 0) for of in detected[name])
    }
    entry = {
        "data": data,
        "name": method["type"] + (", the paper's settings" if paper else ""),
        "density": method.get("density", 1.0),
        "epochs": recipe["epochs"],
        "samples": samples,
        "seeds": len({run["seed"] for run in runs}),
        **metrics,
        "ood": pairs,  # by data set; the metric of that name is one number for all of them
    }
    return {json.dumps([data, method, recipe["epochs"], recipe["temperature"], samples]): entry}
