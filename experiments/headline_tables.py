"""The headline table: all methods and prediction modes with the numbers of their papers, costs, and targets."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from headline_rows import ONE_PASS, TASK, Group, Row, all_groups, grouped, read_all, task_of
from pbn_tables import header
from sharing_tables import PAPER as SHARING_PAPER
from ssvi_tables import SSVI_PAPER
from stored import read

from leanbayes.core import config
from leanbayes.evaluation.seeds import summarize
from leanbayes.methods import parse_method

SCORES = {
    "accuracy": ("accuracy", "{:.2%}"),
    "nll": ("NLL", "{:.4f}"),
    "ece": ("ECE", "{:.4f}"),
}  # also printed in papers
OTHERS = {"brier": ("Brier", "{:.4f}")}
AFTER = {"corruptions:nll": ("corrupted NLL", "{:.3f}"), "kilo_stored": ("numbers ×1000", "{:,.0f}")}
BEST = {"accuracy": max, "nll": min, "ece": min}
PAPERS: dict[str, dict[str, float]] = {
    "Deterministic": {"accuracy": 0.9321, "nll": 0.201, "ece": 0.022},
    "MeanField": {"accuracy": SSVI_PAPER["cifar10"][1.0]["accuracy"]},
    "SSVI 95 %": {key: SSVI_PAPER["cifar10"][0.05][key] for key in ("accuracy", "nll")},
    "2DGBNN": SHARING_PAPER,
}
MODES = ("cudagraphs", "compiled", "eager")  # of the benchmarks, fastest first
KINDS = {"MeanField": "", "VDP": "", "SSVI": ", sparse", "PBN": ", partial", "WeightSharing": ", shared",
         "MCDropout": ", dropout"}  # fmt: skip
SHORT = ("Deterministic", "Deterministic, temperature", "MC dropout, 30 samples", "Ensemble (5)",
         "MeanField by ivon (60 epochs), 30 samples", "MeanField by ivon (60 epochs), 30 samples, temperature",
         "MeanField by ivon (140 epochs), 30 samples", "MeanField, 30 samples", "MeanField, 30 samples, temperature",
         "MeanField, one pass, by labels", "PBN 5 %, 30 samples", "PBN 5 %, 30 samples, temperature",
         "PBN 5 %, one pass, by labels",
         "VDP++, one pass, by labels", "SSVI 95 % (200 epochs on 99%), 30 samples",
         "SSVI 95 % (200 epochs on 99%), 30 samples, temperature",
         "SSVI 95 % (200 epochs on 99%), one pass, by labels",
         "SSVI 95 % by ivon (60 epochs), 30 samples", "SSVI 95 % by ivon (200 epochs), 30 samples",
         "2DGBNN 6000 (60 + 40 epochs), one pass, by labels", "composition (500 held out), 30 samples",
         "composition (500 held out), 30 samples, temperature",
         "composition (500 held out), one pass", "composition, for one pass, by labels")  # fmt: skip
SUMMARY = {"plain network": "Deterministic", "Bayesian, 30 samples": "MeanField by ivon (60 epochs), 30 samples",
           "Bayesian, compressed, one pass": "composition (500 held out), one pass"}  # fmt: skip
SHORT_COLUMNS = {"accuracy": ("accuracy", "{:.2%}"), "nll": ("NLL", "{:.3f}"), "ece": ("ECE", "{:.3f}"),
                 "corruptions:nll": ("NLL, corrupted", "{:.2f}"), "ood:svhn": ("AUROC, SVHN", "{:.2%}")}  # fmt: skip
COMPOSITION = {
    "MB on disk": 0.70,
    "accuracy": 0.93,
    "NLL": 0.215,
    "ECE": 0.015,
    "× a plain forward": 2.5,
}  # targets in one pass
SPARSE = {"accuracy": 0.94, "NLL": 0.19}  # SSVI 95 %
TRAINING = 1.15  # target for mean-field, relative to the plain network
NOTES = (
    "Each row is a method and a prediction mode. With several seeds a number is the mean, with three or more ± half of "
    "its 95 % interval (with two, the interval is as wide as the table). A bold mean is better than the paper's number "
    "next to it: Tables 3 (2DGBNN) and 9 (plain) of Lin et al. 2025, and Tables 1 (dense) and 2 of Li et al. 2024, "
    "whose ECE is defined differently; the papers on PBN and VDP++ print none. The two factors of one pass were fitted "
    "on held-out images to the probabilities of Monte Carlo samples, except for VDP++, which is trained by one pass; "
    "or, “by labels”, to the labels, as the temperature was. Rows “by ivon” are those of "
    "[engines.md](engines.md#measured), at temperature 1; the others are trained by backprop. Their AUROC is of the "
    "seed whose model was saved, with 4,000 (mean-field) or 10,000 images of SVHN. Files and SSVI for 200 epochs use "
    "today's prior on the factors, the other rows do not ([what it changes](one_pass_results.md)). The compositions "
    "are files of SSVI for 200 epochs at 0.2 nats per bit, then trained for 10 epochs with fixed σ, or, “for one "
    "pass”, for 30 epochs with trained σ. These settings were tried on seed 1, with its test scores in view, and "
    "reused for seed 2, with 2500 images held out, whose file “for one pass” was scored with 100 samples on 1000 "
    "images only, [where one pass is better](one_pass_results.md), and otherwise [with 30](sharing.md#measured). AUROC "
    "uses the entropy; “corrupted” is the mean over 15 corruptions at five severities, of 1,000 test images each. "
    "“Fitted” are the factors of one pass, or a temperature T that divides the logits. Plain networks, mean-field, "
    "PBN, VDP++, SSVI and the baselines are trained by SGD with a learning rate of 0.1, 2DGBNN and the compositions "
    "from a trained network by AdamW with a learning rate of 0.0001 and no weight decay. “Numbers” counts everything "
    "in a file: labels of shared weights and positions of sparse weights, but no single bits. MB of 2DGBNN is the size "
    "of its compact file, whose scores are [nearly the same](sharing.md). Peak MB is the memory of training."
)
MEASURED = (
    " “Training × plain” is the time of an epoch, or else of a step (with CUDA graphs, or else compiled), relative to "
    "the plain network, times the number of ensemble members; “ms” is the time to predict 1000 images in batches of "
    "{batch} ({mode}). Both come from [benchmarks](benchmarks.md) in which the variants take turns; PBN and SSVI were "
    "measured with 5 % of the weights, 2DGBNN and files with 5 % of the weights that share 256 Gaussians."
)


def headline_tables(folder: Path, benchmarks: Path) -> Iterator[str]:
    """Format the results of `headline.py` and of baselines: one table per task, then targets and figures."""
    records = read_all(folder)
    tasks = dict.fromkeys(task_of(record) for record in records)
    for task in tasks:
        found = [record for record in records if task_of(record) == task]
        groups = grouped(row for record in found for row in record["results"])
        times = Times(benchmarks if task == TASK else None)
        yield table(task, found, groups, times)
        if task == TASK:
            lines = list(targets(groups, times))
            if lines:
                yield "\n".join(["Targets:\n", *lines])
    for path in sorted(folder.glob("*.svg")):
        yield f"![{path.stem}](../experiments/results/headline/{path.name})"


# -- benchmarks -------------------------------------------------------------------------------------------------------


class Times:
    """Times of ResNet-18 on an idle GPU from the benchmarks, by variant."""

    def __init__(self, folder: Path | None) -> None:
        self.training: dict[str, float] = {}  # time of an epoch or step, relative to the plain network
        self.passes: dict[str, tuple[float, float]] = {}  # ms for 1000 images, and relative to the plain network
        self.mode, self.batch = "", 0
        if folder is None:
            return
        for mode in reversed(MODES):
            for path in sorted(folder.glob("step-*.json")):
                steps = (row for row in read(path)["rows"] if (row["network"], row["mode"]) == ("resnet18", mode))
                self.training |= {row["variant"]: row["time_ratio"] for row in steps if "time_ratio" in row}
        for path in sorted(folder.glob("epoch-*.json")):
            record = read(path)
            if record["network"] == "resnet-18":
                ratios = record.get("ratios") or {"mean-field": record["ratio"]}
                self.training |= {variant_of(config.encode(parse_method(name))): of for name, of in ratios.items()}
        engines = read(folder / "engines-resnet-18.json").get("rows", {})
        self.training |= {"sample, ivon": engines["ivon"]["ratio"]} if engines else {}
        tables = [one for path in sorted(folder.glob("one-pass-*.json")) for one in tables_of(read(path))]
        if tables:  # use one run, the one with the most variants: variants of two runs did not take turns
            self.mode, self.batch, rows = max(tables, key=lambda one: (len(one[2]), -MODES.index(one[0])))
            self.passes = {row["variant"]: (1e3 * row["ms"] / self.batch, row["time_ratio"]) for row in rows}

    def of_training(self, method: Row) -> float:
        """Return the training time relative to the plain network with as many epochs; nan if unknown."""
        return self.training.get(variant_of(method), math.nan) * method.get("members", 1)

    def one_pass(self, group: Group) -> tuple[float, float]:
        """Return milliseconds for 1000 images, and relative to the plain network; nan if unknown."""
        kind, unknown = group.method["type"], (math.nan, math.nan)
        if kind == "Deterministic":
            return self.passes.get("plain network", unknown)
        if kind == "Ensemble":
            return self.passes.get(f"ensemble of {group.method['members']}", unknown)
        # Neither factors nor a temperature change the time.
        way = ONE_PASS if group.way.startswith(ONE_PASS) else group.way.removesuffix(", temperature")
        return self.passes.get(way + KINDS[kind], unknown) if kind in KINDS else unknown


def variant_of(method: Row) -> str:
    """Name a method as the benchmark of training steps does."""
    if method.get("engine") == "ivon":
        return f"{variant_of({**method, 'engine': 'backprop'})}, ivon"
    match method["type"]:
        case "Deterministic" | "Ensemble":
            return "deterministic"
        case "MeanField":
            return method["rule"]
        case "VDP":
            return "moments"
        case "PBN":
            return f"partial {100 * method['rate']:g} %"
        case "SSVI":
            return f"subspace {100 * method['density']:g} %"
        case "WeightSharing":
            return f"shared {method['components']}"
    return method["type"]


def tables_of(record: Row) -> Iterator[tuple[str, int, list[Row]]]:
    """Yield mode, batch size and rows for every mode in which ResNet-18 was measured."""
    rows = [row for row in record["rows"] if row["network"] == "resnet18"]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        yield mode, record["batch"], [row for row in rows if row["mode"] == mode]


# -- the table --------------------------------------------------------------------------------------------------------


def table(task: tuple[str, str], records: Sequence[Row], groups: Sequence[Group], times: Times) -> str:
    """Format all groups, one line each."""
    network, data = task
    others = list(dict.fromkeys(name for group in groups for row in group.rows for name in row["ood"]))
    middle = OTHERS | {f"ood:{name}": (f"AUROC {name}", "{:.2%}") for name in others} | AFTER
    titles = [title for name, _ in SCORES.values() for title in (name, "paper")]
    titles += [title for title, _ in middle.values()] + [
        "MB on disk",
        "training × plain",
        "epochs",
        "of the images",
        "temperature",
        "fitted",
        "ms",
        "peak MB",
        "seeds",
    ]
    machine, commands = records[0]["machine"], (record["command"] for record in records)
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    notes = NOTES + (MEASURED.format(batch=times.batch, mode=times.mode) if times.passes else "")
    lines = [f"## The headline: {network} on {data}\n", *(f"`{command}`\n" for command in commands)]
    lines.append(f"{where}, torch {records[0]['versions']['torch']}, {records[0]['examples']} test examples. {notes}\n")
    lines += header(titles)
    for group in groups:
        in_papers = task == TASK and not group.way.endswith("temperature")
        paper = PAPERS.get(group.name.removesuffix(" by ivon"), {}) if in_papers else {}
        cells = [text for key in SCORES for text in with_paper(group, key, paper.get(key))]
        cells += [of_seeds(group, key, form) for key, (_, form) in middle.items()]
        training = times.of_training(group.method) if group.epochs else math.nan
        milliseconds, _ = times.one_pass(group)
        cells += [
            known(group.megabytes, ".2f"),
            known(training, ".2f"),
            " + ".join(map(str, group.epochs)),
            *training_data(group.rows[0]),
            fitted(group),
            known(milliseconds, ".1f"),
            known(group.mean("train_peak_mb"), ",.0f"),
            str(len(group.rows)),
        ]
        lines.append(f"| {group.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_table(folder: Path, benchmarks: Path) -> Iterator[str]:
    """Format the most important lines with few columns, for the guide."""
    groups, times = all_groups(folder), Times(benchmarks)
    shown = {group.label: group for group in groups if group.label in SHORT}
    if shown:
        titles = [title for title, _ in SHORT_COLUMNS.values()] + ["MB on disk", "epochs", "ms", "seeds"]
        yield "\n".join([*header(titles), *(short_line(group, times) for group in shown.values())])
        factors = {label: fitted(group) for label, group in shown.items()}
        yield f"Fitted on held-out images: {'; '.join(f'{label}: {text}' for label, text in factors.items() if text)}."


def short_line(group: Group, times: Times) -> str:
    """Format one line of the short table."""
    cells = [of_seeds(group, key, form) for key, (_, form) in SHORT_COLUMNS.items()]
    epochs = " + ".join(map(str, group.epochs))
    cells += [known(group.megabytes, ".2f"), epochs, known(times.one_pass(group)[0], ".0f")]
    cells.append(str(len(group.rows)))
    return f"| {group.label} | {' | '.join(cells)} |"


def summary_table(folder: Path, benchmarks: Path) -> Iterator[str]:
    """Format four rows for the README that need no knowledge of the field: the plain network, and two of ours."""
    known_groups, times = {group.label: group for group in all_groups(folder)}, Times(benchmarks)
    shown = {title: known_groups[label] for title, label in SUMMARY.items() if label in known_groups}
    if len(shown) < len(SUMMARY):
        return
    seeds = (count_of(len(group.rows)) for group in shown.values())
    lines = header([f"{title} ({count})" for title, count in zip(shown, seeds, strict=True)])
    for title, key, form in (
        ("spots unknown inputs (AUROC, 50 % is chance)", "ood:svhn", "{:.1%}"),
        ("says 80 % and is right 80 % (mean gap, ECE)", "ece", "{:.1%}"),
    ):
        lines.append(f"| {title} | {' | '.join(of_seeds(group, key, form) for group in shown.values())} |")
    passes = (f"{known(times.one_pass(group)[0], '.0f')} ms" for group in shown.values())
    lines.append(f"| time to predict 1000 images | {' | '.join(passes)} |")
    lines.append(f"| file | {' | '.join(f'{group.megabytes:.1f} MB' for group in shown.values())} |")
    yield "\n".join(lines)


def training_data(row: Row) -> tuple[str, str]:
    """Return the fraction of training images and the temperature; files store neither."""
    return ("", "") if "file" in row else (f"{1 - row['validation_share']:.0%}", f"{row['recipe']['temperature']:g}")


def fitted(group: Group) -> str:
    """Format what was fitted on held-out images, as the mean over seeds: factors of one pass, or a temperature."""
    scales = [row["moment_scale"] for row in group.rows if "moment_scale" in row]
    if scales:
        mean, std = (statistics.fmean(of) for of in zip(*scales, strict=True))
        return f"mean × {mean:.2f}, std × {std:.2f}"
    temperatures = [row["temperature"] for row in group.rows if "temperature" in row]
    return f"T = {statistics.fmean(temperatures):.2f}" if temperatures else ""


def known(value: float, form: str) -> str:
    """Format a number; an empty string if it is nan."""
    return "" if math.isnan(value) else format(value, form)


def with_paper(group: Group, key: str, paper: float | None) -> list[str]:
    """Format a score and the paper's, in bold if it is better."""
    form = SCORES[key][1]
    if paper is None:
        return [of_seeds(group, key, form), ""]
    ours = group.mean(key)
    better = ours != paper and BEST[key](ours, paper) == ours
    return [of_seeds(group, key, form, better), form.format(paper)]


