"""Draw the two headline figures: reliability, and size on disk against NLL.

python experiments/headline_figures.py experiments/results/headline

The figures use the data of the headline table and go to the same folder. The size figure shows the rows of the guide.
"""

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
from arguments import run_script
from headline_rows import TASK, Group, all_groups
from headline_tables import SHORT, composed, most_trained
from plotting import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw

from leanbayes.errors import LeanBayesError
from leanbayes.report.figure import Figure, Series

FEWEST = 5  # minimum number of examples in a bin
SIZE, LETTER = 10, 5.3  # of point labels: height, and maximum width of a letter
STEPS = 2 * (HEIGHT // SIZE)  # maximum distance of a label from its point, in half lines


def reliability(groups: Sequence[Group]) -> Figure | None:
    """Return the reliability diagram of the deterministic network and of the composition."""
    plain, after = most_trained(group for group in groups if group.label == "Deterministic"), composed(groups)
    sampled = [group for group in groups if after is not None and group.name == after.name and "samples" in group.way]
    shown = [group for group in (plain, after, *sampled[:1]) if group is not None]
    if not shown:
        return None
    lines = [Series("perfect calibration", (0.0, 1.0), (0.0, 1.0))]
    return Figure(
        key="reliability",
        title="Reliability",
        kind="lines",
        x="confidence",
        y="accuracy",
        caption="Accuracy of predictions by confidence; below the diagonal a model is overconfident.",
        series=(*map(bins_of, shown), *lines),
        percent="xy",
    )


def bins_of(group: Group) -> Series:
    """Sum the bins of all seeds that `headline.py` evaluated."""
    confidence, right, count = np.sum([row["reliability"] for row in group.rows if "reliability" in row], axis=0)
    filled = count >= FEWEST
    of_bins = (tuple((sums[filled] / count[filled]).tolist()) for sums in (confidence, right))
    return Series(f"{group.label}: ECE {group.mean('ece'):.4f}, {group.megabytes:.2f} MB", *of_bins)


def sizes(groups: Sequence[Group]) -> str:
    """Plot NLL over size for each method and prediction mode; a line connects the modes of one method."""
    by_name = [(name, list(of)) for name, of in itertools.groupby(groups, key=lambda group: group.title)]
    figure = Figure(
        key="size-nll",
        title="Size against NLL",
        kind="points",
        x="MB on disk",
        y="test NLL",
        caption="Lower left is better.",
        series=tuple(
            Series(name, tuple(group.megabytes for group in of), tuple(group.mean("nll") for group in of))
            for name, of in by_name
        ),
        log="x",
    )
    return with_names(draw(figure), [group.label for group in groups])


def with_names(svg: str, names: Sequence[str]) -> str:
    """Replace the legend by labels next to the points, in their order."""
    end = svg.index("/>", svg.rindex("<circle")) + 2
    body = re.sub(rf'(viewBox="0 0 {WIDTH} |width="{WIDTH}" height=")\d+', rf"\g<1>{HEIGHT}", svg[:end])
    points = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', body)]
    return "\n".join([body, *labels_at(points, names), "</svg>", ""])


def labels_at(points: Sequence[tuple[float, float]], names: Sequence[str]) -> Iterator[str]:
    """Place each label in a free spot near its point, with a thin line if it is not adjacent."""
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
    """Return whether a box lies inside the axes."""
    return box[0] > LEFT and box[2] < WIDTH - RIGHT and box[1] > TOP and box[3] < HEIGHT - BOTTOM


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Return whether two boxes intersect."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def main() -> None:
    """Write both figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="folder of the JSON files and the figures")
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
    run_script(main)
