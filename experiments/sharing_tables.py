"""Tables on weight sharing: our results against the paper, files by size, INT8, and ablations."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pbn_tables import head, header
from stored import read

INT8 = "INT8, {}-bit σ"
LIMIT = 700_000  # maximum bytes of a small file
# Lin et al. 2025: Table 3, Table 7, and Tables 4, 5, 8 and 10 of ResNet-20.
# The paper prints the ECE of INT8 in percent. MB include the index that it puts in brackets.
PAPER = {"accuracy": 0.9172, "nll": 0.305, "ece": 0.019}
# Table 3: outliers, ellipses, Gaussians, and millions of parameters as printed.
PAPER_COUNTS = {
    "ResNet-18": (123310, 67, 1569, 0.018),
    "WRN-28-10": (39395, 365977, 3950, 0.413),
    "ResNet-50": (129640, 0, 1628, 0.132),
    "ResNet-101": (45240, 348, 3199, 0.052),
}
PAPER_SVHN = {"auroc": 0.8867, "aupr_out": 0.8397, "fpr85": 0.2932}
PAPER_INT8: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "cifar10": {
        "paper, INT8, 4-bit σ": (0.9092, 0.266, 0.01778, 0.87),
        "paper, INT8, 2-bit σ": (0.9085, 0.273, 0.02547, 0.72),
        "paper, INT8, 1-bit σ": (0.9096, 0.266, 0.00711, 0.54),
        "paper, sharing": (0.9091, 0.303, 0.040, 1.62),
        "paper, sharing, pretrained": (0.9104, 0.303, 0.037, 0.71),
    },
    "mnist": {
        "paper, INT8, 4-bit σ": (0.9936, 0.020, 0.00215, 0.10),
        "paper, INT8, 2-bit σ": (0.9932, 0.024, 0.00277, 0.08),
        "paper, INT8, 1-bit σ": (0.9934, 0.027, 0.00351, 0.06),
        "paper, sharing": (0.9952, 0.013, 0.001, 0.403),
    },
}
PAPER_ABLATIONS = {
    "all": (0.9092, 0.265, 0.040),
    "no blends": (0.9043, 0.304, 0.043),
    "no outliers": (0.9018, 0.308, 0.026),
    "no outliers, no blends": (0.9001, 0.318, 0.029),
    "no merging": (0.8877, 0.3792, 0.0500),
    "threshold 0.1": (0.9114, 0.376, 0.0197),
    "threshold 0.4": (0.9053, 0.396, 0.0279),
    "threshold 0.6": (0.8978, 0.322, 0.038),
}
SCORES = {"accuracy": ("accuracy", "{:.2%}"), "nll": ("NLL", "{:.4f}"), "ece": ("ECE", "{:.4f}")}
# The figures of the page: the file with their numbers, and their captions.
FIGURES = {
    "rate-distortion-cifar10.svg": ("curve", "Each point is a file that was written, loaded and scored"),
    "rate-distortion-mnist.svg": ("curve_mnist", "Each point is a file that was written, loaded and scored"),
    "int8-cifar10.svg": ("int8", "INT8 files and files with shared weights from one trained run"),
    "int8-mnist.svg": ("int8_mnist", "INT8 files and files with shared weights from one trained run"),
    "density-*.svg": ("figures", "Histogram of the weight means, with a logarithmic scale"),
    "plane-*.png": ("figures", "Each point is a weight at its own μ and σ, before sharing"),
    "confidence-*.png": (
        "figures",
        "Confidence on test images by true class: quartiles, 5 % and 95 %, and the mean above",
    ),
}

Row = Mapping[str, Any]


class Way(NamedTuple):
    """The names of a prediction mode: in a sentence, after a column title, and above a figure."""

    in_words: str
    column: str
    figure: str


WAYS = {
    "samples": Way("by samples", "", "Monte Carlo samples"),
    "one_pass": Way("in one pass", ", one pass", "one pass by moments"),
    "one_pass_by_labels": Way("in one pass by labels", ", by labels", "one pass by labels"),
}


def sharing_tables(folder: Path) -> Iterator[str]:
    """Format all results on weight sharing."""
    found = {name: read(folder / f"{name}.json") for name in ("curve", "ablations", "int8", "int8_mnist")}
    others = [read(path) for path in sorted(folder.glob("curve_*.json"))]
    finals = [read(path) for path in sorted(folder.glob("final_*.json"))]
    papers = [read(path) for path in sorted(folder.glob("paper*.json"))]
    rows = [*paper_claims(papers), *limit_claim(found["curve"])]
    if rows:
        lines = ["| the paper | ours | its cost |", "|---|---|---|"]
        yield "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
    for record in (found["curve"], *others):
        if record:
            yield curve_table(record)
    if finals:
        yield final_table(finals)
    for record in papers:
        yield files_table(record)
    if papers:
        yield counts_table(papers)
    for name in ("int8", "int8_mnist"):
        if found[name]:
            yield int8_table(found[name])
    if found["ablations"]:
        yield ablation_table(found["ablations"])
    for pattern, (name, caption) in FIGURES.items():
        record = read(folder / f"{name}.json")
        for path in sorted(folder.glob(pattern)):
            where = ""
            if record:
                task = f"{record['model']['name']} on {record['source']['name']}, {record['name']}, one seed"
                where = f" ({task}, {record['examples']:,} test images, {record['samples']} samples)"
            yield f"![{path.stem}](../experiments/results/sharing/{path.name})\n\n{caption}{where}."


# -- choices, on held-out data ----------------------------------------------------------------------------------------


def best_training(rows: Iterable[Row]) -> list[Row]:
    """Keep, of files that differ only in the learning rate, the one with the lowest held-out NLL."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in ("components", "bit_price", "rate", "epochs", "values"))
        if key not in best or held_out(row) < held_out(best[key]):
            best[key] = row
    return list(best.values())


