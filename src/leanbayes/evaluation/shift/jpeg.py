"""JPEG compression: the quantization of the standard (ITU T.81), without writing a file."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.evaluation.shift.severity import Scale

_QUALITY = Scale((80, 65, 58, 50, 40), (25, 18, 15, 10, 7))

# ITU T.81, tables K.1 and K.2.
_LUMA = """16 11 10 16 24 40 51 61  12 12 14 19 26 58 60 55  14 13 16 24 40 57 69 56  14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77  24 35 55 64 81 104 113 92  49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99"""
_CHROMA = """17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99  47 66 99 99 99 99 99 99
99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99"""

# From R, G and B to Y, Cb and Cr (JFIF).
_TO_YCBCR = (
    (0.299, 0.587, 0.114),
    (-0.168735892, -0.331264108, 0.5),
    (0.5, -0.418687589, -0.081312411),
)


def jpeg_compression(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Compress as JPEG and decompress."""
    return compress(images, round(_QUALITY.at(severity, images)))


def compress(images: Tensor, quality: int) -> Tensor:
    """Compress images (n, 1 or 3, H, W) at a JPEG quality from 1 to 100, with chroma at half the resolution."""
    levels = (images * 255).round()
    luma, chroma = (_table(numbers, quality).to(images) for numbers in (_LUMA, _CHROMA))
    if images.shape[1] == 1:
        return _quantized(levels, luma).round().clamp(0, 255) / 255
    matrix = torch.tensor(_TO_YCBCR, dtype=torch.float64)
    offset = images.new_tensor([0, 128, 128]).view(-1, 1, 1)
    parts = (torch.einsum("ij,njhw->nihw", matrix.to(images), levels) + offset).round()
    height, width = images.shape[-2:]
    y = _quantized(parts[:, :1], luma)
    even = F.pad(parts[:, 1:], (0, width % 2, 0, height % 2), mode="replicate")
    small = _quantized(F.avg_pool2d(even, 2).round(), chroma).round().clamp(0, 255)
    color = F.interpolate(small, scale_factor=2, mode="bilinear")[..., :height, :width]
    unpacked = torch.cat([y, color], 1).round().clamp(0, 255) - offset
    return torch.einsum("ij,njhw->nihw", matrix.inverse().to(images), unpacked).round().clamp(0, 255) / 255


def _quantized(plane: Tensor, table: Tensor) -> Tensor:
    """Round the cosine transform of each 8 × 8 block of (n, C, H, W) to multiples of the table."""
    count, channels, height, width = plane.shape
    padded = F.pad(plane - 128, (0, -width % 8, 0, -height % 8), mode="replicate")
    blocks = padded.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)  # (n, C, rows, columns, 8, 8)
    cosines = _cosines().to(plane)
    steps = (cosines @ blocks @ cosines.T).div_(table)
    kept = steps.abs().add_(0.5).floor_().mul_(table).copysign_(steps)  # halves are rounded away from 0
    whole = (cosines.T @ kept @ cosines).transpose(3, 4).reshape(count, channels, *padded.shape[-2:])
    return whole[..., :height, :width] + 128


@functools.cache
def _cosines() -> Tensor:
    """Return the orthonormal matrix of the cosine transform of 8 values."""
    k, x = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(8, dtype=torch.float64)
    matrix = torch.cos((2 * x + 1) * k * (math.pi / 16)) / 2
    matrix[0] /= math.sqrt(2)
    return matrix


def _table(numbers: str, quality: int) -> Tensor:
    """Scale a table of quantization steps as the Independent JPEG Group does, to integers from 1 to 255."""
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    steps = torch.tensor([int(number) for number in numbers.split()], dtype=torch.float64)
    return ((steps * math.floor(scale) + 50) / 100).floor().clamp(1, 255).view(8, 8)