def of_seeds(group: Group, key: str, form: str, best: bool = False) -> str:
    """Format the mean of a metric over the seeds, with its interval for three or more seeds."""
    values = group.values(key)
    if not values:
        return ""
    text = cell(asdict(summarize(values if len(values) > 2 else [group.mean(key)])), form, best)
    return text if len(values) == len(group.rows) else f"{text} ({count_of(len(values))})"


def count_of(seeds: int) -> str:
    """Format a number of seeds."""
    return f"{seeds} seed{'s' if seeds > 1 else ''}"


def cell(summary: Row, form: str, best: bool) -> str:
    """Format a mean with its interval; undefined values are nan or None."""
    mean, low, high = (math.nan if summary[key] is None else summary[key] for key in ("mean", "low", "high"))
    text = form.format(mean)
    half = (high - low) / 2
    if half > 0:  # and not nan
        text += f" ± {form.format(half)}"
    return f"**{text}**" if best else text


# -- targets ----------------------------------------------------------------------------------------------------------


def targets(groups: Sequence[Group], times: Times) -> Iterator[str]:
    """Format every target with its measured value and whether it is met."""
    for composition in in_one_pass(groups):
        _, ratio = times.one_pass(composition)
        found = {**scores_of(composition), "MB on disk": composition.megabytes, "× a plain forward": ratio}
        for name, limit in COMPOSITION.items():
            if not math.isnan(found[name]):
                yield target_line(f"{composition.label}: {name}", found[name], limit)
        sampled = [group for group in groups if group.title == composition.title and group.way.endswith("samples")]
        if sampled:
            most = max(sampled, key=lambda group: int(group.way.split()[0]))
            yield target_line(f"{composition.label}: NLL against {most.way}", found["NLL"], most.mean("nll"), "NLL")
    for group in (group for group in groups if group.name == "SSVI 95 %"):
        for name, limit in SPARSE.items():
            yield target_line(f"{group.label}: {name}", scores_of(group)[name], limit)
    yield from training_targets(groups, times)