def front(rows: Iterable[Row]) -> list[Row]:
    """Keep the files that no smaller file beats in held-out NLL, from small to large."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bytes"], held_out(row))):
        if not kept or held_out(row) < held_out(kept[-1]):
            kept.append(row)
    return kept


def held_out(row: Row) -> float:
    """Return the held-out NLL by samples."""
    return row["held_out"]["nll"]


def held_out_by(way: str) -> str:
    """Return the key of the held-out scores of a prediction mode."""
    return "held_out" if way == "samples" else f"held_out_{way}"


# -- claims -----------------------------------------------------------------------------------------------------------


def paper_claims(records: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """Yield one row per starting run of the paper's pipeline on ResNet-18: scores, parameters, and OOD data."""
    for record in records:
        for row in record["results"]:
            if ablation_of(row["method"]) != "all":
                continue
            test, cost = row["test"], size_in_words(row["bytes"], record)
            count = f"{row['paper_parameters'] / 1e3:.0f} thousand by the same count"
            scores = (f"{in_words(test[way])} {name.in_words}" for way, name in WAYS.items() if way in test)
            yield (
                f"ResNet-18, CIFAR-10: {in_words(PAPER)}; 127 thousand parameters by its own count, printed as 18",
                f"{', '.join(scores)}; {count} (seed {row['seed']})",
                cost,
            )
            if "svhn" in test["samples"]["ood"]:
                both = PAPER_SVHN, test["samples"]["ood"]["svhn"]
                theirs, ours = (", ".join(f"{of[key]:.3f}" for key in PAPER_SVHN) for of in both)
                yield f"SVHN: AUROC, AUPR and FPR at 85 % {theirs}", f"{ours} (seed {row['seed']})", cost


