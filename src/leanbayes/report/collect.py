"""The document of a report, from evaluated runs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.seeds import anova
from leanbayes.report import figures
from leanbayes.report.columns import table
from leanbayes.report.document import Column, Document, Gallery, GalleryImage, Png, Section, Table, merge
from leanbayes.report.evaluated_run import EvaluatedRun, by_method
from leanbayes.report.figure import Figure
from leanbayes.report.glossary import GLOSSARY

_SECTIONS: dict[str, tuple[str, str]] = {
    "calibration": ("Calibration", "Is the model right as often as its confidence claims?"),
    "selective": ("Selective prediction", "How much does the error fall if the model abstains when it is uncertain?"),
    "shift": ("Distribution shift", "How does the model respond to changed inputs or class proportions?"),
    "ood": ("Out-of-distribution data", "Is the model uncertain about data unlike its training data?"),
    "segmentation": ("Classes", "How well is each class segmented?"),
    "weights": ("Model", "Weights of each method, and size against NLL."),
    "pruning": ("Pruning", "How many of its weights does the model need?"),
    "training": ("Training", "NLL on the held-out part of the training data."),
}
# Metrics of the summary. They are few, because each is tested separately.
_TESTED = ("accuracy", "miou", "rmse", "nll", "ece", "crps", "corruptions:accuracy", "corruptions:nll", "noise:nll")


@checked()
def document_of(runs: Sequence[EvaluatedRun], title: str = "", command: str = "") -> Document:
    """Create a report from the runs of several methods and seeds on one data set.

    Args:
        runs: The evaluated runs, from `evaluate_for_report`. Runs of one method with different seeds become one row.
        title: Title of the report. By default the names of the data and of the network.
        command: Command that produced the report. By default the commands that trained the runs.

    Returns:
        The document, for `write` or `render`.

    Raises:
        LeanBayesError: If there are no runs, two runs have the same method and seed, or the runs were trained or
            evaluated on different data.

    Example:
        >>> runs = [evaluate_for_report("mean-field", bnn, data), evaluate_for_report("plain", plain, data)]
        >>> write(document_of(runs), "report.html")
    """
    check_same_task(runs)
    groups = by_method(runs)
    config, shown = runs[0].record["config"], table(runs)
    seeds = sorted({run.seed for run in runs})
    return Document(
        title=title or f"{config['data']}, {_in_all(runs, _network)}",
        subtitle=f"{_count(len(groups), 'method')}, {_count(len(seeds), 'seed')}, "
        f"{_count(int(runs[0].scores['examples']), 'test example')}",
        summary=tuple(summary_sentences(shown)),
        table=shown,
        sections=tuple(_sections(groups, config.get("classes") or ())),
        galleries=tuple(_galleries(groups)),
        facts=_facts(runs, seeds, command, _variance_of_nll(shown)),
        glossary=GLOSSARY,
    )


def check_same_task(runs: Sequence[EvaluatedRun]) -> None:
    """Raise an error if the runs cannot be compared in one table."""
    if not runs:
        raise LeanBayesError("A report needs at least one run: pass the folder of one.")
    data = sorted({str(run.record["config"]["data"]) for run in runs})
    for what, found in (
        (f"trained on {' and '.join(data)}", set(data)),
        ("trained on different examples", {run.record["config"].get("examples") for run in runs}),
        ("evaluated on different examples", {run.scores["examples"] for run in runs}),
    ):
        if len(found) > 1:
            raise LeanBayesError(f"The runs were {what}, which cannot be compared: report them separately.")
    if len({(run.method, run.seed) for run in runs}) < len(runs):
        raise LeanBayesError("Two runs have the same method and seed: pass each run once.")


def _sections(groups: Mapping[str, Sequence[EvaluatedRun]], classes: Sequence[str]) -> list[Section]:
    drawn: dict[str, Callable[[Sequence[EvaluatedRun]], list[Figure]]] = {
        "calibration": lambda runs: figures.calibration(runs, classes),
        "selective": figures.selective,
        "shift": figures.shifts,
        "ood": lambda runs: [*figures.entropies(runs), *figures.ood_detection(runs)],
        "segmentation": lambda runs: figures.segmentation(runs, classes),
        "weights": figures.of_method,
        "pruning": figures.pruning,
        "training": figures.training,
    }
    sections = []
    for name, (title, text) in _SECTIONS.items():
        merged = merge({method: drawn[name](runs) for method, runs in groups.items()})
        if merged:
            sections.append(Section(name, title, text, tuple(merged)))
    return sections


def _galleries(groups: Mapping[str, Sequence[EvaluatedRun]]) -> list[Gallery]:
    """Return the galleries of the first seed of each method, grouped by title."""
    found = [
        Gallery(one["title"], one["caption"], method, tuple(_image(image) for image in one["pictures"]))
        for method, runs in groups.items()
        for one in runs[0].evaluation.get("galleries", ())
    ]
    titles = list(dict.fromkeys(gallery.title for gallery in found))
    return sorted(found, key=lambda gallery: titles.index(gallery.title))


def _image(values: Mapping[str, Any]) -> GalleryImage:
    return GalleryImage(tuple(Png(**one) for one in values["pngs"]), values["caption"], values["alt"])


def summary_sentences(shown: Table) -> list[str]:
    """Say what is significantly better than the plain network, and then what is better than all other methods."""
    tested = [column for column in shown.columns if column.key in _TESTED or column.key.startswith("ood:")]
    sentences = []
    if len(shown.rows) > 1 and shown.plain:
        better = _titles(
            (row.name, column)
            for row in shown.rows
            for column in tested
            if row.name in shown.better_than_plain.get(column.key, ())
        )
        sentences += [
            f"{method} is significantly better than the plain network in {_listed(titles)}."
            for method, titles in sorted(better.items(), key=lambda item: -len(item[1]))
        ]
        sentences = sentences or ["No method is significantly better than the plain network in any quality metric."]
    if len(shown.rows) > 1 + bool(shown.plain):
        best = _titles(
            (shown.better_than_all[column.key], column) for column in tested if column.key in shown.better_than_all
        )
        found = [
            f"{method} is significantly better than all other methods in {_listed(titles)}."
            for method, titles in best.items()
        ]
        sentences += found or ["No method is significantly better than all others in any quality metric."]
    return sentences


def _titles(found: Iterable[tuple[str, Column]]) -> dict[str, list[str]]:
    """Group the titles of columns by method."""
    titles: dict[str, list[str]] = {}
    for method, column in found:
        titles.setdefault(method, []).append(column.title)
    return titles


def _listed(titles: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(titles[:-1]), titles[-1])))


def _variance_of_nll(shown: Table) -> str:
    values = [row.cells["nll"].values for row in shown.rows if "nll" in row.cells]
    test = anova(values) if len(values) > 1 else None
    if test is None or math.isnan(test.p_value):
        return ""
    return f"of the NLL between methods: F = {test.statistic:.3g}, p = {test.p_value:.2g}"


def _facts(runs: Sequence[EvaluatedRun], seeds: Sequence[int], command: str, variance: str) -> dict[str, str]:
    """Describe how the runs were made; if they differ in a fact, all its values are listed."""
    facts = {
        "data": str(runs[0].record["config"]["data"]),
        "network": _in_all(runs, _network),
        "seeds": ", ".join(map(str, seeds)),
        "training": _in_all(runs, _recipe),
        "test examples": f"{runs[0].scores['examples']:,}; under shift "
        + _in_all(runs, lambda run: f"{run.evaluation['shift_examples']:,}"),
        "samples per prediction": _in_all(runs, _samples),
        "analysis of variance": variance,
        "versions": _in_all(runs, lambda run: ", ".join(f"{name} {v}" for name, v in run.record["versions"].items())),
        "machine": _in_all(runs, _machine),
        "command": command or _in_all(runs, lambda run: run.record["command"]),
        "left out": " ".join(dict.fromkeys(note for run in runs for note in run.evaluation.get("notes", ()))),
    }
    return {name: text for name, text in facts.items() if text}


def _in_all(runs: Sequence[EvaluatedRun], fact: Callable[[EvaluatedRun], str]) -> str:
    return "; ".join(dict.fromkeys(map(fact, runs)))


def _network(run: EvaluatedRun) -> str:
    return str((run.record["config"].get("model") or {}).get("name", "custom network"))


def _recipe(run: EvaluatedRun) -> str:
    recipe = run.record["config"]["recipe"]
    if not recipe:
        return "custom training loop"
    return f"{_count(recipe['epochs'], 'epoch')}, batch {recipe['batch_size']}, temperature {recipe['temperature']}"


def _samples(run: EvaluatedRun) -> str:
    samples = run.evaluation["settings"]["samples"]
    return "default of the method" if samples is None else str(samples)


def _machine(run: EvaluatedRun) -> str:
    machine = run.record["machine"]
    if not machine:
        return ""
    return f"{machine['system']}, {', '.join(machine['gpus']) or machine['processor']}, {machine['cores']} cores"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
