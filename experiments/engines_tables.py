"""The tables of docs/engines.md and docs/guide/tune.md, from files in experiments/results."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "sgd": "plain network, SGD",
    "backprop": "mean-field, backprop",
    "ivon": "mean-field, ivon",
    "ivon-opt": "`ivon-opt` 0.1.3",
    "ssvi-ivon": "SSVI, 5 % of the weights, ivon",
    "pbn-ivon": "PBN, 5 % of the weights, ivon",
}


def engines_tables(folder: Path) -> Iterator[str]:
    """Yield the table of large networks, and that of few examples."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    trained = [record for record in records if "row" in record]
    if trained:
        yield trained_table(trained)
    for record in records:
        if "row" not in record:
            yield small_table(record)


def trained_table(records: Sequence[dict[str, Any]]) -> str:
    """Format the trainings on images: one row per kind of training, means over seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    order = list(NAMES)
    for record in sorted(records, key=lambda one: (one["settings"]["data"], order.index(one["row"]))):
        settings = record["settings"]
        key = (settings["data"], settings["model"], settings["num_data"], settings["epochs"], record["row"])
        groups.setdefault(key, []).append(record)
    lines = [
        "| data, network, images, epochs | trained by | accuracy | NLL | ECE | NLL, BatchNorm refreshed | "
        "NLL, temperature fitted | temperature | seeds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (data, model, images, epochs, row), runs in groups.items():
        running = [run["scores"]["running"] for run in runs]
        numbers = [
            f"{_mean(one['test']['accuracy'] for one in running):.2%}",
            f"{_mean(one['test']['nll'] for one in running):.4f}",
            f"{_mean(one['test']['ece'] for one in running):.4f}",
            f"{_mean(run['scores']['refreshed']['test']['nll'] for run in runs):.4f}",
            f"{_mean(one['test_with_temperature']['nll'] for one in running):.4f}",
            f"{_mean(one['test_with_temperature']['temperature'] for one in running):.2f}",
            str(len(runs)),
        ]
        lines.append(f"| {data}, {model}, {images:,}, {epochs} | {NAMES[row]} | {' | '.join(numbers)} |")
    return "\n".join([*_head(records[0], "experiments/engines.py, one file per row and seed"), *lines])


def small_table(record: dict[str, Any]) -> str:
    """Format the trainings on few examples: one row per data set, one column per training."""
    rows = list(dict.fromkeys(result["row"] for result in record["results"]))
    cases: dict[str, dict[str, str]] = {}
    for result in record["results"]:
        name = f"{result['examples']:,} digits" if result["examples"] else f"{result['data']} (RMSE)"
        first = "accuracy" if "accuracy" in result["scores"][0] else "rmse"
        value, nll = (_mean(one[key] for one in result["scores"]) for key in (first, "nll"))
        shown = f"{value:.2%}" if first == "accuracy" else f"{value:.2f}"
        cases.setdefault(name, {})[result["row"]] = f"{shown}, {nll:.3f}"
    lines = [f"| accuracy or RMSE, NLL | {' | '.join(rows)} |", "|---|" + "---:|" * len(rows)]
    lines += [f"| {name} | {' | '.join(cells.get(row, '') for row in rows)} |" for name, cells in cases.items()]
    return "\n".join([*_head(record, record["command"]), *lines])


def temperature_table(record: dict[str, Any]) -> str:
    """Format the trainings at several temperatures: one row per data set and method, one column per temperature."""
    results, cases = record["results"], dict[tuple[str, str], dict[float, str]]()
    temperatures = sorted({one["temperature"] for one in results}, reverse=True)
    for one in results:
        means = {key: _mean(scores[key] for scores in one["scores"]) for key in one["scores"][0]}
        shown = f"{means['accuracy']:.1%}" if "accuracy" in means else f"{means['rmse']:.2f}"
        shown += f", {means['nll']:.3f}" + (f", {means['noise_auroc']:.1%}" if "noise_auroc" in means else "")
        place = temperatures[0] if one["method"] == "plain" else one["temperature"]
        cases.setdefault((one["case"], one["method"]), {})[place] = shown
    lines = [f"| accuracy, NLL, AUROC of noise | {' | '.join(f'{one:g}' for one in temperatures)} |"]
    lines.append("|---|" + "---:|" * len(temperatures))
    for (case, method), cells in cases.items():
        lines.append(f"| {case}: {method} | {' | '.join(cells.get(one, '') for one in temperatures)} |")
    return "\n".join([*_head(record, record["command"]), *lines])


def _head(record: dict[str, Any], command: str) -> list[str]:
    found = record["machine"]
    where = ", ".join(found["gpus"]) or f"{found['processor']}, {found['cores']} cores"
    return [f"`{command}` ({where}, torch {record['versions']['torch']})\n"]


def _mean(values: Any) -> float:
    return statistics.fmean(values)
