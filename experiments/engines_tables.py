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
    "packed-ensemble": "packed ensemble",
    "mimo": "MIMO",
    "rank-1": "rank-1 network, Gaussian factors",
    "rank-1-cauchy": "rank-1 network, Cauchy factors",
    "lp-bnn": "LP-BNN",
    "abnn": "ABNN",
    "sngp": "SNGP",
    "variational-dropout": "variational dropout",
    "variational-dropout-inputs": "variational dropout, noise of inputs",
    "sparse-vd": "sparse variational dropout",
    "sbp": "structured Bayesian pruning",
    "aeb": "AEB, {density} of the weights",
    "mbnn": "mBNN",
    "mbnn-sparse": "mBNN, λ = 0.1, a move after each step",
    "vbll": "VBLL",
    "swa": "SWA",
    "swag": "SWAG",
    "csgmcmc": "cyclical SGMCMC",
    "laplace": "Laplace, diagonal",
    "laplace-adjoint": "Laplace, diagonal, one pass",
    "laplace-last": "Laplace, last layer, full",
    "laplace-kron": "Laplace, last layer, Kronecker",
    "std-search": "std search",
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
    for record in sorted(records, key=lambda one: (*task_of(one)[:2], -task_of(one)[2], order.index(one["row"]))):
        groups.setdefault((task_of(record), name_of(record)), []).append(record)
    sizes = {task_of(record): record["ensembles"] for record in ensembles}
    lines = [
        "| data, network, images, epochs | trained by | accuracy | NLL | ECE | NLL, running statistics | "
        "NLL, temperature fitted | temperature | plain networks with this NLL | seeds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (task, name), runs in groups.items():
        scores = [run["scores"]["refreshed"] for run in runs]
        running = [run["scores"]["running"] for run in runs if "running" in run["scores"]]
        # Without held-out images no temperature can be fitted.
        fitted = not runs[0]["settings"]["all_images"]
        scaled = mean(one["test_with_temperature"]["nll"] for one in scores)
        numbers = [
            f"{mean(one['test']['accuracy'] for one in scores):.2%}",
            f"{mean(one['test']['nll'] for one in scores):.4f}",
            f"{mean(one['test']['ece'] for one in scores):.4f}",
            f"{mean(one['test']['nll'] for one in running):.4f}" if running else "",
            f"{scaled:.4f}" if fitted else "",
            f"{mean(one['test_with_temperature']['temperature'] for one in scores):.2f}" if fitted else "",
            equivalent(scaled, sizes[task]) if fitted and task in sizes else "",
            str(len(runs)),
        ]
        data, model, images, epochs = task
        lines.append(f"| {data}, {model}, {images:,}, {epochs} | {name} | {' | '.join(numbers)} |")
    return "\n".join([*head(records[0], "experiments/engines.py, one file per row and seed"), *lines])


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
        data, model, images, epochs = task_of(record)
        for size in record["ensembles"]:
            plain, scaled = size["test"], size["test_with_temperature"]
            numbers = f"{plain['accuracy']:.2%} | {plain['nll']:.4f} | {plain['ece']:.4f} | {scaled['nll']:.4f}"
            row = f"{data}, {model}, {images:,}, {epochs} | {size['members']} | {numbers}"
            lines.append(f"| {row} | {scaled['temperature']:.2f} |")
    return "\n".join([*head(records[0], "experiments/ensembles.py"), *lines])


def task_of(record: dict[str, Any]) -> tuple[str, str, int, int]:
    """Return the data set, the network, and the numbers of images and epochs of a result file."""
    settings = record["settings"]
    return settings["data"], settings["model"], settings["num_data"], settings["epochs"]


def name_of(record: dict[str, Any]) -> str:
    """Return the method of a result file, with what differs from the usual settings."""
    settings = record["settings"]
    name = NAMES[record["row"]].format(density=f"{100 * settings['density']:g} %")
    # What differs from the settings of the page.
    other = [f"temperature {settings['temperature']:g}"] if settings["temperature"] not in (None, 1) else []
    other += [f"h₀ {settings['hess_init']:g}"] if settings["hess_init"] not in (None, 0.5) else []
    other += ["clipped gradient"] if settings.get("clip") else []
    other += [f"selected after {settings['pretrain']:.0%}"] if settings["pretrain"] != 0.5 else []
    return ", ".join([name, *other])


def small_table(record: dict[str, Any]) -> str:
    """Format the trainings on few examples: one row per data set, one column per training."""
    rows = list(dict.fromkeys(result["row"] for result in record["results"]))
    cases: dict[str, dict[str, str]] = {}
    for result in record["results"]:
        name = f"{result['examples']:,} digits" if result["examples"] else f"{result['data']} (RMSE)"
        first = "accuracy" if "accuracy" in result["scores"][0] else "rmse"
        value, nll = (mean(one[key] for one in result["scores"]) for key in (first, "nll"))
        shown = f"{value:.2%}" if first == "accuracy" else f"{value:.2f}"
        cases.setdefault(name, {})[result["row"]] = f"{shown}, {nll:.3f}"
    lines = [f"| accuracy or RMSE, NLL | {' | '.join(rows)} |", "|---|" + "---:|" * len(rows)]
    lines += [f"| {name} | {' | '.join(cells.get(row, '') for row in rows)} |" for name, cells in cases.items()]
    return "\n".join([*head(record, record["command"]), *lines])


def temperature_table(record: dict[str, Any]) -> str:
    """Format the trainings at several temperatures: one row per data set and method, one column per temperature."""
    results, cases = record["results"], dict[tuple[str, str], dict[float, str]]()
    temperatures = sorted({one["temperature"] for one in results}, reverse=True)
    for one in results:
        means = {key: mean(scores[key] for scores in one["scores"]) for key in one["scores"][0]}
        shown = f"{means['accuracy']:.1%}" if "accuracy" in means else f"{means['rmse']:.2f}"
        shown += f", {means['nll']:.3f}" + (f", {means['noise_auroc']:.1%}" if "noise_auroc" in means else "")
        place = temperatures[0] if one["method"] == "plain" else one["temperature"]
        cases.setdefault((one["case"], one["method"]), {})[place] = shown
    lines = [f"| accuracy, NLL, AUROC of noise | {' | '.join(f'{one:g}' for one in temperatures)} |"]
    lines.append("|---|" + "---:|" * len(temperatures))
    for (case, method), cells in cases.items():
        lines.append(f"| {case}: {method} | {' | '.join(cells.get(one, '') for one in temperatures)} |")
    return "\n".join([*head(record, record["command"]), *lines])


def head(record: dict[str, Any], command: str) -> list[str]:
    """Return the line above a table: what wrote it, and where."""
    found = record["machine"]
    where = ", ".join(found["gpus"]) or f"{found['processor']}, {found['cores']} cores"
    return [f"`{command}` ({where}, torch {record['versions']['torch']})\n"]


def mean(values: Any) -> float:
    """Return the mean of some numbers."""
    return statistics.fmean(values)
