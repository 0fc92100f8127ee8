"""TrivialAugment for whole batches of images: one random operation of random strength per image, on any device.

Müller and Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation", ICCV 2021, with its "wide"
space of 14 operations and 31 strengths. The results are those of Pillow on 8-bit images.

All operations are computed for the whole batch by three passes, each of which leaves the images of other operations
unchanged: a gather of moved pixels, a blend with another image, and a lookup table per channel. So shapes do not depend
on the random choices, and nothing waits for a GPU.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.errors import LeanBayesError

OPERATIONS = (
    "identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
STRONGEST = 30  # strengths are whole numbers from 0
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
_SHEAR, _PIXELS, _DEGREES, _BLEND, _BITS = 0.99, 32, 135.0, 0.99, 6  # at full strength
_FIXED_POINT = 16  # bits after the point in the positions of pixels, as in Pillow


class Operations(NamedTuple):
    """The operation of each image, with its strength in the terms of the three passes.

    Attributes:
        number: place in `OPERATIONS`.
        matrix: entries (a, b, d, e) that map a position of the result to one of the image: (ax + by, dx + ey).
        shift: signed strengths of the translations in x and y.
        pivot: 1 if the matrix acts around the center of the image, 0 for its corner.
        factor: weight of the image in the blend.
        mask: bits that posterize keeps.
        threshold: smallest value that solarize inverts.
    """

    number: Tensor
    matrix: Tensor
    shift: Tensor
    pivot: Tensor
    factor: Tensor
    mask: Tensor
    threshold: Tensor

    def to(self, device: torch.device) -> "Operations":
        """Move the tensors to a device."""
        return Operations(*(tensor.to(device) for tensor in self))

    def part(self, positions: slice) -> "Operations":
        """Return the operations of some positions of the epoch."""
        return Operations(*(tensor[positions] for tensor in self))


def draw_operations(examples: int, generator: torch.Generator) -> Operations:
    """Draw an operation, a strength and a sign for each example, uniformly and on the CPU."""

    def below(limit: int) -> Tensor:
        return torch.randint(limit, (examples,), device="cpu", generator=generator)

    return make_operations(below(len(OPERATIONS)), below(STRONGEST + 1), 2 * below(2) - 1)


def make_operations(number: Tensor, strength: Tensor, sign: Tensor) -> Operations:
    """Return the operations with given numbers, strengths from 0 to `STRONGEST`, and signs ±1 (one of each per image).

    Strengths do not matter to identity, autocontrast and equalize, and signs do not matter to posterize and solarize.
    """

    def chosen(name: str, value: Tensor, otherwise: float) -> Tensor:
        return torch.where(number == _NUMBER[name], value, torch.as_tensor(otherwise, dtype=value.dtype))

    part = strength.double() / STRONGEST
    signed, angle = sign * part, torch.deg2rad(_DEGREES * sign * part)
    cosine, sine = chosen("rotate", angle.cos(), 1.0), chosen("rotate", angle.sin(), 0.0)
    shear_x, shear_y = chosen("shear-x", _SHEAR * signed, 0.0), chosen("shear-y", _SHEAR * signed, 0.0)
    blended = (number >= _NUMBER["brightness"]) & (number <= _NUMBER["sharpness"])
    dropped = (_BITS * part).round().long()
    return Operations(
        number=number,
        matrix=torch.stack([cosine, shear_x - sine, shear_y + sine, cosine], dim=1),
        shift=torch.stack([chosen(f"translate-{axis}", sign * strength, 0) for axis in "xy"], dim=1),
        pivot=(number == _NUMBER["rotate"]).double(),
        factor=torch.where(blended, 1 + _BLEND * signed, 1.0).float(),
        mask=chosen("posterize", 256 - 2**dropped, 255),
        threshold=chosen("solarize", 255 - 255 * strength // STRONGEST, 256),
    )


def check_images(x: Any) -> None:
    """Raise an error for inputs that are not images of bytes or of floats from 0 to 1. This waits for a GPU."""
    shape = tuple(x.shape[1:]) if isinstance(x, Tensor) else None
    if shape is None or len(shape) != 3:
        what = f"inputs have the shape {shape}" if shape is not None else "inputs are not tensors"
        raise LeanBayesError(
            f"TrivialAugment is for images of shape (channels, height, width), but {what}: use the standard "
            "augmentation, or none."
        )
    if x.dtype == torch.uint8:
        return
    found = str(x.dtype).removeprefix("torch.")
    if x.is_floating_point():
        low, high = (float(value) for value in x.aminmax())
        if low >= 0 and high <= 1:
            return
        found = f"floats from {low:.3g} to {high:.3g}"
    raise LeanBayesError(
        f"TrivialAugment needs images of uint8, or of floats from 0 to 1, but these are {found}: pass images that are "
        "not normalized yet, and normalize=Normalize(mean, std)."
    )


def augmented(images: Tensor, operations: Operations) -> Tensor:
    """Apply to each image its operation.

    Args:
        images: uint8 images of shape (batch, channels, height, width), or floats from 0 to 1, which are rounded to
            8 bits.
        operations: one operation per image, on the same device.

    Returns:
        Images of the same shape, type and range of values.
    """
    if images.is_floating_point():
        levels = images.float().mul(255).round_().to(torch.uint8)
        return augmented(levels, operations).to(torch.float32).div_(255).to(images.dtype)
    return _looked_up(_blended(moved(images, operations, 0).float(), operations), operations)


def moved(images: Tensor, operations: Operations, fill: int) -> Tensor:
    """Shear, translate and rotate images or label maps; pixels from outside have the value `fill`.

    Each pixel has the value of the nearest one, by the arithmetic of Pillow's `Image.transform`. Images of fewer than
    32 pixels are moved by their side at most.
    """
    height, width = images.shape[-2:]
    a, b, d, e = operations.matrix.unbind(1)
    pixels = (operations.shift[:, number] * min(_PIXELS, side) for number, side in enumerate((width, height)))
    shift_x, shift_y = (torch.div(number, STRONGEST, rounding_mode="trunc") for number in pixels)
    center_x, center_y = operations.pivot * (width / 2), operations.pivot * (height / 2)
    right, down = 0.5 - center_x, 0.5 - center_y  # the first pixel, seen from the fixed point of the matrix
    start_x, start_y = a * right + b * down + center_x + shift_x, d * right + e * down + center_y + shift_y
    exact = torch.stack([start_x, a, b, start_y, d, e])[..., None, None]
    start_x, a, b, start_y, d, e = exact.mul(1 << _FIXED_POINT).add_(0.5).floor_().long().unbind()
    column, row = torch.arange(width, device=images.device), torch.arange(height, device=images.device)[:, None]
    x = (start_x + a * column + b * row) >> _FIXED_POINT
    y = (start_y + d * column + e * row) >> _FIXED_POINT
    outside = ((x < 0) | (x >= width) | (y < 0) | (y >= height)).flatten(1)[:, None]
    source = (y * width + x).flatten(1)[:, None].masked_fill(outside, 0)
    flat = images.reshape(len(images), -1, height * width)
    found = flat.gather(2, source.expand(-1, flat.shape[1], -1))
    return found.masked_fill_(outside, fill).view(images.shape)


def _blended(images: Tensor, operations: Operations) -> Tensor:
    """Change brightness, color, contrast and sharpness: blends with black, gray, the mean gray and a smooth image."""

    def chosen(name: str) -> Tensor:
        return (operations.number == _NUMBER[name])[:, None, None, None]

    gray = _gray(images)
    mean = gray.mean((2, 3), keepdim=True).add(0.5).floor()
    other = mean * chosen("contrast")
    other = torch.where(chosen("color"), gray, other)
    other = torch.where(chosen("sharpness"), _smoothed(images), other)
    return other.add(operations.factor[:, None, None, None] * (images - other)).clamp_(0, 255)


def _gray(images: Tensor) -> Tensor:
    """Return the luma of RGB images (ITU-R 601), and the mean channel of others."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True).round()
    red, green, blue = images.split(1, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()


def _smoothed(images: Tensor) -> Tensor:
    """Return images smoothed by a 3×3 filter, with weight 5 in its center and 1 around it; borders are unchanged."""
    smooth = images.clone()
    if min(images.shape[-2:]) > 2:
        inner = images[..., 1:-1, 1:-1]
        sums = F.avg_pool2d(images, 3, 1, divisor_override=1).add_(inner, alpha=4)
        smooth[..., 1:-1, 1:-1] = sums.div_(13).round_()
    return smooth


def _looked_up(images: Tensor, operations: Operations) -> Tensor:
    """Posterize, solarize, stretch (autocontrast) and equalize images by a table of 256 entries per channel."""

    def chosen(name: str) -> Tensor:
        return (operations.number == _NUMBER[name])[:, None, None]

    values = images.flatten(2).long()  # rounds down, as Pillow does after a blend
    old = torch.arange(256, device=images.device)
    table = old & operations.mask[:, None, None]
    table = torch.where(table < operations.threshold[:, None, None], table, 255 - table)

    low, high = values.aminmax(dim=2, keepdim=True)
    stretched = torch.where(high > low, (old - low) * 255 // (high - low).clamp_min(1), old)
    table = torch.where(chosen("autocontrast"), stretched, table)

    counts = values.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, values.new_ones(()).expand_as(values))
    step = (values.shape[2] - counts.gather(2, high)) // 255
    before = counts.cumsum(2) - counts
    equalized = torch.where(step > 0, (before + step // 2) // step.clamp_min(1), old)
    table = torch.where(chosen("equalize"), equalized, table).clamp_(0, 255).to(torch.uint8)
    return table.gather(2, values).view(images.shape)