def in_one_pass(groups: Sequence[Group]) -> list[Group]:
    """Return the compositions in one pass: files with that name, or else all files."""
    files = [group for group in groups if "file" in group.rows[0] and group.way.startswith(ONE_PASS)]
    return [group for group in files if "composition" in group.name.lower()] or files


def composed(groups: Sequence[Group]) -> Group | None:
    """Return the smallest composition in one pass, calibrated by labels if available."""
    return min(in_one_pass(groups), key=lambda one: (one.way == ONE_PASS, one.megabytes), default=None)


def training_targets(groups: Sequence[Group], times: Times) -> Iterator[str]:
    """Compare mean-field by samples with the plain network: NLL and training time."""
    plain = most_trained(group for group in groups if group.label == "Deterministic")
    ours = most_trained(group for group in groups if group.name == "MeanField" and group.way.endswith("samples"))
    if plain is None or ours is None:
        return
    yield target_line(f"{ours.label}: NLL against the plain network", ours.mean("nll"), plain.mean("nll"), "NLL")
    ratio = times.of_training(ours.method) * sum(ours.epochs) / sum(plain.epochs)
    if not math.isnan(ratio):
        yield target_line(f"{ours.label}: × the plain network's training time", ratio, TRAINING)


def most_trained(groups: Iterable[Group]) -> Group | None:
    """Return the group with the most seeds, then with the most epochs."""
    return max(groups, key=lambda group: (len(group.rows), sum(group.epochs)), default=None)


def scores_of(group: Group) -> dict[str, float]:
    """Return mean scores by the names of their columns."""
    return {title: group.mean(key) for key, (title, _) in SCORES.items()}


def target_line(what: str, found: float, limit: float, score: str = "") -> str:
    """Format one target; accuracy has a lower bound, all others an upper bound."""
    score = score or what.rpartition(": ")[2]
    high = score == "accuracy"
    form = {title: form for title, form in SCORES.values()}.get(score, "{:.2f}")
    met = found >= limit if high else found <= limit
    sign, result = "≥" if high else "≤", "met" if met else "**missed**"
    return f"- {what} {form.format(found)}, target {sign} {form.format(limit)}: {result}"
