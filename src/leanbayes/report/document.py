"""A report as plain data, independent of its layout. All of it can be written as JSON."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from leanbayes.report.figure import Figure, Series
from leanbayes.report.gallery import Gallery

Status = Literal["pass", "warn", "fail"]
Form = Literal["percent", "decimal", "number", "count", "times"]


@dataclass(frozen=True)
class Column:
    """A column of the table: one metric of every method.

    Attributes:
        key: Identifier of the metric.
        title: Header of the column.
        group: Name of a group of adjacent columns, such as "quality" or "cost".
        best: Whether "high" or "low" values are better, or None if neither is.
        form: Number format: "percent" 93.12 %, "decimal" 0.1234, "number" 12.34, "count" 12,345, "times" 1.25×.
        help: Explanation in one sentence.
        main: Whether the page shows the column at first. If no column is marked, it shows all.

    Example:
        >>> Column("nll", "NLL", "quality", "low", "decimal", "Negative log-likelihood, in nats.")
    """

    key: str
    title: str
    group: str = ""
    best: Literal["high", "low"] | None = None
    form: Form = "number"
    help: str = ""
    main: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of the table: one metric of one method. nan is shown as –.

    Attributes:
        mean: Mean over the runs.
        low: Lower end of the interval, or nan.
        high: Upper end of the interval, or nan.
        values: Value of each run.

    Example:
        >>> Cell(0.2, low=0.1, high=0.3, values=(0.15, 0.25))
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """A row of the table: one method.

    Attributes:
        name: Name of the method.
        cells: Cells by the keys of their columns.
        runs: Number of runs.

    Example:
        >>> Row("mean-field", {"nll": Cell(0.2)}, runs=3)
    """

    name: str
    cells: Mapping[str, Cell]
    runs: int = 1


@dataclass(frozen=True)
class Table:
    """The comparison table: methods by metrics.

    Attributes:
        columns: The columns.
        rows: The rows, one per method.
        winners: The methods to mark in each column, by its key. The page does not determine them itself.
        interval: Name of the interval from low to high of the cells.
        note: How the winners were determined.
        plain: Name of the plain network among the methods, or "".
        scaled: Name of the plain network with temperature among the methods, or "".
        better_than_plain: The methods that are significantly better than the plain network, by the key of a column.
        better_than_scaled: The methods that are significantly better than the plain network with temperature.
        better_than_all: The method that is significantly better than every other, by the key of a column.

    Raises:
        ValueError: If two columns or rows have the same name, or winners name an unknown column or method.

    Example:
        >>> columns = (Column("nll", "NLL", best="low"),)
        >>> Table(columns, (Row("a", {"nll": Cell(0.2)}), Row("b", {"nll": Cell(0.3)})), winners={"nll": ("a",)})
        Table(2 methods × 1 column: a, b)
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    winners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interval: str = "interval"
    note: str = ""
    plain: str = ""
    scaled: str = ""
    better_than_plain: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    better_than_scaled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    better_than_all: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Table({_count(self.rows, 'method')} × {_count(self.columns, 'column')}{_listed(self.rows, 'name')})"

    def __post_init__(self) -> None:
        _distinct("column", (column.key for column in self.columns))
        _distinct("method", (row.name for row in self.rows))
        for key, names in self.winners.items():
            if isinstance(names, str):
                raise ValueError(f"The winners of {key} must be a tuple of names, not one string.")
            _known("The winners name", "column", [key], {column.key for column in self.columns})
            _known("The winners name", "method", names, {row.name for row in self.rows})


@dataclass(frozen=True)
class MethodFigure:
    """One figure of several methods. `merge` creates it.

    Attributes:
        figure: What the methods share; it has no series.
        by_method: The series of each method.
        warnings: What each method fails at in this figure, in one sentence each.

    Example:
        >>> merge({"a": figures_of_a, "b": figures_of_b})[0]
        MethodFigure('reliability', 'Reliability', lines: a, b)
    """

    figure: Figure
    by_method: Mapping[str, tuple[Series, ...]]
    warnings: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        shared = self.figure
        return f"MethodFigure({shared.key!r}, {shared.title!r}, {shared.kind}: {', '.join(self.by_method)})"


@dataclass(frozen=True)
class Section:
    """A section of the report: figures on one subject.

    Attributes:
        id: Anchor of the section in the page: lower-case letters, digits and hyphens.
        title: Heading.
        text: Paragraphs, separated by empty lines.
        figures: The figures.
        more: Figures that the page shows on request.

    Raises:
        ValueError: If the id has other characters.

    Example:
        >>> Section("calibration", "Calibration", "Is the model right as often as it claims?", tuple(merge(figures)))
    """

    id: str
    title: str
    text: str = ""
    figures: tuple[MethodFigure, ...] = ()
    more: tuple[MethodFigure, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.id):
            raise ValueError(f"The id of a section must be lower-case letters, digits and hyphens, not {self.id!r}.")

    def __repr__(self) -> str:
        return f"Section({self.id!r}, {self.title!r}, {_count([*self.figures, *self.more], 'figure')})"


