"""Figures as plain data: what is to be seen, not how it is drawn. JSON carries them, and the report draws them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["lines", "points", "bars"]


@dataclass(frozen=True)
class Series:
    """One line, one cloud of points, or one row of bars.

    name: "" where the figure shows one thing of a method; else what this one is, such as "right" or "wrong".
    x: numbers, or names for bars. low and high: a band around y. labels: what is told of each point.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("x", "y", "low", "high", "labels"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != len(self.x) and (values or name == "y"):
                raise ValueError(f"{name} has {len(values)} entries, and x has {len(self.x)}")


@dataclass(frozen=True)
class Figure:
    """A figure of one method; those of several methods with the same `key` are drawn as one.

    caption: how to read it, in a sentence or two. x and y: the axes' names. apart: each method gets a panel of its own,
    because they would hide each other. diagonal: y = x is drawn for comparison. percent: which axes are shares of 1.
    """

    key: str
    title: str
    kind: Kind
    x: str
    y: str
    caption: str
    series: tuple[Series, ...]
    log: str = ""  # which axes are logarithmic: "", "x", "y" or "xy"
    percent: str = ""  # which axes are shown in percent
    apart: bool = False
    diagonal: bool = False

    def to_json(self) -> dict[str, Any]:
        """Describe the figure in plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Figure":
        """Rebuild what `to_json` described."""
        return cls(**{**values, "series": tuple(Series(**one) for one in values["series"])})
