"""Capital letters of 8 × 8 pixels, made as scikit-learn's digits were: other data for a model of the digits."""

from typing import Any

import numpy as np

from leanbayes.data.files import Array, Root, needed
from leanbayes.errors import LeanBayesError

LETTERS = tuple("AEFHKLMNRVWX")  # those that look like a digit, such as O, I, Z, S, B, G, P and T, are left out
_COUNTS = {"train": 1200, "test": 600}
_SIDE, _CANVAS = 32, 64  # pixels of a bitmap, and of the drawing before it is cropped
_INK, _INK_SPREAD = 0.305, 0.033  # share of ink in the digits: its mean, and its standard deviation over images


def read_letters(split: str, root: Root) -> tuple[Array, Array]:
    """Draw a split of the letters, with as many of each; the same in every run, and no draw is in both splits.

    As in the digits, the ink of 4 × 4 blocks of a bitmap of 32 × 32 pixels is counted: 0 to 16, stretched to 0 to 255.
    """
    font = _font()
    random = np.random.default_rng([0, list(_COUNTS).index(split)])
    labels = random.permutation(_COUNTS[split]) % len(LETTERS)
    bitmaps = np.stack([_bitmap(_drawing(LETTERS[label], font, random), random) for label in labels])
    blocks = bitmaps.reshape(-1, 1, _SIDE // 4, 4, _SIDE // 4, 4).sum((3, 5))
    return np.rint(blocks * (255 / 16)).astype(np.uint8), labels


def _font() -> Any:
    try:
        return needed("PIL.ImageFont", "pillow").load_default(size=_CANVAS // 2)
    except (ImportError, OSError, TypeError):
        raise LeanBayesError("The letters need Pillow 10.1 or newer with FreeType: pip install -U pillow.") from None


def _drawing(letter: str, font: Any, random: np.random.Generator) -> Any:
    """Draw a letter in white on black, turned and slanted at random, and cut it out."""
    image = needed("PIL.Image", "pillow")
    canvas = image.new("L", (_CANVAS, _CANVAS))
    centre = _CANVAS / 2
    pen = needed("PIL.ImageDraw", "pillow").Draw(canvas)
    pen.text((centre, centre), letter, fill=255, font=font, anchor="mm", stroke_width=int(random.integers(0, 2)))
    turn, slant = np.deg2rad(random.normal(0, 6)), random.normal(0.1, 0.12)
    matrix = np.array([[1, slant], [0, 1]]) @ [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    offset = centre - matrix @ (centre, centre)
    rows = np.column_stack([matrix, offset]).ravel().tolist()
    turned = canvas.transform(canvas.size, image.Transform.AFFINE, rows, image.Resampling.BILINEAR)
    return turned.crop(turned.getbbox())


def _bitmap(drawing: Any, random: np.random.Generator) -> Array:
    """Fit a drawing to the height of a bitmap, and let its strokes swell or shrink to the ink that a digit has."""
    image = needed("PIL.Image", "pillow")
    width = drawing.width / drawing.height * _SIDE * random.uniform(0.65, 0.85)
    width = round(min(max(width, 14), 26))
    fitted = image.new("L", (_SIDE, _SIDE))
    left = (_SIDE - width) // 2 + int(random.integers(-1, 2))
    fitted.paste(drawing.resize((width, _SIDE), image.Resampling.BILINEAR), (left, 0))
    blurred = fitted.filter(needed("PIL.ImageFilter", "pillow").GaussianBlur(1.5))
    values = np.asarray(blurred, np.int64)
    ink = round(_SIDE**2 * float(np.clip(random.normal(_INK, _INK_SPREAD), 0.2, 0.4)))
    return values >= max(int(np.partition(values.ravel(), -ink)[-ink]), 1)
