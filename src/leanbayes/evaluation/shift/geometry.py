"""Geometric shifts: bilinear sampling, rotation, and elastic deformation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.shift.fields import smooth, uniform
from leanbayes.evaluation.shift.severity import Scale, side

# Fractions of the side. They differ from the published values, whose affine part, and thus the error, shrinks with the
# severity: here both parts grow, up to the published local displacement of severity 5.
_AFFINE = Scale((0.030, 0.040, 0.048, 0.055, 0.062), (0.010, 0.015, 0.020, 0.024, 0.028))
_LOCAL = Scale((0.004, 0.006, 0.009, 0.013, 0.017), (0.0020, 0.0030, 0.0045, 0.0060, 0.0087))
_SMOOTHNESS = Scale((0.06, 0.05, 0.04, 0.035, 0.03), (0.02, 0.016, 0.013, 0.011, 0.01))


def sample(images: Tensor, rows: Tensor, columns: Tensor, outside: str) -> Tensor:
    """Sample images (n, C, H, W) bilinearly at pixel coordinates (n, H', W'); outside: border, reflection or zeros."""
    height, width = images.shape[-2:]
    grid = torch.stack([columns * (2 / (width - 1)) - 1, rows * (2 / (height - 1)) - 1], -1)
    return F.grid_sample(images, grid.expand(len(images), -1, -1, -1), "bilinear", outside, align_corners=True)


def pixel_grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row (1, H, 1) and column (1, 1, W) coordinates of images."""
    height, width = images.shape[-2:]
    rows, columns = (torch.arange(count, dtype=images.dtype, device=images.device) for count in (height, width))
    return rows.view(1, -1, 1), columns.view(1, 1, -1)


def warp(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Sample each pixel at a displacement (n, H, W) in pixels; edges are mirrored."""
    rows, columns = pixel_grid(images)
    return sample(images, rows + down, columns + right, "reflection")


def elastic_transform(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Deform by a random affine map and by smooth local displacements.

    The affine map moves three corners, at ± a third of the side, by U(-a, a) in both directions; the local displacement
    is a Gaussian field of a given standard deviation and smoothness.
    """
    size, device = side(images), images.device
    reach, local = _AFFINE.at(severity, images) * size, _LOCAL.at(severity, images) * size
    moves = uniform((len(images), 2, 3), -reach, reach, generator, device)
    fields = smooth(
        (2 * len(images), *images.shape[-2:]), _SMOOTHNESS.at(severity, images) * size, generator, device
    ).unflatten(0, (-1, 2))
    y, x = ((axis - axis.mean()) / (size / 3) for axis in pixel_grid(images))
    points = torch.tensor([[1.0, 1, 1], [1, -1, 1], [-1, -1, 1]], device=device)  # each as (y, x, 1)
    slopes = torch.linalg.solve(points, moves.mT)  # (n, 3, 2), so that (y, x, 1) times it is the displacement
    places = torch.stack(torch.broadcast_tensors(y, x, torch.ones_like(y)), -1)
    down, right = (places.flatten(1, 2) @ slopes).unflatten(1, images.shape[-2:]).unbind(-1)
    return warp(images, down + local * fields[:, 0], right + local * fields[:, 1])


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Rotate images (n, C, H, W) counterclockwise about their center, by one angle or by one angle per image (n,).

    Values between pixels are interpolated bilinearly, and pixels from outside the image are black.
    """
    shape = tuple(images.shape)
    if len(shape) != 4 or min(shape[2:]) < 2 or not (images.is_floating_point() or images.dtype == torch.uint8):
        raise LeanBayesError(
            f"Images of {images.dtype} and shape {shape} cannot be rotated: pass floats or uint8 (n, C, H, W)."
        )
    angle = torch.as_tensor(degrees).cpu().double()
    if angle.shape not in ((), (len(images),)) or not angle.isfinite().all():
        raise LeanBayesError(f"degrees must be one finite number, or one for each of the {len(images)} images.")
    wide = images.to(torch.promote_types(images.dtype, torch.float32) if images.is_floating_point() else torch.float32)
    sine, cosine = (turn(angle * (math.pi / 180)).to(wide).view(-1, 1, 1) for turn in (torch.sin, torch.cos))
    rows, columns = pixel_grid(wide)
    y, x = rows - rows.mean(), columns - columns.mean()
    turned = sample(wide, rows.mean() + y * cosine + x * sine, columns.mean() + x * cosine - y * sine, "zeros")
    return turned.round().to(images.dtype) if images.dtype == torch.uint8 else turned.to(images.dtype)
