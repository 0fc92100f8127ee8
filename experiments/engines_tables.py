"""The tables of docs/engines.md and docs/guide/tune.md, from files in experiments/results."""

import itertools
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
    "ssvi-ivon": "SSVI, {density} of the weights, ivon",
    "pbn-ivon": "PBN, {density} of the weights, ivon",
    "ensemble": "deep ensemble",
    "mc-dropout": "MC dropout",
    "batch-ensemble": "BatchEnsemble",
    "rank-1": "rank-1 network, Gaussian factors",
    "rank-1-cauchy": "rank-1 network, Cauchy factors",
    "lp-bnn": "LP-BNN",
    "abnn": "ABNN",
    "sngp": "SNGP",
    "sparse-vd": "sparse variational dropout",
    "sbp": "structured Bayesian pruning",
    "aeb": "AEB, {density} of the weights",
}


def engines_tables(folder: Path) -> Iterator[str]:
    """Yield the table of large networks, that of ensembles, and those of few examples."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    trained = [record for record in records if "row" in record]
    ensembles = [record for record in records if "ensembles" in record]
    if trained:
        yield trained_table(trained, ensembles)
    if ensembles:
        yield ensembles_table(ensembles)
    for record in records:
        if "results" in record:
            yield small_table(record)


def trained_table(records: Sequence[dict[str, Any]], ensembles: Sequence[dict[str, Any]] = ()) -> str:
    """Format the trainings on images: one row per kind of training, means over seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    order = list(NAMES)
    for record in sorted(records, key=lambda one: (*_task(one)[:2], -_task(one)[2], order.index(one["row"]))):
        groups.setdefault((_task(record), _name(record)), []).append(record)
    sizes = {_task(record): record["ensembles"] for record in ensembles}
    lines = [
        "| data, network, images, epochs | trained by | accuracy | NLL | ECE | NLL, running statistics | "
        "NLL, temperature fitted | temperature | plain networks with this NLL | seeds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (task, name), runs in groups.items():
        scores = [run["scores"]["refreshed"] for run in runs]
        # Without held-out images no temperature can be fitted.
        fitted = not runs[0]["settings"]["all_images"]
        scaled = _mean(one["test_with_temperature"]["nll"] for one in scores)
        numbers = [
            f"{_mean(one['test']['accuracy'] for one in scores):.2%}",
            f"{_mean(one['test']['nll'] for one in scores):.4f}",
            f"{_mean(one['test']['ece'] for one in scores):.4f}",
            f"{_mean(run['scores']['running']['test']['nll'] for run in runs):.4f}",
            f"{scaled:.4f}" if fitted else "",
            f"{_mean(one['test_with_temperature']['temperature'] for one in scores):.2f}" if fitted else "",
            equivalent(scaled, sizes[task]) if fitted and task in sizes else "",
            str(len(runs)),
        ]
        data, model, images, epochs = task
        lines.append(f"| {data}, {model}, {images:,}, {epochs} | {name} | {' | '.join(numbers)} |")
    return "\n".join([*_head(records[0], "experiments/engines.py, one file per row and seed"), *lines])


def equivalent(nll: float, sizes: Sequence[dict[str, Any]]) -> str:
    """Return how many plain networks have an NLL, all with temperature: linear between two sizes of ensembles."""
    losses = [size["test_with_temperature"]["nll"] for size in sizes]
    if nll > losses[0]:
        return "< 1"
    for number, (worse, better) in enumerate(itertools.pairwise(losses), start=1):
        if nll >= better:
            return f"{number + (worse - nll) / (worse - better):.1f}"
    return f"> {len(losses)}"


def ensembles_table(records: Sequence[dict[str, Any]]) -> str:
    """Format the ensembles of plain networks: one row per number of members."""
    lines = [
        "| data, network, images, epochs | plain networks | accuracy | NLL | ECE | NLL, temperature fitted | "
        "temperature |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        data, model, images, epochs = _task(record)
        for size in record["ensembles"]:
            plain, scaled = size["test"], size["test_with_temperature"]
            numbers = f"{plain['accuracy']:.2%} | {plain['nll']:.4f} | {plain['ece']:.4f} | {scaled['nll']:.4f}"
            row = f"{data}, {model}, {images:,}, {epochs} | {size['members']} | {numbers}"
            lines.append(f"| {row} | {scaled['temperature']:.2f} |")
    return "\n".join([*_head(records[0], "experiments/ensembles.py"), *lines])


def _task(record: dict[str, Any]) -> tuple[str, str, int, int]:
    settings = record["settings"]
    return settings["data"], settings["model"], settings["num_data"], settings["epochs"]


def _name(record: dict[str, Any]) -> str:
    settings = record["settings"]
    name = NAMES[record["row"]].format(density=f"{100 * settings['density']:g} %")
    # What differs from the settings of the page.
    other = [f"temperature {settings['temperature']:g}"] if settings["temperature"] != 1 else []
    other += [f"h₀ {settings['hess_init']:g}"] if settings["hess_init"] != 0.5 else []
    other += [f"selected after {settings['pretrain']:.0%}"] if settings["pretrain"] != 0.5 else []
    return ", ".join([name, *other])


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