def counts_table(records: Sequence[Row]) -> str:
    """Format the parameters of the paper's Table 3, printed and by its count, and ours."""
    lines = [
        "**Parameters by the paper's count, CIFAR-10**\n",
        "The paper counts outliers + ellipses + 2 · Gaussians. This gives what it prints for all networks but "
        "ResNet-18, whose outliers alone are more than what is printed; by the same count it has as many as ours. The "
        "count leaves out the label of each weight, the covariances, and σ of outliers and blends, so it is not the "
        "size of a file.\n",
        "| | outliers | ellipses | Gaussians | printed, millions | outliers + ellipses + 2 · Gaussians |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (outliers, ellipses, gaussians, printed) in PAPER_COUNTS.items():
        total = outliers + ellipses + 2 * gaussians
        lines.append(f"| paper, {name} | {outliers:,} | {ellipses:,} | {gaussians:,} | {printed} | {total:,} |")
    for record in records:
        for row in record["results"]:
            if ablation_of(row["method"]) == "all":
                cells = (f"{row[key]:,}" for key in ("outliers", "blends", "gaussians"))
                name = f"ours, {record['model']['name']}, seed {row['seed']}"
                lines.append(f"| {name} | {' | '.join(cells)} |  | {row['paper_parameters']:,} |")
    return "\n".join(lines)


def limit_claim(record: Row) -> Iterator[tuple[str, str, str]]:
    """Yield the best file of at most 0.70 MB for each prediction mode, which the paper does not have."""
    small = [row for row in record["results"] if row["bytes"] <= LIMIT] if record else []
    for way, name in WAYS.items():
        key = held_out_by(way)
        known = [row for row in small if key in row]
        if known:
            row = min(known, key=lambda row: row[key]["nll"])
            yield (
                f"(not in the paper) at most {LIMIT / 1e6:.2f} MB on disk, from {record['name']}, {name.in_words}",
                f"{in_words(row['test'][way])} ({settings_of(row)})",
                size_in_words(row["bytes"], record),
            )


def in_words(scores: Row) -> str:
    """Format three scores."""
    return f"{scores['accuracy']:.2%}, NLL {scores['nll']:.3f}, ECE {scores['ece']:.3f}"


def size_in_words(size: int, record: Row) -> str:
    """Format a size and that of the plain network."""
    return f"{size / 1e6:.2f} MB, the plain fp32 network {record['sizes']['plain fp32 network'] / 1e6:.1f} MB"


def settings_of(row: Row) -> str:
    """Format the settings of a file."""
    price = "" if row["bit_price"] is None else f", {row['bit_price']:g} nats per bit"
    price += "" if row["rate"] is None else f", σ of {row['rate']:.1%} of the weights"
    trained = f", {row['epochs']} epochs" if row["epochs"] else ""
    return f"{row['components']} components{price}{trained}, {row['values']}"


# -- tables -----------------------------------------------------------------------------------------------------------


def begin(record: Row, title: str, columns: Iterable[str]) -> list[str]:
    """Return the lines above a table, with the numbers of examples and samples."""
    counts = f"{record['examples']:,} test examples, {record['samples']} samples"
    by_moments = record["settings"].get("rule") == "moments"
    how = "is how the files were trained" if by_moments else "is calibrated on held-out data"
    words = f"{counts}; one pass {how}.\n"
    where = f"{record['model']['name']} on {record['source']['name']}"
    return [*head(record, f"{where}: {title}"), words, *header(columns)]


def cells(scores: Row | None) -> list[str]:
    """Format the scores of one prediction mode; empty if there are none."""
    return [form.format(scores[key]) if scores else "" for key, (_, form) in SCORES.items()]


def megabytes(row: Row) -> str:
    """Format the size of a file."""
    return f"{row['bytes'] / 1e6:.3f}"


TITLES = [title for title, _ in SCORES.values()]


def ways_of(record: Row) -> list[str]:
    """Return the prediction modes of a record; one pass is always included."""
    rows = [*record.get("compared", ()), *record["results"]]
    return [way for way in WAYS if way != "one_pass_by_labels" or any(way in row["test"] for row in rows)]


def titles_of(ways: Iterable[str]) -> list[str]:
    """Return the column titles of each prediction mode."""
    return [title + WAYS[way].column for way in ways for title in TITLES]


def scores_by(row: Row, ways: Iterable[str]) -> list[str]:
    """Format the scores of each prediction mode."""
    return [text for way in ways for text in cells(row["test"].get(way))]


def curve_table(record: Row) -> str:
    """Format the run, the compared runs, and all files."""
    others, ways = list(record["compared"][0]["test"]["samples"]["ood"]), ways_of(record)
    detection = (f"AUROC {name}" for name in others)
    columns = ["MB on disk", *titles_of(ways), *detection, "outliers", "Gaussians", "paper's count"]
    lines = begin(record, "files with shared weights", columns)
    for row in record["compared"]:
        lines.append(curve_line(f"{row['name']}, its own file", row, ways, others))
    for row in sorted(best_training(record["results"]), key=lambda row: -row["bytes"]):
        lines.append(curve_line(settings_of(row), row, ways, others))
    return "\n".join(lines)


def curve_line(name: str, row: Row, ways: Sequence[str], others: Sequence[str]) -> str:
    """Format one file."""
    found = [f"{row['test']['samples']['ood'][other]['auroc']:.4f}" for other in others]
    counts = [f"{row[key]:,}" if key in row else "" for key in ("outliers", "gaussians", "paper_parameters")]
    return f"| {name} | {' | '.join([megabytes(row), *scores_by(row, ways), *found, *counts])} |"


def final_table(records: Sequence[Row]) -> str:
    """Format files that differ in their final training, grouped by starting run."""
    ways = ways_of(records[0])
    titles = ["seed", "of the images", "epochs", "learning rate", "of σ", "samples", "MB on disk", *titles_of(ways)]
    where = f"{records[0]['model']['name']} on {records[0]['source']['name']}"
    commands = "\n\n".join(f"`{record['command']}`" for record in records)
    lines = [f"**{where}: the final training**", "", f"{commands}\n", *header([*titles, "held-out NLL, by labels"])]
    rows = [(record, row) for record in records for row in record["results"] if row["epochs"]]
    for record, row in sorted(rows, key=lambda one: (one[0]["seed"], one[1]["epochs"], one[0]["settings"]["scale_lr"])):
        settings, share = record["settings"], 1 - record["source"]["validation_share"]
        cells = [str(record["seed"]), f"{share:.0%}", str(row["epochs"]), f"{row['lr']:g}", f"{settings['scale_lr']:g}"]
        cells += [str(record["samples"]), megabytes(row), *scores_by(row, ways)]
        cells.append(f"{row[held_out_by('one_pass_by_labels')]['nll']:.4f}")
        name = "by moments" if settings["rule"] == "moments" else "by samples"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def files_table(record: Row) -> str:
    """Format runs that were trained with shared weights, with all counts."""
    ways = ways_of(record)
    titles = ["MB on disk", *titles_of(ways), "outliers", "blends", "Gaussians", "paper's count", "s to train"]
    lines = begin(record, "trained with sharing", titles)
    for row in record["results"]:
        counts = [f"{row[key]:,}" for key in ("outliers", "blends", "gaussians", "paper_parameters")]
        numbers = [megabytes(row), *scores_by(row, ways), *counts, f"{row['costs']['train_seconds']:,.0f}"]
        lines.append(f"| {shared_name(row['method'])}, {row['values']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def shared_name(method: Row) -> str:
    """Name weight-sharing settings by what the pages compare."""
    center = ", prior around the start" if method["prior"].get("center") == "pretrained" else ""
    return f"{method['components']} components, {ablation_of(method)}{center}"


def ablation_of(method: Row) -> str:
    """Name the differences from the settings of the paper."""
    alone = method["threshold"] is None and not method["gradient_share"]
    kind = "no outliers" if method["dissolve"] == "neighbors" else "only outliers of small components"
    parts = [kind] if alone else []
    parts += ["no blends"] if method["border"] is None else []
    parts += ["no merging"] if method["merge_distance"] == 0 else []
    parts += [f"threshold {method['threshold']:g}"] if method["threshold"] not in (None, 0.2) else []
    return ", ".join(parts) or "all"


def int8_table(record: Row) -> str:
    """Format Table 4 of the paper and our results."""
    ways = ways_of(record)
    lines = begin(record, "INT8 and sharing", ["MB", *titles_of(ways)])
    for name, (*scores, size) in PAPER_INT8.get(record["source"]["name"], {}).items():
        theirs = scores_by({"test": {"samples": dict(zip(SCORES, scores, strict=True))}}, ways)
        lines.append(f"| {name} | {' | '.join([f'{size:.3f}', *theirs])} |")
    rows = [(row["name"], row) for row in record["compared"]]
    rows += [(settings_of(row), row) for row in reversed(front(best_training(record["results"])))]
    for name, row in rows:
        lines.append(f"| {name} | {' | '.join([megabytes(row), *scores_by(row, ways)])} |")
    return "\n".join(lines)


def ablation_table(record: Row) -> str:
    """Format Tables 5, 8 and 10 of the paper and our means over the seeds."""
    titles = [f"{title}, paper" for title in TITLES] + TITLES
    lines = begin(record, "ablations", [*titles, "outliers", "blends", "Gaussians", "kB on disk"])
    groups: dict[str, list[Row]] = {}
    for row in record["results"]:
        groups.setdefault(ablation_of(row["method"]), []).append(row)
    places = list(PAPER_ABLATIONS)
    for name, rows in sorted(groups.items(), key=lambda one: (*places, one[0]).index(one[0])):
        theirs = PAPER_ABLATIONS.get(name)
        ours = {key: statistics.fmean(row["test"]["samples"][key] for row in rows) for key in SCORES}
        counts = [f"{statistics.fmean(row[key] for row in rows):,.0f}" for key in ("outliers", "blends", "gaussians")]
        size = statistics.fmean(row["bytes"] for row in rows) / 1e3
        paper = cells(None if theirs is None else dict(zip(SCORES, theirs, strict=True)))
        lines.append(f"| {name} | {' | '.join([*paper, *cells(ours), *counts, f'{size:,.0f}'])} |")
    return "\n".join(lines)
