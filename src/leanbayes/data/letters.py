"""Capital letters of 8×8 pixels, made like scikit-learn's digits: out-of-distribution data for models of the digits."""

from typing import Any

import numpy as np

from leanbayes.data.reading import Array, Root, needed
from leanbayes.errors import LeanBayesError

LETTERS = tuple("AEFHKLMNRVWX")  # without those that look like a digit, such as O, I, Z, S, B, G, P and T
_COUNTS = {"train": 1200, "test": 600}
_SIDE, _CANVAS = 32, 64  # pixels of a bitmap, and of the drawing before it is cropped
_INK_MEAN, _INK_STD = 0.305, 0.033  # share of ink in an image of the digits, over all images


def read_letters(split: str, root: Root) -> tuple[Array, Array]:
    """Draw a split of the letters, with equally many of each class; every run draws the same images.

    As in the digits, a pixel counts the ink in a 4×4 block of a 32×32 bitmap: 0 to 16, scaled to 0 to 255.
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
    """Draw a letter in white on black with a random rotation and slant, and crop it."""
    image = needed("PIL.Image", "pillow")
    canvas = image.new("L", (_CANVAS, _CANVAS))
    center = _CANVAS / 2
    pen = needed("PIL.ImageDraw", "pillow").Draw(canvas)
    pen.text((center, center), letter, fill=255, font=font, anchor="mm", stroke_width=int(random.integers(0, 2)))
    turn, slant = np.deg2rad(random.normal(0, 6)), random.normal(0.1, 0.12)
    matrix = np.array([[1, slant], [0, 1]]) @ [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    offset = center - matrix @ (center, center)
    rows = np.column_stack([matrix, offset]).ravel().tolist()
    turned = canvas.transform(canvas.size, image.Transform.AFFINE, rows, image.Resampling.BILINEAR)
    return turned.crop(turned.getbbox())


def _bitmap(drawing: Any, random: np.random.Generator) -> Array:
    """Scale a drawing to the height of a bitmap, and threshold it such that it has as much ink as a digit."""
    image = needed("PIL.Image", "pillow")
    width = drawing.width / drawing.height * _SIDE * random.uniform(0.65, 0.85)
    width = round(min(max(width, 14), 26))
    fitted = image.new("L", (_SIDE, _SIDE))
    left = (_SIDE - width) // 2 + int(random.integers(-1, 2))
    fitted.paste(drawing.resize((width, _SIDE), image.Resampling.BILINEAR), (left, 0))
    blurred = fitted.filter(needed("PIL.ImageFilter", "pillow").GaussianBlur(1.5))
    values = np.asarray(blurred, np.int64)
    ink = round(_SIDE**2 * float(np.clip(random.normal(_INK_MEAN, _INK_STD), 0.2, 0.4)))
    return values >= max(int(np.partition(values.ravel(), -ink)[-ink]), 1)
