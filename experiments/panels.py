"""Several figures in one SVG file, and several images in one PNG file."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont
from plotting import draw
from torch import Tensor

from leanbayes.report.figure import Figure

WIDTH, TITLE = 480, 34  # width of a panel, and height of the common title
LABEL, GAP = 16, 4  # height of the label above an image, and gap between images, in pixels
COLORS = 128  # of a PNG file: more colors look the same and take twice the bytes


def side_by_side(title: str, figures: Sequence[Figure], columns: int, marks: bool = True) -> str:
    """Return one SVG with figures in rows; `marks=False` hides the points of lines."""
    parts = [draw(figure) for figure in figures]
    if not marks:
        parts = [re.sub(r"<circle[^>]*/>\n?", "", part) for part in parts]
    sizes = [tuple(map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', part)[0])) for part in parts]
    height = max(round(WIDTH * high / wide) for wide, high in sizes)
    across, down = min(columns, len(parts)), -(-len(parts) // columns)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * across} {TITLE + height * down}" '
        f'font-family="sans-serif"><title>{title}</title>',
        f'<rect width="100%" height="100%" fill="white"/><text x="16" y="24" font-size="18">{title}</text>',
    ]
    for number, (part, (wide, high)) in enumerate(zip(parts, sizes, strict=True)):
        x, y = WIDTH * (number % columns), TITLE + height * (number // columns)
        place = f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{round(WIDTH * high / wide)}"'
        lines.append(part.replace("<svg", place, 1))
    return "\n".join([*lines, "</svg>", ""])


class LabeledImage(NamedTuple):
    """An image and the label above it."""

    label: str
    image: Image.Image


def heat(label: str, values: Tensor, top: float, times: int = 1) -> LabeledImage:
    """Draw a map of values from 0 to `top` as a heat map, with `times` × `times` pixels per value."""
    colors = colormaps["inferno"]((values / top).clamp(0, 1).numpy(), bytes=True)[..., :3]
    image = Image.fromarray(colors)
    return LabeledImage(label, image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST))


def from_png(label: str, data: bytes, width: int, gray: bool = False) -> LabeledImage:
    """Read a PNG file and resize it to `width`; with `gray`, draw its gray values as a heat map."""
    image = Image.open(io.BytesIO(data))
    size = (width, round(image.height * width / image.width))
    if gray:
        values = torch.frombuffer(bytearray(image.convert("L").tobytes()), dtype=torch.uint8)
        return LabeledImage(label, heat(label, values.view(image.height, image.width) / 255, 1.0).image.resize(size))
    sharp = image.getcolors(32) is not None  # a class map: do not interpolate between classes
    return LabeledImage(label, image.convert("RGB").resize(size, Image.Resampling.NEAREST if sharp else None))


def sheet(rows: Sequence[Sequence[LabeledImage]], path: Path) -> None:
    """Write rows of images as one PNG file."""
    font = ImageFont.load_default(12)
    wide = max(labeled.image.width for row in rows for labeled in row) + GAP
    high = max(labeled.image.height for row in rows for labeled in row) + LABEL + GAP
    whole = Image.new("RGB", (wide * max(map(len, rows)), high * len(rows)), "white")
    pen = ImageDraw.Draw(whole)
    for number, row in enumerate(rows):
        for column, (label, image) in enumerate(row):
            pen.text((wide * column, high * number), label, "black", font)
            whole.paste(image, (wide * column, high * number + LABEL))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