@dataclass(frozen=True)
class Verdict:
    """An answer to one question about a method.

    Attributes:
        question: The question.
        answer: The answer, in one sentence with numbers.
        status: "pass", "warn" or "fail".

    Example:
        >>> Verdict("What does it cost?", "A prediction takes 1.1× the time of the plain network.", "pass")
    """

    question: str
    answer: str
    status: Status


@dataclass(frozen=True)
class Document:
    """A whole report. `document_of` creates it from evaluated runs; `write` and `render` turn it into HTML.

    Attributes:
        title: Title.
        subtitle: Line below the title.
        summary: The main results, one sentence each, the most important first.
        table: The comparison table.
        sections: The sections with figures.
        galleries: Images of examples.
        facts: Data, network, command, versions, machine and so on, by name.
        glossary: Explanations of terms.
        verdicts: The verdicts on each method.
        chosen: The method whose verdicts are shown at first.
        shown: The methods whose lines are drawn at first; () for all.

    Raises:
        ValueError: If two sections or figures have the same name.

    Example:
        >>> document = document_of(runs)
        >>> document
        Document('digits, small-cnn', 2 methods, 7 sections, 21 figures, 4 galleries)
        >>> write(document, "report.html")
    """

    title: str
    subtitle: str = ""
    summary: tuple[str, ...] = ()
    table: Table = field(default_factory=lambda: Table((), ()))
    sections: tuple[Section, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    glossary: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, tuple[Verdict, ...]] = field(default_factory=dict)
    chosen: str = ""
    shown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _distinct("section", (section.id for section in self.sections))
        _distinct("figure", (one.figure.key for one in self.figures))
        _known("The document names", "method", [self.chosen] if self.chosen else [], {*self.methods})
        _known("The document names", "method", self.shown, {*self.methods})

    def __repr__(self) -> str:
        parts = [(self.methods, "method"), (self.sections, "section"), (self.figures, "figure")]
        parts.append((self.galleries, "gallery"))
        return f"Document({self.title!r}, {', '.join(_count(of, what) for of, what in parts)})"

    @property
    def figures(self) -> tuple[MethodFigure, ...]:
        """All figures."""
        return tuple(one for section in self.sections for one in (*section.figures, *section.more))

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods: those of the table in its order, then any that occur only in figures or galleries."""
        names = [row.name for row in self.table.rows]
        names += [name for one in self.figures for name in one.by_method]
        names += [gallery.method for gallery in self.galleries if gallery.method]
        return tuple(dict.fromkeys(names))


def merge(figures: Mapping[str, Sequence[Figure]]) -> list[MethodFigure]:
    """Join the figures of several methods that have the same key.

    Args:
        figures: The figures of each method. Title, caption and axes are taken from the first method that has a figure.

    Returns:
        One figure per key, in the order in which they first occur.

    Raises:
        ValueError: If a method has two figures with the same key, or figures with the same key differ in kind.

    Example:
        >>> merge({"mean-field": [curve], "deterministic": [other_curve]})
    """
    first: dict[str, Figure] = {}
    joined: dict[str, dict[str, tuple[Series, ...]]] = {}
    warnings: dict[str, dict[str, str]] = {}
    for method, own in figures.items():
        _distinct("figure", (figure.key for figure in own))
        for figure in own:
            shared = first.setdefault(figure.key, dataclasses.replace(figure, series=(), warning=""))
            if figure.kind != shared.kind:
                raise ValueError(f"Figure {figure.key!r} is {shared.kind} elsewhere, but {figure.kind} for {method}.")
            joined.setdefault(figure.key, {})[method] = figure.series
            if figure.warning:
                warnings.setdefault(figure.key, {})[method] = figure.warning
    return [MethodFigure(first[key], by_method, warnings.get(key, {})) for key, by_method in joined.items()]


def _distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"There are two {what}s named {name!r}.")
        seen.add(name)


def _known(who: str, what: str, names: Iterable[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{who} the {what} {name!r}, which is not in the table.")


def _count(of: Sequence[object], what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{len(of)} {what if len(of) == 1 else plural}"


def _listed(of: Sequence[object], attribute: str) -> str:
    return f": {', '.join(getattr(one, attribute) for one in of)}" if of else ""
