"""The tables on weight sharing: what its paper has and what we have, files over their bytes, INT8, and ablations."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pbn_tables import head, header
from ssvi_tables import read

INT8 = "INT8, {}-bit σ"
LIMIT = 700_000  # bytes that the smallest file of use may have
# Lin et al. 2025: Table 3, Table 7, and Tables 4, 5, 8 and 10 of ResNet-20.
# ECE of INT8 is printed in percent there. MB are with the index that they put in brackets.
PAPER = {"accuracy": 0.9172, "nll": 0.305, "ece": 0.019}
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
FIGURES = {
    "rate-distortion-*.svg": "Each point is a file that was written, loaded and scored.",
    "int8-*.svg": "INT8 files and files of shared weights, of one training.",
    "density-*.svg": "Means of the weights, by the logarithm.",
    "plane-*.png": "Every point is a weight by its own μ and σ, before it shares.",
    "confidence-*.png": "Confidence on test images by their true class: quartiles, 5 % and 95 %, with the mean above.",
}

Row = Mapping[str, Any]


class Way(NamedTuple):
    """How a way to predict is called: in a sentence, behind the title of a column, and over a figure."""

    in_words: str
    column: str
    figure: str


WAYS = {
    "draws": Way("by draws", "", "draws of the weights"),
    "one_pass": Way("in one pass", ", one pass", "one pass by moments"),
    "one_pass_by_labels": Way("in one pass by labels", ", by labels", "one pass by labels"),
}


def sharing_tables(folder: Path) -> Iterator[str]:
    """Lay out all that there is on weight sharing."""
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
    for name in ("int8", "int8_mnist"):
        if found[name]:
            yield int8_table(found[name])
    if found["ablations"]:
        yield ablation_table(found["ablations"])
    for pattern, caption in FIGURES.items():
        for path in sorted(folder.glob(pattern)):
            yield f"![{path.stem}](../experiments/results/sharing/{path.name})\n\n{caption}"


# -- choices, on held-out data ----------------------------------------------------------------------------------------


def best_training(rows: Iterable[Row]) -> list[Row]:
    """Of files that differ in the learning rate alone, keep the one with the lowest held-out NLL."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in ("components", "bit_price", "rate", "epochs", "values"))
        if key not in best or held_out(row) < held_out(best[key]):
            best[key] = row
    return list(best.values())


def front(rows: Iterable[Row]) -> list[Row]:
    """Keep the files that no smaller one beats in held-out NLL, from small to large."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bytes"], held_out(row))):
        if not kept or held_out(row) < held_out(kept[-1]):
            kept.append(row)
    return kept


def held_out(row: Row) -> float:
    """Return the held-out NLL of draws."""
    return row["held_out"]["nll"]


def held_out_by(way: str) -> str:
    """Say where a row has the held-out scores of a way to predict."""
    return "held_out" if way == "draws" else f"held_out_{way}"


# -- claims -----------------------------------------------------------------------------------------------------------


def paper_claims(records: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """The paper's pipeline on ResNet-18, a line a start: scores with its own count, and images of another kind."""
    for record in records:
        for row in record["results"]:
            if ablation_of(row["method"]) != "all":
                continue
            test, cost = row["test"], size_in_words(row["bytes"], record)
            scores = (f"{in_words(test[way])} {name.in_words}" for way, name in WAYS.items() if way in test)
            yield (
                f"ResNet-18, CIFAR-10: {in_words(PAPER)}; 18 thousand parameters by its count, as printed",
                f"{', '.join(scores)}; {row['paper_parameters'] / 1e3:.0f} thousand by that count (seed {row['seed']})",
                cost,
            )
            if "svhn" in test["draws"]["ood"]:
                both = PAPER_SVHN, test["draws"]["ood"]["svhn"]
                theirs, ours = (", ".join(f"{of[key]:.3f}" for key in PAPER_SVHN) for of in both)
                yield f"SVHN: AUROC, AUPR and FPR at 85 % {theirs}", f"{ours} (seed {row['seed']})", cost


def limit_claim(record: Row) -> Iterator[tuple[str, str, str]]:
    """A file of at most 0.70 MB, which the paper has not: the best for draws, and the best for one pass."""
    small = [row for row in record["results"] if row["bytes"] <= LIMIT] if record else []
    for way, name in WAYS.items():
        key = held_out_by(way)
        known = [row for row in small if key in row]
        if known:
            row = min(known, key=lambda row: row[key]["nll"])
            yield (
                f"(not in it) at most {LIMIT / 1e6:.2f} MB on disk, from {record['name']}, {name.in_words}",
                f"{in_words(row['test'][way])} ({settings_of(row)})",
                size_in_words(row["bytes"], record),
            )


