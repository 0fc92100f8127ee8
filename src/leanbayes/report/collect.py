"""The document of a report, from evaluated runs."""

import math
from collections.abc import Callable, Mapping, Sequence

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.seeds import anova
from leanbayes.report import figures
from leanbayes.report.columns import table
from leanbayes.report.document import Document, Section, Table, merge
from leanbayes.report.evaluated_run import EvaluatedRun, by_method, with_temperature
from leanbayes.report.examples import galleries
from leanbayes.report.figure import Figure
from leanbayes.report.glossary import GLOSSARY
from leanbayes.report.summary import best_method, summary_sentences
from leanbayes.report.verdicts import verdicts_on

_SECTIONS: dict[str, tuple[str, str]] = {
    "confidence": ("Confidence", "Is it right as often as it claims, and does the error fall if it abstains?"),
    "shift": ("Distribution shift", "How does it respond to changed inputs or class proportions?"),
    "ood": ("Unknown inputs", "Is it uncertain about data unlike its training data?"),
    "segmentation": ("Classes", "How well is each class segmented?"),
    "model": ("Model", "Size, weights and training of each method."),
}
_FIRST = frozenset(  # figures that are shown at first; the others are shown on request
    "reliability intervals risk-coverage corruptions-accuracy corruptions-miou noise-entropy noise-rmse noise-std "
    "detection iou size-nll pruning".split()
)


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
    groups = by_method(with_temperature(runs))
    config, shown = runs[0].record["config"], table(runs)
    best = best_method(shown)
    seeds = sorted({run.seed for run in runs})
    return Document(
        title=title or f"{config['data']}, {_in_all(runs, _network)}",
        subtitle=f"{_count(len(by_method(runs)), 'method')}, {_count(len(seeds), 'seed')}, "
        f"{_count(int(runs[0].scores['examples']), 'test example')}",
        summary=tuple(summary_sentences(shown)),
        table=shown,
        sections=tuple(_sections(groups, config.get("classes") or ())),
        galleries=tuple(galleries(by_method(runs), shown.plain, best, config.get("classes") or ())),
        facts=_facts(runs, seeds, command, _variance_of_nll(shown)),
        glossary=GLOSSARY,
        verdicts={method: verdicts_on(of) for method, of in groups.items()},
        chosen=best,
        shown=tuple(method for method in groups if method in (shown.plain, best)),
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
        "confidence": lambda runs: [*figures.calibration(runs, classes), *figures.selective(runs)],
        "shift": figures.shifts,
        "ood": lambda runs: [*figures.ood_detection(runs), *figures.entropies(runs)],
        "segmentation": lambda runs: figures.segmentation(runs, classes),
        "model": lambda runs: [*_of_method(runs, len(groups) == 1), *figures.pruning(runs), *figures.training(runs)],
    }
    sections = []
    for name, (title, text) in _SECTIONS.items():
        merged = merge({method: drawn[name](runs) for method, runs in groups.items()})
        keys = {one.figure.key for one in merged}
        # The mIoU says more than the accuracy of pixels.
        wanted = _FIRST - {"corruptions-accuracy"} if "corruptions-miou" in keys else _FIRST
        first = tuple(one for one in merged if one.figure.key in wanted) or tuple(merged[:2])
        if merged:
            sections.append(Section(name, title, text, first, tuple(one for one in merged if one not in first)))
    return sections


def _of_method(runs: Sequence[EvaluatedRun], alone: bool) -> list[Figure]:
    """Return the method's own figures, of a single method without the point that has no other to compare with."""
    return [figure for figure in figures.of_method(runs) if not (alone and figure.key == "size-nll")]


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
    return str(run.evaluation["costs"]["ours"]["samples"])


def _machine(run: EvaluatedRun) -> str:
    machine = run.record["machine"]
    if not machine:
        return ""
    return f"{machine['system']}, {', '.join(machine['gpus']) or machine['processor']}, {machine['cores']} cores"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
