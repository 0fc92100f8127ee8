"""Figures as plain data, which are stored as JSON and drawn by the report."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["lines", "points", "bars"]


@dataclass(frozen=True)
class Series:
    """One line, one set of points, or one row of bars.

    Attributes:
        name: Name of the series, such as "correct" or "wrong"; "" if the figure has one series per method.
        x: Numbers, or names for bars.
        y: Numbers, one per x.
        low: Lower end of a band around y, or ().
        high: Upper end of the band, or ().
        labels: Text about each point, or ().
        sizes: Share of the examples behind each point of a line, by which its marker is scaled; or ().

    Raises:
        ValueError: If the lengths differ.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("x", "y", "low", "high", "labels", "sizes"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != len(self.x) and (values or name == "y"):
                raise ValueError(f"{name} has {len(values)} entries, but x has {len(self.x)}.")


@dataclass(frozen=True)
class Figure:
    """A figure of one method. Figures of several methods with the same key are drawn as one.

    Attributes:
        key: Identifier of the figure.
        title: Title.
        kind: "lines", "points" or "bars".
        x: Name of the x axis.
        y: Name of the y axis.
        caption: How to read the figure, in a sentence or two.
        series: The data.
        log: Which axes are logarithmic: "", "x", "y" or "xy".
        percent: Which axes show fractions in percent.
        apart: Whether each method gets its own panel, because they would hide each other.
        diagonal: Whether to draw y = x for comparison.
        warning: What the method fails at in this figure, in one sentence, or "".
    """

    key: str
    title: str
    kind: Kind
    x: str
    y: str
    caption: str
    series: tuple[Series, ...]
    log: str = ""
    percent: str = ""
    apart: bool = False
    diagonal: bool = False
    warning: str = ""

    def __repr__(self) -> str:
        points = sum(len(series.x) for series in self.series)
        return f"Figure({self.key!r}, {self.title!r}, {self.kind}, {points:,} point{'s' * (points != 1)})"

    def to_json(self) -> dict[str, Any]:
        """Return the figure as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Figure":
        """Rebuild a figure from the result of `to_json`."""
        return cls(**{**values, "series": tuple(Series(**one) for one in values["series"])})