def in_words(scores: Row) -> str:
    """Write three scores in a line."""
    return f"{scores['accuracy']:.2%}, NLL {scores['nll']:.3f}, ECE {scores['ece']:.3f}"


def size_in_words(size: int, record: Row) -> str:
    """Tell bytes beside those of the plain network."""
    return f"{size / 1e6:.2f} MB, the plain fp32 network {record['sizes']['plain fp32 network'] / 1e6:.1f} MB"


def settings_of(row: Row) -> str:
    """Tell how a file was made."""
    price = "" if row["bit_price"] is None else f", {row['bit_price']:g} nats a bit"
    price += "" if row["rate"] is None else f", σ of {row['rate']:.1%} of the weights"
    trained = f", {row['epochs']} epochs" if row["epochs"] else ""
    return f"{row['components']} components{price}{trained}, {row['values']}"


# -- tables -----------------------------------------------------------------------------------------------------------


def begin(record: Row, title: str, columns: Iterable[str]) -> list[str]:
    """Begin a table, and say on how many examples its scores are."""
    counts = f"{record['examples']:,} test examples, {record['samples']} draws"
    by_it = record["settings"].get("rule") == "moments"
    how = "is what the files were trained by" if by_it else "is calibrated on held-out data"
    words = f"{counts}; one pass {how}.\n"
    where = f"{record['model']['name']} on {record['source']['name']}"
    return [*head(record, f"{where}: {title}"), words, *header(columns)]


def cells(scores: Row | None) -> list[str]:
    """Write the scores of one way to predict, or leave them empty."""
    return [form.format(scores[key]) if scores else "" for key, (_, form) in SCORES.items()]


def megabytes(row: Row) -> str:
    """Write the size of a file."""
    return f"{row['bytes'] / 1e6:.3f}"


TITLES = [title for title, _ in SCORES.values()]


def ways_of(record: Row) -> list[str]:
    """Name the ways to predict that a record knows; one pass is always there."""
    rows = [*record.get("compared", ()), *record["results"]]
    return [way for way in WAYS if way != "one_pass_by_labels" or any(way in row["test"] for row in rows)]


def titles_of(ways: Iterable[str]) -> list[str]:
    """Name the scores of each way."""
    return [title + WAYS[way].column for way in ways for title in TITLES]


def scores_by(row: Row, ways: Iterable[str]) -> list[str]:
    """Write the scores of each way."""
    return [text for way in ways for text in cells(row["test"].get(way))]


def curve_table(record: Row) -> str:
    """Lay out the run, those beside it, and all files."""
    others, ways = list(record["compared"][0]["test"]["draws"]["ood"]), ways_of(record)
    seen = (f"AUROC {name}" for name in others)
    columns = ["MB on disk", *titles_of(ways), *seen, "outliers", "Gaussians", "paper's count"]
    lines = begin(record, "files of shared weights", columns)
    for row in record["compared"]:
        lines.append(curve_line(f"{row['name']}, its own file", row, ways, others))
    for row in sorted(best_training(record["results"]), key=lambda row: -row["bytes"]):
        lines.append(curve_line(settings_of(row), row, ways, others))
    return "\n".join(lines)


def curve_line(name: str, row: Row, ways: Sequence[str], others: Sequence[str]) -> str:
    """Lay out one file."""
    found = [f"{row['test']['draws']['ood'][other]['auroc']:.4f}" for other in others]
    counts = [f"{row[key]:,}" if key in row else "" for key in ("outliers", "gaussians", "paper_parameters")]
    return f"| {name} | {' | '.join([megabytes(row), *scores_by(row, ways), *found, *counts])} |"


