"""Read image files one by one."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.data.reading import Array, damaged, needed
from leanbayes.data.transforms import Normalize
from leanbayes.errors import FileFormatError, LeanBayesError

Size = tuple[int, int]  # height, width
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".gif", ".tif", ".tiff")
IMAGENET_NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# The formats of these endings. Pillow would read others too, some of them with external programs such as Ghostscript.
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "PPM", "GIF", "TIFF")
WORKERS = min(8, os.cpu_count() or 1)  # processes that decode files while a network trains


def list_image_files(folder: Path) -> list[str]:
    """List the image files in a folder and its subfolders, sorted, without hidden ones."""
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = (name for name in sorted(files) if name.lower().endswith(IMAGE_ENDINGS))
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return found


def read_pixels(path: str, transform: Callable[[Any], Any]) -> Array:
    """Open an image, transform it and return its pixels."""
    library = needed("PIL.Image", "pillow")
    library.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", library.DecompressionBombWarning)
            with library.open(path, formats=[name for name in _FORMATS if name in library.OPEN]) as image:
                return np.array(transform(image))
    except FileNotFoundError:
        raise LeanBayesError(f"{path} is missing: put it back, or load the data again.") from None
    except (library.DecompressionBombError, library.DecompressionBombWarning):
        raise FileFormatError(
            f"{path} has more than the {library.MAX_IMAGE_PIXELS} pixels that an image may have: make it smaller."
        ) from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise damaged(Path(path), error) from None


def covering(path: str, size: Size, mode: str = "RGB") -> Array:
    """Read an image upright, scaled to cover the size, and return its center."""
    ops, bilinear = needed("PIL.ImageOps", "pillow"), needed("PIL.Image", "pillow").Resampling.BILINEAR

    def transform(image: Any) -> Any:
        image.draft(mode, size[::-1])  # decodes a JPEG at a reduced scale, which is faster
        return ops.fit(_as_bytes(ops.exif_transpose(image)).convert(mode), size[::-1], bilinear)

    return read_pixels(path, transform)


def stretched(path: str, size: Size | None, mode: str = "RGB") -> Array:
    """Read an image as stored, like its label map (without the EXIF orientation), stretched to the size."""
    bilinear = needed("PIL.Image", "pillow").Resampling.BILINEAR

    def transform(image: Any) -> Any:
        return _as_bytes(image).convert(mode).resize(size[::-1] if size else image.size, bilinear)

    return read_pixels(path, transform)


def _as_bytes(image: Any) -> Any:
    """Convert 16 bits to 8 by scaling, because Pillow would clip at 255, and a transparent palette to colors."""
    library = needed("PIL.Image", "pillow")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        return library.fromarray((values >> 8).clip(0, 255).astype(np.uint8)) if values.max() > 255 else image
    return image.convert("RGBA") if "transparency" in image.info else image


@checked()
def read_image(path: str | Path, shape: tuple[int, ...], stretch: bool = False) -> Tensor:
    """Read an image file as a tensor of the shape that a network expects.

    Args:
        path: image file.
        shape: (channels, height, width), with 1 channel for gray and 3 for RGB.
        stretch: stretch the image to the size. Otherwise it is scaled to cover the size and cropped to its center.

    Returns:
        Tensor of uint8 of the given shape.

    Raises:
        LeanBayesError: The file is missing, or the number of channels is not 1 or 3.
        FileFormatError: The file is damaged or not an image.

    Example:
        >>> from leanbayes.data import read_image
        >>> read_image("cat.jpg", (3, 224, 224)).shape  # doctest: +SKIP
        torch.Size([3, 224, 224])
    """
    if len(shape) != 3 or min(shape) < 1:
        raise LeanBayesError(f"shape={shape} must be that of an image, (channels, height, width).")
    channels, height, width = shape
    if channels not in (1, 3):
        raise LeanBayesError(f"An image cannot be read with {channels} channels: pass a tensor to the network instead.")
    if not os.path.isfile(path):
        raise LeanBayesError(f"There is no image {path}: check the path.")
    read = stretched if stretch else covering
    values = read(str(path), (height, width), "L" if channels == 1 else "RGB")
    return as_image(values.reshape(height, width, channels))


@checked()
def detail_lost(path: str | Path, shape: tuple[int, ...], stretch: bool = False) -> float:
    """Return the share of an image's variance that is gone when `read_image` shrinks it to the size of a network.

    Shrinking is averaging, so fine detail disappears: white noise becomes gray, while a photo or an enlarged drawing
    keeps its shapes. The image is shrunk, enlarged again and compared with the original.

    Args:
        path: image file.
        shape: (channels, height, width) as for `read_image`.
        stretch: as for `read_image`.

    Returns:
        A number from 0 to about 1; 0 if the image is not larger than the size, or constant.

    Raises:
        LeanBayesError: The file is missing.
        FileFormatError: The file is damaged or not an image.

    Example:
        >>> from leanbayes.data import detail_lost
        >>> detail_lost("cat.jpg", (3, 224, 224)) < 0.2  # doctest: +SKIP
        True
    """
    ops, bilinear = needed("PIL.ImageOps", "pillow"), needed("PIL.Image", "pillow").Resampling.BILINEAR
    channels, height, width = shape

    def transform(image: Any) -> Any:
        upright = _as_bytes(image if stretch else ops.exif_transpose(image)).convert("L" if channels == 1 else "RGB")
        wide, high = upright.size
        factors = (width / wide, height / high) if stretch else (max(width / wide, height / high),) * 2
        if min(factors) >= 1:
            return np.zeros((2, 1))
        small = upright.resize((max(1, round(wide * factors[0])), max(1, round(high * factors[1]))), bilinear)
        return np.stack([np.asarray(each) for each in (upright, small.resize(upright.size, bilinear))])

    before, after = read_pixels(str(path), transform).astype(np.float32)
    variance = float(before.var())
    return float(np.square(before - after).mean()) / variance if variance else 0.0


def stretched_labels(path: str, size: Size | None) -> Array:
    """Read an image whose values are labels, resized by nearest neighbor."""
    nearest = needed("PIL.Image", "pillow").Resampling.NEAREST
    labels = read_pixels(path, lambda image: image.resize(size[::-1] if size else image.size, nearest))
    if labels.ndim != 2 or labels.dtype != np.uint8:
        raise damaged(Path(path), "labels should be an image of one byte per pixel, gray or with a palette")
    return labels


def as_image(values: Array) -> Tensor:
    """Turn (height, width, channels) into a tensor (channels, height, width)."""
    return torch.from_numpy(values).permute(2, 0, 1).contiguous()
