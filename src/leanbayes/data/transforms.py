"""Preprocessing of image batches on the device: normalization, random crops, horizontal flips and TrivialAugment."""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core.config import configurable
from leanbayes.data.trivial import Operations, draw_operations
from leanbayes.errors import LeanBayesError


@configurable
@dataclass(frozen=True)
class Normalize:
    """Normalization of images: (x - mean) / std per channel, with uint8 values scaled to [0, 1] first.

    Attributes:
        mean: mean of each channel, or one number for all of them.
        std: std of each channel, or one number for all of them.

    Raises:
        LeanBayesError: `mean` and `std` have different lengths, or a std is not positive.

    Example:
        >>> import torch
        >>> from leanbayes.data import Normalize
        >>> Normalize(0.5, 0.25)(torch.full((1, 1, 1), 255, dtype=torch.uint8))
        tensor([[[2.]]])
    """

    mean: tuple[float, ...] | float
    std: tuple[float, ...] | float

    def __post_init__(self) -> None:
        for name, values in zip(("mean", "std"), self.channels(), strict=True):
            object.__setattr__(self, name, values)
        means, stds = self.channels()
        if len(means) != len(stds) or not all(math.isfinite(std) and std > 0 for std in stds):
            raise LeanBayesError(f"{self} needs one mean and one positive std for each channel.")

    def channels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the means and the stds of the channels. One number is for all channels."""
        means, stds = ((one,) if isinstance(one, (int, float)) else one for one in (self.mean, self.std))
        return means, stds

    def __call__(self, x: Tensor) -> Tensor:
        """Return normalized float images.

        Args:
            x: uint8 or float images of shape (..., channels, height, width).

        Raises:
            LeanBayesError: The images have another number of channels.
        """
        channels = len(self.channels()[0])
        if channels not in (1, x.shape[-3]):
            raise LeanBayesError(
                f"{self} is for {channels} channels, but images have {x.shape[-3]}: pass one value per channel."
            )
        scale = 255.0 if x.dtype == torch.uint8 else 1.0
        mean, std = _constants(self, scale, x.device)
        return (x - mean).div_(std)  # two kernels; the first also converts bytes to floats


@functools.cache
def _constants(normalize: Normalize, scale: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and std as tensors on the device, cached because a copy per batch would synchronize with it."""
    with torch.inference_mode(False):
        mean, std = (torch.tensor(values).mul(scale) for values in normalize.channels())
        return mean.view(-1, 1, 1).to(device), std.view(-1, 1, 1).to(device)


class Crops(NamedTuple):
    """The random crop and flip of each example of an epoch, and its operation of TrivialAugment."""

    top: Tensor
    left: Tensor
    flip: Tensor
    operations: Operations | None = None

    def to(self, device: torch.device) -> "Crops":
        """Move the tensors to a device."""
        operations = None if self.operations is None else self.operations.to(device)
        return Crops(self.top.to(device), self.left.to(device), self.flip.to(device), operations)

    def part(self, positions: slice) -> "Crops":
        """Return the crops of some positions of the epoch."""
        operations = None if self.operations is None else self.operations.part(positions)
        return Crops(self.top[positions], self.left[positions], self.flip[positions], operations)


@configurable
@dataclass(frozen=True)
class Augment:
    """Augmentation of images: random crops of the zero-padded image, random horizontal flips, and TrivialAugment.

    TrivialAugment (Müller and Hutter, ICCV 2021, the "wide" space) then applies to each image one random operation of
    random strength: identity, shear, translation, rotation, brightness, color, contrast, sharpness, posterize,
    solarize, autocontrast or equalize. Images must be uint8, or floats from 0 to 1, which it rounds to 8 bits.

    Label maps are cropped, flipped, sheared, translated and rotated with their images; their padding has the label
    `ignore_index`.

    Attributes:
        crop: pixels of padding on each side. 0 means no crops.
        flip: flip each image with probability 1/2.
        trivial: apply TrivialAugment after the crop and the flip.

    Raises:
        LeanBayesError: `crop` is negative.

    Example:
        >>> from leanbayes.data import Augment
        >>> Augment(crop=4, flip=False)
        Augment(crop=4, flip=False, trivial=False)
    """

    crop: int = 4
    flip: bool = True
    trivial: bool = False

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise LeanBayesError(f"crop={self.crop} must be 0 or more pixels.")

    def draw(self, examples: int, generator: torch.Generator) -> Crops:
        """Draw the crops, flips and operations of some examples, on the CPU."""
        top, left = torch.randint(2 * self.crop + 1, (2, examples), device="cpu", generator=generator)
        flip = torch.randint(2, (examples,), device="cpu", generator=generator, dtype=torch.bool)
        return Crops(top, left, flip, draw_operations(examples, generator) if self.trivial else None)

    def pad(self, images: Tensor, value: int = 0) -> Tensor:
        """Pad images or label maps for `apply`."""
        return F.pad(images, (self.crop,) * 4, value=value) if self.crop else images

    def apply(self, padded: Tensor, rows: Tensor | None, crops: Crops) -> Tensor:
        """Return some rows (default: all) of padded images or label maps, cropped and flipped."""
        if self.crop:
            rows = torch.arange(len(padded), device=padded.device) if rows is None else rows
            height, width = (side - 2 * self.crop for side in padded.shape[-2:])
            windows = padded.unfold(-2, height, 1).unfold(-2, width, 1)
            images = windows[rows, ..., crops.top, crops.left, :, :]
        else:
            images = padded if rows is None else padded[rows]
        if not self.flip:
            return images
        return torch.where(crops.flip.view(-1, *[1] * (images.dim() - 1)), images.flip(-1), images)