def final_table(records: Sequence[Row]) -> str:
    """Lay out files that differ in their final training, those of one start together."""
    ways = ways_of(records[0])
    titles = ["seed", "of the images", "epochs", "rate", "of spreads", "draws", "MB on disk", *titles_of(ways)]
    where = f"{records[0]['model']['name']} on {records[0]['source']['name']}"
    commands = "\n\n".join(f"`{record['command']}`" for record in records)
    lines = [f"**{where}: the final training**", "", f"{commands}\n", *header([*titles, "held-out NLL, by labels"])]
    rows = [(record, row) for record in records for row in record["results"] if row["epochs"]]
    for record, row in sorted(rows, key=lambda one: (one[0]["seed"], one[1]["epochs"], one[0]["settings"]["scale_lr"])):
        settings, share = record["settings"], 1 - record["source"]["validation_share"]
        cells = [str(record["seed"]), f"{share:.0%}", str(row["epochs"]), f"{row['lr']:g}", f"{settings['scale_lr']:g}"]
        cells += [str(record["samples"]), megabytes(row), *scores_by(row, ways)]
        cells.append(f"{row[held_out_by('one_pass_by_labels')]['nll']:.4f}")
        name = "by moments" if settings["rule"] == "moments" else "by draws"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def files_table(record: Row) -> str:
    """Lay out runs that were trained to share, by their settings, with all that is counted."""
    ways = ways_of(record)
    titles = ["MB on disk", *titles_of(ways), "outliers", "blends", "Gaussians", "paper's count", "s to train"]
    lines = begin(record, "trained to share", titles)
    for row in record["results"]:
        counts = [f"{row[key]:,}" for key in ("outliers", "blends", "gaussians", "paper_parameters")]
        numbers = [megabytes(row), *scores_by(row, ways), *counts, f"{row['costs']['train_seconds']:,.0f}"]
        lines.append(f"| {shared_name(row['method'])}, {row['values']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def shared_name(method: Row) -> str:
    """Name a sharing by what the pages compare."""
    centre = ", prior around the start" if method["prior"].get("center") == "pretrained" else ""
    return f"{method['components']} components, {ablation_of(method)}{centre}"


def ablation_of(method: Row) -> str:
    """Name what is left out of the paper's settings, or changed."""
    alone = method["threshold"] is None and not method["gradient_share"]
    kind = "no outliers" if method["dissolve"] == "neighbours" else "outliers of small components alone"
    parts = [kind] if alone else []
    parts += ["no blends"] if method["border"] is None else []
    parts += ["no merging"] if method["merge_distance"] == 0 else []
    parts += [f"threshold {method['threshold']:g}"] if method["threshold"] not in (None, 0.2) else []
    return ", ".join(parts) or "all"


def int8_table(record: Row) -> str:
    """Lay out Table 4 beside ours."""
    ways = ways_of(record)
    lines = begin(record, "INT8 and sharing", ["MB", *titles_of(ways)])
    for name, (*scores, size) in PAPER_INT8.get(record["source"]["name"], {}).items():
        theirs = scores_by({"test": {"draws": dict(zip(SCORES, scores, strict=True))}}, ways)
        lines.append(f"| {name} | {' | '.join([f'{size:.3f}', *theirs])} |")
    rows = [(row["name"], row) for row in record["compared"]]
    rows += [(settings_of(row), row) for row in reversed(front(best_training(record["results"])))]
    for name, row in rows:
        lines.append(f"| {name} | {' | '.join([megabytes(row), *scores_by(row, ways)])} |")
    return "\n".join(lines)


def ablation_table(record: Row) -> str:
    """Lay out Tables 5, 8 and 10 beside ours, the mean over the seeds."""
    titles = [f"{title}, paper" for title in TITLES] + TITLES
    lines = begin(record, "what is left out", [*titles, "outliers", "blends", "Gaussians", "kB on disk"])
    groups: dict[str, list[Row]] = {}
    for row in record["results"]:
        groups.setdefault(ablation_of(row["method"]), []).append(row)
    places = list(PAPER_ABLATIONS)
    for name, rows in sorted(groups.items(), key=lambda one: (*places, one[0]).index(one[0])):
        theirs = PAPER_ABLATIONS.get(name)
        ours = {key: statistics.fmean(row["test"]["draws"][key] for row in rows) for key in SCORES}
        counts = [f"{statistics.fmean(row[key] for row in rows):,.0f}" for key in ("outliers", "blends", "gaussians")]
        size = statistics.fmean(row["bytes"] for row in rows) / 1e3
        paper = cells(None if theirs is None else dict(zip(SCORES, theirs, strict=True)))
        lines.append(f"| {name} | {' | '.join([*paper, *cells(ours), *counts, f'{size:,.0f}'])} |")
    return "\n".join(lines)
