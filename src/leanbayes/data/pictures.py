"""Reading picture files one by one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanbayes.data.files import Array, damaged, needed
from leanbayes.data.transforms import Normalise
from leanbayes.errors import LeanBayesError

Size = tuple[int, int]  # height, width
PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".gif", ".tif", ".tiff")
IMAGENET_NORMALISE = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def list_pictures(folder: Path) -> list[str]:
    """List the picture files in a folder and its subfolders, in order, without hidden ones."""
    found = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = (name for name in sorted(files) if name.lower().endswith(PICTURE_ENDINGS))
        found += [os.path.join(place, name) for name in names if not name.startswith(".")]
    return found


def read_picture(path: str, change: Callable[[Any], Any]) -> Array:
    """Open a picture, change it, and take its values."""
    library = needed("PIL.Image", "pillow")
    try:
        with library.open(path) as picture:
            return np.array(change(picture))
    except FileNotFoundError:
        raise LeanBayesError(f"{path} is gone: put it back, or load the data again.") from None
    except (OSError, SyntaxError, ValueError, EOFError, library.DecompressionBombError) as error:
        raise damaged(Path(path), error) from None


def covering(path: str, size: Size, mode: str = "RGB") -> Array:
    """Read a picture the right way up, scaled to cover the size, and take its centre."""
    images, smooth = needed("PIL.ImageOps", "pillow"), needed("PIL.Image", "pillow").Resampling.BILINEAR

    def change(picture: Any) -> Any:
        picture.draft(mode, size[::-1])  # a JPEG is decoded at the next smaller scale
        return images.fit(_as_bytes(images.exif_transpose(picture)).convert(mode), size[::-1], smooth)

    return read_picture(path, change)


def stretched(path: str, size: Size | None, mode: str = "RGB") -> Array:
    """Read a picture as it is stored, as label maps are, stretched to the size."""
    smooth = needed("PIL.Image", "pillow").Resampling.BILINEAR

    def change(picture: Any) -> Any:
        return _as_bytes(picture).convert(mode).resize(size[::-1] if size else picture.size, smooth)

    return read_picture(path, change)


def _as_bytes(picture: Any) -> Any:
    """Bring 16 bits to 8, where pillow would cut off what is above 255, and a transparent palette to colours."""
    library = needed("PIL.Image", "pillow")
    if picture.mode.startswith("I"):
        values = np.asarray(picture)
        return library.fromarray((values >> 8).clip(0, 255).astype(np.uint8)) if values.max() > 255 else picture
    return picture.convert("RGBA") if "transparency" in picture.info else picture


def read_image(path: str | Path, shape: tuple[int, ...], stretch: bool = False) -> Tensor:
    """Read a picture as uint8 of the shape (channels, height, width) that a network wants; 1 channel is grey.

    The picture is scaled to cover the size, and its centre taken; with `stretch` it is stretched to the size.
    """
    channels, height, width = shape
    if channels not in (1, 3):
        raise LeanBayesError(f"A picture cannot be read with {channels} channels: give the network a tensor instead.")
    if not Path(path).is_file():
        raise LeanBayesError(f"There is no picture {path}: check the path.")
    read = stretched if stretch else covering
    values = read(str(path), (height, width), "L" if channels == 1 else "RGB")
    return as_image(values.reshape(height, width, channels))


def stretched_labels(path: str, size: Size | None) -> Array:
    """Read a picture whose values are labels, stretched to the size without mixing any."""
    nearest = needed("PIL.Image", "pillow").Resampling.NEAREST
    labels = read_picture(path, lambda picture: picture.resize(size[::-1] if size else picture.size, nearest))
    if labels.ndim != 2 or labels.dtype != np.uint8:
        raise damaged(Path(path), "labels should be a picture of one byte a pixel, grey or with a palette")
    return labels


def as_image(values: Array) -> Tensor:
    """Turn (height, width, channels) into a tensor (channels, height, width)."""
    return torch.from_numpy(values).permute(2, 0, 1).contiguous()
