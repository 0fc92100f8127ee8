"""The summary of a comparison in sentences: what beats the plain network, with numbers."""

import math
from collections.abc import Iterable, Sequence

from leanbayes.report.document import Column, Table
from leanbayes.report.evaluated_run import ood_words

# What a user cares about, in this order; "ood:" stands for all OOD data. They are few, because each is tested.
_TESTED = (
    *("error_at_90", "ood:", "interval_error", "crps", "nll", "ece", "accuracy", "miou", "rmse"),
    *("corruptions:accuracy", "corruptions:nll", "noise:nll"),
)
_WORDS = {  # for columns whose titles are not words
    "error_at_90": ("errors among its 90 % most certain answers", ""),
    "ood:": ("noticing {}", "AUROC "),
    "interval_error": ("the coverage of its intervals", "error "),
    "ece": ("calibration", "ECE "),
}
_NAMED = 3  # columns per sentence; the rest are counted
_SENTENCES = 3  # about methods that beat the plain network; the rest are listed


def summary_sentences(shown: Table) -> list[str]:
    """Say what is significantly better than the plain network, and then what is better than all other methods.

    The first sentence is about the method that beats the plain network, with and without temperature, in most of what a
    user cares about.
    """
    tested, several = _tested(shown), len(shown.rows) > 1
    sentences = []
    if several and shown.plain:
        sentences += _better_than_plain(shown, tested) or [_nothing(shown, "the plain network")]
    if len(shown.rows) > 1 + bool(shown.plain) + bool(shown.scaled):
        best = _by_method((shown.better_than_all[one.key], one) for one in tested if one.key in shown.better_than_all)
        found = [
            f"{method} is significantly better than all other methods in {listed([one.title for one in columns])}."
            for method, columns in best.items()
        ]
        sentences += found or ([] if shown.plain else [_nothing(shown, "all others")])
    return sentences


def best_method(shown: Table) -> str:
    """Return the method that beats the plain network in most of what a user cares about.

    Of equal ones it is the one with the lowest NLL (or RMSE). The plain network itself, with or without temperature, is
    the best only if there is no other.
    """
    names = [row.name for row in shown.rows]
    others = [name for name in names if name not in (shown.plain, shown.scaled)]
    return _best_first(shown, others or names)[0]


def _best_first(shown: Table, names: Iterable[str]) -> list[str]:
    """Sort methods by the number of columns in which they beat the plain network, with temperature and without."""
    beaten = _beaten(shown, _tested(shown))
    cells = {row.name: row.cells for row in shown.rows}

    def order(name: str) -> tuple[int, int, float]:
        both = sum(_beats_scaled(shown, name, column) for column in beaten.get(name, ()))
        error = next((cells[name][key].mean for key in ("nll", "rmse") if key in cells[name]), math.nan)
        return -both, -len(beaten.get(name, ())), math.inf if math.isnan(error) else error

    return sorted(names, key=order)


def _tested(shown: Table) -> list[Column]:
    """Return the columns of the summary, the most important first."""
    keys = [column.key for column in shown.columns]
    ordered = [key for tested in _TESTED for key in keys if key == tested or (tested == "ood:" and key[:4] == tested)]
    return [next(column for column in shown.columns if column.key == key) for key in ordered]


def _beaten(shown: Table, tested: Sequence[Column]) -> dict[str, list[Column]]:
    """Return the columns in which each method is significantly better than the plain network."""
    return _by_method(
        (row.name, column)
        for row in shown.rows
        for column in tested
        if row.name in shown.better_than_plain.get(column.key, ()) and row.name != shown.scaled
    )


def _beats_scaled(shown: Table, method: str, column: Column) -> bool:
    return not shown.scaled or method in shown.better_than_scaled.get(column.key, ())


def _better_than_plain(shown: Table, tested: Sequence[Column]) -> list[str]:
    beaten = _beaten(shown, tested)
    methods = _best_first(shown, beaten)
    sentences = [_sentence(shown, method, beaten[method]) for method in methods[:_SENTENCES]]
    rest = methods[_SENTENCES:]
    if rest:
        sentences.append(f"Also significantly better than the plain network in some metrics: {listed(rest)}.")
    return sentences


def _sentence(shown: Table, method: str, columns: Sequence[Column]) -> str:
    both = [column for column in columns if _beats_scaled(shown, method, column)]
    only = [column for column in columns if column not in both]
    if not both:
        return (
            f"{method} is significantly better than the plain network in {_with_numbers(shown, method, only)}, but not "
            "than the plain network with temperature."
        )
    rivals = "the plain network, with and without temperature," if shown.scaled else "the plain network"
    text = f"{method} is significantly better than {rivals} in {_with_numbers(shown, method, both)}"
    if only:
        text += f"; than the plain network without temperature also in {listed([one.title for one in only])}"
    return f"{text}."


def _with_numbers(shown: Table, method: str, columns: Sequence[Column]) -> str:
    """List the first columns with the values of the method and of the plain network, and count the rest."""
    cells = {row.name: row.cells for row in shown.rows}
    parts = []
    for one in columns[:_NAMED]:
        words, unit = _WORDS.get("ood:" if one.key.startswith("ood:") else one.key, (one.title, ""))
        own, plain = (_written(one, cells[name][one.key].mean) for name in (method, shown.plain))
        parts.append(f"{words.format(ood_words(one.key.removeprefix('ood:')))} ({unit}{own} instead of {plain})")
    rest = len(columns) - _NAMED
    return listed([*parts, f"{rest} more metric{'s' * (rest > 1)}"] if rest > 0 else parts)


def _written(column: Column, value: float) -> str:
    return f"{100 * value:.1f} %" if column.form == "percent" else f"{value:.3g}"


def _nothing(shown: Table, rivals: str) -> str:
    if all(row.runs == 1 for row in shown.rows):
        return f"With one seed per method, nothing can be shown to be better than {rivals}: train more seeds."
    return f"No method is significantly better than {rivals} in any quality metric."


def _by_method(found: Iterable[tuple[str, Column]]) -> dict[str, list[Column]]:
    columns: dict[str, list[Column]] = {}
    for method, column in found:
        columns.setdefault(method, []).append(column)
    return columns


def listed(parts: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
