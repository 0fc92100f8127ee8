"""A report as plain data: what is told of a comparison, not how it looks. All of it can be written as JSON."""

import base64
import binascii
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from leanbayes.figures import Figure, Series

Form = Literal["percent", "decimal", "number", "count", "times"]
_PNG_START = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Column:
    """One figure of every method, and how it is shown.

    group: columns that stand together, such as "quality" or "cost". best: which values are good, or None where none is.
    form: percent 93.12 %, decimal 0.1234, number 12.34, count 12,345, times 1.25×. help: what it is, in a sentence.
    """

    key: str
    title: str
    group: str = ""
    best: Literal["high", "low"] | None = None
    form: Form = "number"
    help: str = ""


@dataclass(frozen=True)
class Cell:
    """One method's figure: the mean over its runs, an interval around it, and each run's value; nan is shown as –."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """One method in the table: its cells by the key of their column, and how many runs they come from."""

    name: str
    cells: Mapping[str, Cell]
    runs: int = 1


@dataclass(frozen=True)
class Table:
    """Methods by figures. The page marks the winners of a column, and never looks for them itself.

    winners: by the key of a column, the methods that the statistics call best. interval: what a cell's low and high
    are. note: how the winners were found.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    winners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interval: str = "interval"
    note: str = ""

    def __post_init__(self) -> None:
        _distinct("column", (column.key for column in self.columns))
        _distinct("method", (row.name for row in self.rows))
        for key, names in self.winners.items():
            if isinstance(names, str):
                raise ValueError(f"the winners of {key} must be a tuple of names, not one string")
            _known("column", [key], {column.key for column in self.columns})
            _known("method", names, {row.name for row in self.rows})


@dataclass(frozen=True)
class MethodFigure:
    """One figure of several methods. `figure` has what they share, and no series; `by_method` has those of each."""

    figure: Figure
    by_method: Mapping[str, tuple[Series, ...]]


@dataclass(frozen=True)
class Section:
    """Figures on one subject. id: its name in the page's address. text: paragraphs with an empty line between them."""

    id: str
    title: str
    text: str = ""
    figures: tuple[MethodFigure, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", self.id):
            raise ValueError(f"a section's id is lower-case letters, digits and hyphens, not {self.id!r}")


@dataclass(frozen=True)
class Png:
    """One image: a PNG file in base64, and what it shows where a picture has several, such as "truth"."""

    data: str
    label: str = ""

    def __post_init__(self) -> None:
        try:
            start = base64.b64decode(self.data, validate=True)[:24]
        except (binascii.Error, ValueError):
            start = b""
        if len(start) < 24 or not start.startswith(_PNG_START):
            raise ValueError("a picture must be a PNG file in base64")

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        header = base64.b64decode(self.data[:32])
        return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


@dataclass(frozen=True)
class Picture:
    """One example: an image, or several side by side. caption: what is said under it. alt: what it shows, in words."""

    pngs: tuple[Png, ...]
    caption: str
    alt: str


@dataclass(frozen=True)
class Gallery:
    """Pictures of one method, such as its most confident mistakes; those with the same title stand together."""

    title: str
    caption: str
    method: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Document:
    """A whole report. summary: what was found, in sentences. facts: data, network, command, versions, machine, ..."""

    title: str
    subtitle: str = ""
    summary: tuple[str, ...] = ()
    table: Table = field(default_factory=lambda: Table((), ()))
    sections: tuple[Section, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    glossary: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _distinct("section", (section.id for section in self.sections))
        _distinct("figure", (one.figure.key for section in self.sections for one in section.figures))

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods: those of the table in its order, then any that only figures or galleries have."""
        names = [row.name for row in self.table.rows]
        names += [name for section in self.sections for one in section.figures for name in one.by_method]
        names += [gallery.method for gallery in self.galleries if gallery.method]
        return tuple(dict.fromkeys(names))


def merge(figures: Mapping[str, Sequence[Figure]]) -> list[MethodFigure]:
    """Join the figures of several methods that have the same key; what they share is taken from the first."""
    first: dict[str, Figure] = {}
    joined: dict[str, dict[str, tuple[Series, ...]]] = {}
    for method, own in figures.items():
        _distinct("figure", (figure.key for figure in own))
        for figure in own:
            shared = first.setdefault(figure.key, dataclasses.replace(figure, series=()))
            if figure.kind != shared.kind:
                raise ValueError(f"figure {figure.key!r} is {shared.kind} elsewhere, and {figure.kind} for {method}")
            joined.setdefault(figure.key, {})[method] = figure.series
    return [MethodFigure(first[key], by_method) for key, by_method in joined.items()]


def _distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"there are two {what}s named {name!r}")
        seen.add(name)


def _known(what: str, names: Iterable[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"winners name the {what} {name!r}, which the table does not have")
