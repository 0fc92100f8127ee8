"""The headline table: all methods and ways to predict beside their papers, their costs, and which targets are met."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from headline_rows import ONE_PASS, TASK, Group, Row, all_groups, grouped, read_all, task_of
from pbn_tables import header
from sharing_tables import PAPER as SHARING_PAPER
from ssvi_tables import SSVI_PAPER, read

from leanbayes import config
from leanbayes.evaluation.seeds import summarise
from leanbayes.methods import parse_method

SCORES = {"accuracy": ("accuracy", "{:.2%}"), "nll": ("NLL", "{:.4f}"), "ece": ("ECE", "{:.4f}")}  # papers have these
OTHERS = {"brier": ("Brier", "{:.4f}")}
AFTER = {"corruptions:nll": ("corrupted NLL", "{:.3f}"), "kilo_stored": ("numbers ×1000", "{:,.0f}")}
BEST = {"accuracy": max, "nll": min, "ece": min}
PAPERS: dict[str, dict[str, float]] = {
    "Deterministic": {"accuracy": 0.9321, "nll": 0.201, "ece": 0.022},
    "MeanField": {"accuracy": SSVI_PAPER["cifar10"][1.0]["accuracy"]},
    "SSVI 95 %": {key: SSVI_PAPER["cifar10"][0.05][key] for key in ("accuracy", "nll")},
    "2DGBNN": SHARING_PAPER,
}
MODES = ("cudagraphs", "compiled", "eager")  # of the benchmarks, the best first
KINDS = {"MeanField": "", "VDP": "", "SSVI": ", sparse", "PBN": ", partial", "WeightSharing": ", shared",
         "MCDropout": ", dropout"}  # fmt: skip
SHORT = ("Deterministic", "Deterministic, temperature", "MC dropout, 30 draws", "Ensemble (5)", "MeanField, 30 draws",
         "MeanField, one pass, by labels", "PBN 5 %, 30 draws", "PBN 5 %, one pass, by labels",
         "VDP++, one pass, by labels", "SSVI 95 % (200 epochs on 99%), 30 draws",
         "SSVI 95 % (200 epochs on 99%), one pass, by labels",
         "2DGBNN 6000 (60 + 40 epochs), one pass, by labels", "composition (500 held out), 30 draws",
         "composition (500 held out), one pass", "composition, for one pass, by labels")  # fmt: skip
SHORT_COLUMNS = {"accuracy": ("accuracy", "{:.2%}"), "nll": ("NLL", "{:.3f}"), "ece": ("ECE", "{:.3f}"),
                 "corruptions:nll": ("NLL, corrupted", "{:.2f}"), "ood:svhn": ("AUROC, SVHN", "{:.2%}")}  # fmt: skip
COMPOSITION = {"MB on disk": 0.70, "accuracy": 0.93, "NLL": 0.215, "ECE": 0.015, "× a plain forward": 2.5}  # one pass
SPARSE = {"accuracy": 0.94, "NLL": 0.19}  # SSVI 95 %
TRAINING = 1.15  # of mean-field, over the plain network
NOTES = (
    "A line is a method and how it predicts. With several seeds a figure is the mean, from three on ± half of its 95 % "
    "interval (of two it is as wide as the table); bold is a mean that beats the paper's number next to it: of Tables "
    "3 (2DGBNN) and 9 (plain) of Lin et al. 2025, and 1 (dense) and 2 of Li et al. 2024, whose ECE is another one; "
    "those on PBN and VDP++ print none. The two factors of one pass were fitted on held-out images, to the "
    "probabilities of draws, but for VDP++, which is trained by one pass; or “by labels” to the labels, as the "
    "temperature was: with the prior that they have now those of files and of SSVI for 200 epochs, and still without "
    "it the others ([what it changes](one_pass.md#measured)). The compositions are files of SSVI for 200 epochs at 0.2 "
    "nats a bit, then trained for 10 epochs with their spreads held, or, “for one pass”, for 30 epochs with them: "
    "settings that were tried on seed 1, with a look at its test scores, and taken over for seed 2, with 2500 images "
    "held out, whose file “for one pass” was scored by 100 draws on 1000 images alone, [where one pass is "
    "better](one_pass.md#measured), and else [by 30](sharing.md#measured). AUROC is by entropy, “corrupted” the mean "
    "over 15 corruptions at five severities. “Numbers” are all that a file has: labels of shared weights count, and "
    "positions of sparse ones, but no single bits. MB of 2DGBNN are those of its compact file, whose scores are "
    "[nearly the same](sharing.md). Peak MB are those of training."
)
MEASURED = (
    " “Training × plain” is the time of an epoch, or else of a step (with CUDA graphs, or else compiled), over the "
    "plain network's, times the members of an ensemble; “ms” are those to predict 1000 images in batches of {batch} "
    "({mode}). Both are from [benchmarks](benchmarks.md) in which the variants take turns; of PBN and SSVI 5 % of the "
    "weights were measured, and of 2DGBNN and files 5 % that share 256 Gaussians."
)


def headline_tables(folder: Path, benchmarks: Path) -> Iterator[str]:
    """Lay out what `headline.py` has found, and baselines beside it: a table a task, then targets and pictures."""
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


# -- measured elsewhere -----------------------------------------------------------------------------------------------


class Times:
    """What the benchmarks have measured of ResNet-18 on an idle GPU, by their variants."""

    def __init__(self, folder: Path | None) -> None:
        self.training: dict[str, float] = {}  # time of an epoch, or of a step, over the plain network's
        self.passes: dict[str, tuple[float, float]] = {}  # milliseconds for 1000 images, and over the plain network's
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
        tables = [one for path in sorted(folder.glob("one-pass-*.json")) for one in tables_of(read(path))]
        if tables:  # the one with the most variants: those of two runs did not take turns
            self.mode, self.batch, rows = max(tables, key=lambda one: (len(one[2]), -MODES.index(one[0])))
            self.passes = {row["variant"]: (1e3 * row["ms"] / self.batch, row["time_ratio"]) for row in rows}

    def of_training(self, method: Row) -> float:
        """Return the time of a training over the plain network's with as many epochs; nan where it is not known."""
        return self.training.get(variant_of(method), math.nan) * method.get("members", 1)

    def one_pass(self, group: Group) -> tuple[float, float]:
        """Return milliseconds for 1000 images, and over those of the plain network; nan where they are not known."""
        kind, unknown = group.method["type"], (math.nan, math.nan)
        if kind == "Deterministic":
            return self.passes.get("plain network", unknown)
        if kind == "Ensemble":
            return self.passes.get(f"ensemble of {group.method['members']}", unknown)
        way = ONE_PASS if group.way.startswith(ONE_PASS) else group.way  # however its factors are fitted
        return self.passes.get(way + KINDS[kind], unknown) if kind in KINDS else unknown


