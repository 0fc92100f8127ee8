"""What happens to a batch of images on the device: normalisation, random crops and mirror images."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError


@configurable
@dataclass(frozen=True)
class Normalise:
    """(x - mean) / std for each channel, where x of uint8 images is taken from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # a number or a list will do
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, (int, float)) else tuple(value))
        if len(self.mean) != len(self.std) or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise LeanBayesError(f"{self} needs a mean and a positive std for each channel.")

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise images of shape (..., channels, height, width) to floats."""
        if len(self.mean) not in (1, x.shape[-3]):
            raise LeanBayesError(
                f"{self} is for {len(self.mean)} channels, but images have {x.shape[-3]}: give one each."
            )
        scale = 255.0 if x.dtype == torch.uint8 else 1.0
        mean, std = _constants(self, scale, x.device)
        return (x - mean).div_(std)  # two kernels, the first of which also makes floats of bytes


@functools.cache
def _constants(normalise: Normalise, scale: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keep mean and std on the device, because a copy for each batch would wait for it."""
    with torch.inference_mode(False):
        mean, std = (torch.tensor(values).mul(scale) for values in (normalise.mean, normalise.std))
        return mean.view(-1, 1, 1).to(device), std.view(-1, 1, 1).to(device)


class Draws(NamedTuple):
    """How each example of an epoch is cropped and mirrored."""

    top: Tensor
    left: Tensor
    mirror: Tensor

    def to(self, device: torch.device) -> "Draws":
        """Move to a device."""
        return Draws(*(tensor.to(device) for tensor in self))

    def part(self, positions: slice) -> "Draws":
        """Take the draws of some positions of the epoch."""
        return Draws(*(tensor[positions] for tensor in self))


@configurable
@dataclass(frozen=True)
class Augment:
    """Random crops of the image padded by `crop` black (or ignored) pixels, and mirror images of one in two."""

    crop: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise LeanBayesError(f"crop={self.crop} must be 0 or more pixels.")

    def draw(self, examples: int, generator: torch.Generator) -> Draws:
        """Draw what is done to each of some examples, on the CPU."""
        top, left = torch.randint(2 * self.crop + 1, (2, examples), device="cpu", generator=generator)
        return Draws(top, left, torch.randint(2, (examples,), device="cpu", generator=generator, dtype=torch.bool))

    def pad(self, images: Tensor, value: int = 0) -> Tensor:
        """Pad images, or label maps, for `apply`."""
        return F.pad(images, (self.crop,) * 4, value=value) if self.crop else images

    def apply(self, padded: Tensor, rows: Tensor | None, draws: Draws) -> Tensor:
        """Take these rows (default: all) of padded images or label maps, cropped and mirrored."""
        if self.crop:
            rows = torch.arange(len(padded), device=padded.device) if rows is None else rows
            height, width = (side - 2 * self.crop for side in padded.shape[-2:])
            windows = padded.unfold(-2, height, 1).unfold(-2, width, 1)
            images = windows[rows, ..., draws.top, draws.left, :, :]
        else:
            images = padded if rows is None else padded[rows]
        if not self.flip:
            return images
        return torch.where(draws.mirror.view(-1, *[1] * (images.dim() - 1)), images.flip(-1), images)
