"""From assessed runs to the document of a report."""

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
    "shift": ("Under shift", "What happens when inputs get worse than those of the training?"),
    "ood": ("Out of distribution", "Does the model know what it has never seen?"),
    "segmentation": ("Class by class", "Which things does it find?"),
    "weights": ("Inside the model", "What each method itself has to show, and size against likelihood."),
    "training": ("Training", "How the held-out likelihood fell."),
}
_DIRECTION = {"high": 1, "low": -1}


def document_of(runs: Sequence[AssessedRun], title: str = "", command: str = "") -> Document:
    """Bring the runs of several methods and seeds on one data set together."""
    _check_same_task(runs)
    groups = by_method(runs)
    config, assessment = runs[0].record["config"], runs[0].assessment
    shown = table(runs)
    seeds = sorted({run.seed for run in runs})
    return Document(
        title=title or f"{config['data']}, {config['model']['name']}",
        subtitle=f"{len(groups)} method{'s' * (len(groups) > 1)}, {len(seeds)} seed{'s' * (len(seeds) > 1)}, "
        f"{assessment['scores']['examples']:,} test examples",
        summary=tuple(_summary(shown, groups)),
        table=shown,
        sections=tuple(_sections(groups, config.get("classes") or ())),
        galleries=tuple(_galleries(groups)),
        facts=_facts(runs, seeds, command),
        glossary=GLOSSARY,
    )


def _check_same_task(runs: Sequence[AssessedRun]) -> None:
    if not runs:
        raise LeanBayesError("A report needs at least one run: give the folder of one.")
    for name in ("data", "examples"):
        found = {str(run.record["config"].get(name)) for run in runs}
        if len(found) > 1:
            what = " and ".join(sorted(found)) if name == "data" else "different training examples"
            raise LeanBayesError(f"The runs were trained on {what}, which cannot be compared: report them one by one.")
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
        for one in runs[0].assessment["galleries"]
    ]
    titles = list(dict.fromkeys(gallery.title for gallery in found))
    return sorted(found, key=lambda gallery: titles.index(gallery.title))


def _picture(values: Mapping[str, Any]) -> Picture:
    return Picture(tuple(Png(**one) for one in values["pngs"]), values["caption"], values["alt"])


def _summary(shown: Table, groups: Mapping[str, Sequence[AssessedRun]]) -> list[str]:
    """Say who wins what, as far as the intervals tell, and what the report cannot tell."""
    sentences = []
    for column in shown.columns:
        best = shown.winners.get(column.key, ())
        if column.group in ("quality", "shift", "out of distribution") and len(best) == 1:
            sentences.append(f"{best[0]} has the best {column.title} of all, by the interval over seeds.")
    if len(groups) > 1 and len(next(iter(groups.values()))) > 1 and not sentences:
        sentences.append("No method is shown to be better than all others in any figure of quality.")
    if "nll" in {column.key for column in shown.columns}:
        test = anova([row.cells["nll"].values for row in shown.rows]) if len(groups) > 1 else None
        if test is not None and test.p_value == test.p_value:  # not nan
            sentences.append(
                f"Analysis of variance of the NLL over methods: F = {test.statistic:.3g}, p = {test.p_value:.2g}."
            )
    return [*sentences, *([shown.note] if shown.note else [])]


def _facts(runs: Sequence[AssessedRun], seeds: Sequence[int], command: str) -> dict[str, str]:
    record, assessment = runs[0].record, runs[0].assessment
    recipe, machine, look = record["config"]["recipe"], record["machine"], assessment["look"]
    processor = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    facts = {
        "data": str(record["config"]["data"]),
        "network": str(record["config"]["model"]["name"]),
        "seeds": ", ".join(map(str, seeds)),
        "training": f"{recipe['epochs']} epochs, batch {recipe['batch_size']}, temperature {recipe['temperature']}",
        "test examples": f"{assessment['scores']['examples']:,}; under shift {assessment['shift_examples']:,}",
        "draws of a prediction": "as the method says" if look["samples"] is None else str(look["samples"]),
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "machine": f"{machine['system']}, {processor}",
        "command": command or record["command"],
    }
    notes = dict.fromkeys(note for run in runs for note in run.assessment["notes"])
    return {**facts, **({"left out": " ".join(notes)} if notes else {})}