def variant_of(method: Row) -> str:
    """Name a method as the benchmark of training steps does."""
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
    """Give the rows of every mode that ResNet-18 was measured in, with the size of a batch."""
    rows = [row for row in record["rows"] if row["network"] == "resnet18"]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        yield mode, record["batch"], [row for row in rows if row["mode"] == mode]


# -- the table --------------------------------------------------------------------------------------------------------


def table(task: tuple[str, str], records: Sequence[Row], groups: Sequence[Group], times: Times) -> str:
    """Lay out all groups, a line each."""
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
        paper = PAPERS.get(group.name, {}) if task == TASK and group.way != "temperature" else {}
        cells = [text for key in SCORES for text in with_paper(group, key, paper.get(key))]
        cells += [of_seeds(group, key, form) for key, (_, form) in middle.items()]
        training = times.of_training(group.method) if group.epochs else math.nan
        milliseconds, _ = times.one_pass(group)
        cells += [
            f"{group.megabytes:.2f}",
            known(training, ".2f"),
            " + ".join(map(str, group.epochs)),
            *training_data(group.rows[0]),
            known(milliseconds, ".1f"),
            known(group.mean("train_peak_mb"), ",.0f"),
            str(len(group.rows)),
        ]
        lines.append(f"| {group.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_table(folder: Path, benchmarks: Path) -> Iterator[str]:
    """Lay out the lines that a newcomer looks for, with few figures."""
    groups, times = all_groups(folder), Times(benchmarks)
    shown = {group.label: group for group in groups if group.label in SHORT}
    if shown:
        titles = [title for title, _ in SHORT_COLUMNS.values()] + ["MB on disk", "epochs", "ms", "seeds"]
        yield "\n".join([*header(titles), *(short_line(group, times) for group in shown.values())])


def short_line(group: Group, times: Times) -> str:
    """Lay out one of them."""
    cells = [of_seeds(group, key, form) for key, (_, form) in SHORT_COLUMNS.items()]
    cells += [f"{group.megabytes:.2f}", " + ".join(map(str, group.epochs)), known(times.one_pass(group)[0], ".0f")]
    cells.append(str(len(group.rows)))
    return f"| {group.label} | {' | '.join(cells)} |"


def training_data(row: Row) -> tuple[str, str]:
    """Tell the share of the images that it was trained on, and the weight of the KL; a file tells neither."""
    return ("", "") if "file" in row else (f"{1 - row['validation_share']:.0%}", f"{row['recipe']['temperature']:g}")


def known(value: float, form: str) -> str:
    """Write a number, and nothing where it is not known."""
    return "" if math.isnan(value) else format(value, form)


def with_paper(group: Group, key: str, paper: float | None) -> list[str]:
    """Write a score and the paper's, bold where it is better."""
    form = SCORES[key][1]
    if paper is None:
        return [of_seeds(group, key, form), ""]
    ours = group.mean(key)
    better = ours != paper and BEST[key](ours, paper) == ours
    return [of_seeds(group, key, form, better), form.format(paper)]


def of_seeds(group: Group, key: str, form: str, best: bool = False) -> str:
    """Write the mean of a figure over the seeds, from three on with its interval."""
    values = group.values(key)
    if not values:
        return ""
    return cell(asdict(summarise(values if len(values) > 2 else [group.mean(key)])), form, best)


def cell(figure: Row, form: str, best: bool) -> str:
    """Write a mean with its interval; what is not defined is nan, or null."""
    mean, low, high = (math.nan if figure[key] is None else figure[key] for key in ("mean", "low", "high"))
    text = form.format(mean)
    half = (high - low) / 2
    if half > 0:  # and not nan
        text += f" ± {form.format(half)}"
    return f"**{text}**" if best else text


# -- targets ----------------------------------------------------------------------------------------------------------


def targets(groups: Sequence[Group], times: Times) -> Iterator[str]:
    """Tell of every target what was measured, and whether that meets it."""
    for composition in in_one_pass(groups):
        _, ratio = times.one_pass(composition)
        found = {**scores_of(composition), "MB on disk": composition.megabytes, "× a plain forward": ratio}
        for name, limit in COMPOSITION.items():
            if not math.isnan(found[name]):
                yield told(f"{composition.label}: {name}", found[name], limit)
        draws = [group for group in groups if group.title == composition.title and group.way.endswith("draws")]
        if draws:
            most = max(draws, key=lambda group: int(group.way.split()[0]))
            yield told(f"{composition.label}: NLL beside that of {most.way}", found["NLL"], most.mean("nll"), "NLL")
    for group in (group for group in groups if group.name == "SSVI 95 %"):
        for name, limit in SPARSE.items():
            yield told(f"{group.label}: {name}", scores_of(group)[name], limit)
    yield from training_targets(groups, times)


def in_one_pass(groups: Sequence[Group]) -> list[Group]:
    """Find the compositions in one pass: the files that are called so, or else all."""
    files = [group for group in groups if "file" in group.rows[0] and group.way.startswith(ONE_PASS)]
    return [group for group in files if "composition" in group.name.lower()] or files


def composed(groups: Sequence[Group]) -> Group | None:
    """Find the smallest composition in one pass, by labels if that is there."""
    return min(in_one_pass(groups), key=lambda one: (one.way == ONE_PASS, one.megabytes), default=None)


def training_targets(groups: Sequence[Group], times: Times) -> Iterator[str]:
    """Compare mean-field by draws with the plain network: likelihood, and time to train."""
    plain = most_trained(group for group in groups if group.label == "Deterministic")
    ours = most_trained(group for group in groups if group.name == "MeanField" and group.way.endswith("draws"))
    if plain is None or ours is None:
        return
    yield told(f"{ours.label}: NLL beside that of the plain network", ours.mean("nll"), plain.mean("nll"), "NLL")
    ratio = times.of_training(ours.method) * sum(ours.epochs) / sum(plain.epochs)
    if not math.isnan(ratio):
        yield told(f"{ours.label}: × the plain network's training time", ratio, TRAINING)


def most_trained(groups: Iterable[Group]) -> Group | None:
    """Take, of several recipes of one method, that with the most seeds, and then the most epochs."""
    return max(groups, key=lambda group: (len(group.rows), sum(group.epochs)), default=None)


def scores_of(group: Group) -> dict[str, float]:
    """Return the means that targets are about, by the names of their columns."""
    return {title: group.mean(key) for key, (title, _) in SCORES.items()}


def told(what: str, found: float, limit: float, score: str = "") -> str:
    """Write one target; accuracy is to be high, and all else low."""
    score = score or what.rpartition(": ")[2]
    high = score == "accuracy"
    form = {title: form for title, form in SCORES.values()}.get(score, "{:.2f}")
    met = found >= limit if high else found <= limit
    sign, result = "≥" if high else "≤", "met" if met else "**missed**"
    return f"- {what} {form.format(found)}, target {sign} {form.format(limit)}: {result}"
