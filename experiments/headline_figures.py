"""Draws the two pictures of the headline: reliability before and after, and size on disk against likelihood.

python experiments/headline_figures.py experiments/results/headline

They are drawn from what the headline table is made of, into the folder; of sizes those that the README shows, if any.
"""

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
from asking import as_script
from drawing import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw
from headline_rows import TASK, Group, all_groups
from headline_tables import SHORT, composed, most_trained

from leanbayes.errors import LeanBayesError
from leanbayes.figures import Figure, Series

FEWEST = 5  # examples of a bin to be drawn
SIZE, LETTER = 10, 5.3  # of names beside points: their height, and the width of a letter, at most
STEPS = 2 * (HEIGHT // SIZE)  # half lines that a name may be away from its point


def reliability(groups: Sequence[Group]) -> Figure | None:
    """Draw how often answers of a given confidence are right: the plain network, and the composition."""
    plain, after = most_trained(group for group in groups if group.label == "Deterministic"), composed(groups)
    draws = [group for group in groups if after is not None and group.name == after.name and "draws" in group.way]
    shown = [group for group in (plain, after, *draws[:1]) if group is not None]
    if not shown:
        return None
    lines = [Series("as sure as it should be", (0.0, 1.0), (0.0, 1.0))]
    return Figure(
        key="reliability",
        title="Reliability",
        kind="lines",
        x="confidence",
        y="accuracy",
        caption="How often answers of a given confidence are right; below the diagonal a model is too sure.",
        series=(*map(bins_of, shown), *lines),
        percent="xy",
    )


def bins_of(group: Group) -> Series:
    """Add up the bins of all seeds that `headline.py` has looked at."""
    confidence, right, count = np.sum([row["reliability"] for row in group.rows if "reliability" in row], axis=0)
    there = count >= FEWEST
    of_bins = (tuple((sums[there] / count[there]).tolist()) for sums in (confidence, right))
    return Series(f"{group.label}: ECE {group.mean('ece'):.4f}, {group.megabytes:.2f} MB", *of_bins)


def sizes(groups: Sequence[Group]) -> str:
    """Place every method and way by its bytes and its likelihood, the ways of one method on one line."""
    by_name = [(name, list(of)) for name, of in itertools.groupby(groups, key=lambda group: group.title)]
    figure = Figure(
        key="size-nll",
        title="Size against likelihood",
        kind="points",
        x="MB on disk",
        y="test NLL",
        caption="Left and low is good.",
        series=tuple(
            Series(name, tuple(group.megabytes for group in of), tuple(group.mean("nll") for group in of))
            for name, of in by_name
        ),
        log="x",
    )
    return with_names(draw(figure), [group.label for group in groups])


def with_names(svg: str, names: Sequence[str]) -> str:
    """Write names beside the points of a drawing, in their order, in place of its legend."""
    end = svg.index("/>", svg.rindex("<circle")) + 2
    body = re.sub(rf'(viewBox="0 0 {WIDTH} |width="{WIDTH}" height=")\d+', rf"\g<1>{HEIGHT}", svg[:end])
    points = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', body)]
    return "\n".join([body, *labels_at(points, names), "</svg>", ""])


def labels_at(points: Sequence[tuple[float, float]], names: Sequence[str]) -> Iterator[str]:
    """Find every name a free place near its point, with a thin line to it where it is not next to it."""
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    for (x, y), name in zip(points, names, strict=True):
        width = LETTER * len(name)
        near = [(side, step * sign) for step in range(STEPS) for sign in (1, -1) for side in (1, -1)]
        places = ((x + 7 if side > 0 else x - 7 - width, y + SIZE * step / 2) for side, step in near)
        boxes = ((left, middle - SIZE / 2, left + width, middle + SIZE / 2) for left, middle in places)
        box = next(box for box in boxes if in_frame(box) and not any(overlap(box, other) for other in taken))
        taken.append(box)
        left, top, right, bottom = (round(value, 1) for value in box)
        if abs((top + bottom) / 2 - y) > SIZE / 2:
            yield f'<path d="M{x} {y}L{left if left > x else right} {(top + bottom) / 2:.1f}" stroke="#aaa"/>'
        yield f'<text x="{left}" y="{bottom - 2:.1f}" font-size="{SIZE}">{escape(name)}</text>'


def in_frame(box: tuple[float, ...]) -> bool:
    """Whether a box lies between the axes."""
    return box[0] > LEFT and box[2] < WIDTH - RIGHT and box[1] > TOP and box[3] < HEIGHT - BOTTOM


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether two boxes have a point in common."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of the JSON files, and of the pictures")
    folder = parser.parse_args().folder
    groups = all_groups(folder)
    if not groups:
        raise LeanBayesError(f"{folder} has no results of {' on '.join(TASK)}: run experiments/headline.py first.")
    figure = reliability(groups)
    drawings = {} if figure is None else {"reliability": draw(figure)}
    shown = [group for group in groups if group.label in SHORT]
    for name, text in {**drawings, "size-nll": sizes(shown or groups)}.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    as_script(main)
