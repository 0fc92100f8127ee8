"""Pixels that move: sampling between pixels, rotation, and elastic deformation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.shift.fields import smooth, uniform
from leanbayes.evaluation.shift.severity import Scale, side

# Fractions of the side. The published ones are left, because their affine part shrinks with the severity and the
# error with it: here both parts grow, up to the published local displacement of severity 5.
_AFFINE = Scale((0.030, 0.040, 0.048, 0.055, 0.062), (0.010, 0.015, 0.020, 0.024, 0.028))
_LOCAL = Scale((0.004, 0.006, 0.009, 0.013, 0.017), (0.0020, 0.0030, 0.0045, 0.0060, 0.0087))
_SMOOTHNESS = Scale((0.06, 0.05, 0.04, 0.035, 0.03), (0.02, 0.016, 0.013, 0.011, 0.01))


def sample(images: Tensor, rows: Tensor, columns: Tensor, outside: str) -> Tensor:
    """Read images (n, C, H, W) bilinearly at pixel coordinates (n, H', W'); outside: border, reflection or zeros."""
    height, width = images.shape[-2:]
    grid = torch.stack([columns * (2 / (width - 1)) - 1, rows * (2 / (height - 1)) - 1], -1)
    return F.grid_sample(images, grid.expand(len(images), -1, -1, -1), "bilinear", outside, align_corners=True)


def pixel_grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows (1, H, 1) and the columns (1, 1, W) of images."""
    height, width = images.shape[-2:]
    rows, columns = (torch.arange(count, dtype=images.dtype, device=images.device) for count in (height, width))
    return rows.view(1, -1, 1), columns.view(1, 1, -1)


def warp(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Take each pixel from where a displacement (n, H, W) in pixels points; edges are mirrored."""
    rows, columns = pixel_grid(images)
    return sample(images, rows + down, columns + right, "reflection")


def elastic_transform(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Deform by an affine map that moves three points at random, and by smooth local displacements.

    The three points are the corners at ± a third of the side, each moved by U(-a, a) in both directions; the local
    displacement is a Gaussian field of a given standard deviation and smoothness.
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
    """Turn images (n, C, H, W) counter-clockwise about their centre, all alike or each by its own of (n,) angles.

    Values between pixels are bilinear, and black comes in from outside.
    """
    shape = tuple(images.shape)
    if len(shape) != 4 or min(shape[2:]) < 2 or not (images.is_floating_point() or images.dtype == torch.uint8):
        raise LeanBayesError(f"Give floats or uint8 (n, C, H, W) to rotate, not {images.dtype} of shape {shape}.")
    angle = torch.as_tensor(degrees).cpu().double()
    if angle.shape not in ((), (len(images),)) or not angle.isfinite().all():
        raise LeanBayesError(f"degrees must be one number, or one for each of {len(images)} images, all finite.")
    wide = images.to(torch.promote_types(images.dtype, torch.float32) if images.is_floating_point() else torch.float32)
    sine, cosine = (turn(angle * (math.pi / 180)).to(wide).view(-1, 1, 1) for turn in (torch.sin, torch.cos))
    rows, columns = pixel_grid(wide)
    y, x = rows - rows.mean(), columns - columns.mean()
    turned = sample(wide, rows.mean() + y * cosine + x * sine, columns.mean() + x * cosine - y * sine, "zeros")
    return turned.round().to(images.dtype) if images.dtype == torch.uint8 else turned.to(images.dtype)
