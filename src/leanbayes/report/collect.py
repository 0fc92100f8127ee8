"""From assessed runs to the document of a report."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.seeds import anova
from leanbayes.figures import Figure
from leanbayes.report import figures
from leanbayes.report.columns import table
from leanbayes.report.document import Document, Gallery, Picture, Png, Section, Table, merge
from leanbayes.report.glossary import GLOSSARY
from leanbayes.report.runs import AssessedRun, by_method

_SECTIONS: dict[str, tuple[str, str]] = {
    "calibration": ("How calibrated", "Is the model right as often as it says?"),
    "selective": ("When to ask a person", "What is gained when the least sure answers are withheld?"),
    "shift": ("Under shift", "What happens when inputs, or the mix of classes, are other than in the training?"),
    "ood": ("Out of distribution", "Does the model know what it has never seen?"),
    "segmentation": ("Class by class", "Which things does it find?"),
    "weights": ("Inside the model", "What each method itself has to show, and size against likelihood."),
    "pruning": ("What can be left out", "How much of the network does the model need?"),
    "training": ("Training", "How the held-out likelihood fell."),
}
# What the summary speaks of: few, because each is tested by itself.
_TESTED = ("accuracy", "miou", "rmse", "nll", "ece", "crps", "corruptions:accuracy", "corruptions:nll", "noise:nll")


def document_of(runs: Sequence[AssessedRun], title: str = "", command: str = "") -> Document:
    """Bring the runs of several methods and seeds on one data set together."""
    check_same_task(runs)
    groups = by_method(runs)
    config, shown = runs[0].record["config"], table(runs)
    seeds = sorted({run.seed for run in runs})
    return Document(
        title=title or f"{config['data']}, {_in_all(runs, _network)}",
        subtitle=f"{_count(len(groups), 'method')}, {_count(len(seeds), 'seed')}, "
        f"{_count(int(runs[0].scores['examples']), 'test example')}",
        summary=tuple(_summary(shown)),
        table=shown,
        sections=tuple(_sections(groups, config.get("classes") or ())),
        galleries=tuple(_galleries(groups)),
        facts=_facts(runs, seeds, command, _variance_of_nll(shown)),
        glossary=GLOSSARY,
    )


def check_same_task(runs: Sequence[AssessedRun]) -> None:
    """Refuse runs that cannot stand in one table."""
    if not runs:
        raise LeanBayesError("A report needs at least one run: give the folder of one.")
    data = sorted({str(run.record["config"]["data"]) for run in runs})
    for what, found in (
        (f"trained on {' and '.join(data)}", set(data)),
        ("trained on different examples", {run.record["config"].get("examples") for run in runs}),
        ("scored on different examples", {run.scores["examples"] for run in runs}),
    ):
        if len(found) > 1:
            raise LeanBayesError(f"The runs were {what}, which cannot be compared: report them one by one.")
    if len({(run.method, run.seed) for run in runs}) < len(runs):
        raise LeanBayesError("Two runs have the same method and seed: give each once.")


def _sections(groups: Mapping[str, Sequence[AssessedRun]], classes: Sequence[str]) -> list[Section]:
    drawn: dict[str, Callable[[Sequence[AssessedRun]], list[Figure]]] = {
        "calibration": lambda runs: figures.calibration(runs, classes),
        "selective": figures.selective,
        "shift": figures.shifts,
        "ood": lambda runs: [*figures.entropies(runs), *figures.detection(runs)],
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


def _galleries(groups: Mapping[str, Sequence[AssessedRun]]) -> list[Gallery]:
    """Show the pictures of each method's first seed, those of one kind together."""
    found = [
        Gallery(one["title"], one["caption"], method, tuple(_picture(picture) for picture in one["pictures"]))
        for method, runs in groups.items()
        for one in runs[0].assessment.get("galleries", ())
    ]
    titles = list(dict.fromkeys(gallery.title for gallery in found))
    return sorted(found, key=lambda gallery: titles.index(gallery.title))


def _picture(values: Mapping[str, Any]) -> Picture:
    return Picture(tuple(Png(**one) for one in values["pngs"]), values["caption"], values["alt"])


def _summary(shown: Table) -> list[str]:
    """Say who wins what, as far as the intervals tell, and what the report cannot tell."""
    won: dict[str, list[str]] = {}
    for column in shown.columns:
        best = shown.winners.get(column.key, ())
        compared = all(math.isfinite(row.cells[column.key].mean) for row in shown.rows)
        if (column.key in _TESTED or column.key.startswith("ood:")) and len(best) == 1 and compared:
            won.setdefault(best[0], []).append(column.title)
    sentences = [
        f"{method} is shown to be better than all others in {', '.join(titles)}." for method, titles in won.items()
    ]
    if len(shown.rows) > 1:
        sentences = sentences or ["No method is shown to be better than all others in any figure of quality."]
    return sentences


def _variance_of_nll(shown: Table) -> str:
    values = [row.cells["nll"].values for row in shown.rows if "nll" in row.cells]
    test = anova(values) if len(values) > 1 else None
    if test is None or math.isnan(test.p_value):
        return ""
    return f"of the NLL over methods: F = {test.statistic:.3g}, p = {test.p_value:.2g}"


def _facts(runs: Sequence[AssessedRun], seeds: Sequence[int], command: str, variance: str) -> dict[str, str]:
    """Say how the runs came about; where they differ in something, all of it is told."""
    facts = {
        "data": str(runs[0].record["config"]["data"]),
        "network": _in_all(runs, _network),
        "seeds": ", ".join(map(str, seeds)),
        "training": _in_all(runs, _recipe),
        "test examples": f"{runs[0].scores['examples']:,}; under shift "
        + _in_all(runs, lambda run: f"{run.assessment['shift_examples']:,}"),
        "draws of a prediction": _in_all(runs, _draws),
        "analysis of variance": variance,
        "versions": _in_all(runs, lambda run: ", ".join(f"{name} {v}" for name, v in run.record["versions"].items())),
        "machine": _in_all(runs, _machine),
        "command": command or _in_all(runs, lambda run: run.record["command"]),
        "left out": " ".join(dict.fromkeys(note for run in runs for note in run.assessment.get("notes", ()))),
    }
    return {name: text for name, text in facts.items() if text}


def _in_all(runs: Sequence[AssessedRun], fact: Callable[[AssessedRun], str]) -> str:
    return "; ".join(dict.fromkeys(map(fact, runs)))


def _network(run: AssessedRun) -> str:
    return str((run.record["config"].get("model") or {}).get("name", "a network of one's own"))


def _recipe(run: AssessedRun) -> str:
    recipe = run.record["config"]["recipe"]
    if not recipe:
        return "in a loop of one's own"
    return f"{_count(recipe['epochs'], 'epoch')}, batch {recipe['batch_size']}, temperature {recipe['temperature']}"


def _draws(run: AssessedRun) -> str:
    samples = run.assessment["look"]["samples"]
    return "as the method says" if samples is None else str(samples)


def _machine(run: AssessedRun) -> str:
    machine = run.record["machine"]
    if not machine:
        return ""
    return f"{machine['system']}, {', '.join(machine['gpus']) or machine['processor']}, {machine['cores']} cores"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
