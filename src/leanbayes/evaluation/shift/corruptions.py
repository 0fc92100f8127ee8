"""The 15 usual corruptions of images at five severities (Hendrycks & Dietterich 2019)."""

from collections.abc import Callable

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError, did_you_mean
from leanbayes.evaluation.shift.blur import defocus_blur, glass_blur, motion_blur, zoom_blur
from leanbayes.evaluation.shift.digital import brightness, contrast, pixelate
from leanbayes.evaluation.shift.geometry import elastic_transform
from leanbayes.evaluation.shift.jpeg import jpeg_compression
from leanbayes.evaluation.shift.noise import gaussian_noise, impulse_noise, shot_noise
from leanbayes.evaluation.shift.severity import SEVERITIES
from leanbayes.evaluation.shift.weather import fog, frost, snow

Corruption = Callable[[Tensor, int, torch.Generator], Tensor]
_ALL: tuple[Corruption, ...] = (
    gaussian_noise,
    shot_noise,
    impulse_noise,
    defocus_blur,
    glass_blur,
    motion_blur,
    zoom_blur,
    snow,
    frost,
    fog,
    brightness,
    contrast,
    elastic_transform,
    pixelate,
    jpeg_compression,
)
_AT_ONCE = 1 << 19  # values, so that they stay in the cache, and many images need little more memory than themselves

CORRUPTIONS: dict[str, Corruption] = {function.__name__: function for function in _ALL}

# These move what a pixel shows by more than their blur is wide, so a map of labels no longer fits: a zoom drives the
# picture outwards, on average by half of its furthest enlargement. The other blurs spread a pixel about its place.
GEOMETRIC = ("zoom_blur", "elastic_transform")


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, generator: torch.Generator) -> Tensor:
    """Corrupt images (n, 1 or 3, height, width), floats from 0 to 1 or uint8, by one of `CORRUPTIONS`.

    The result has the shape, the dtype and the device of the images. All that is random comes from `generator`, a CPU
    one, so the result does not depend on the device, save for rounding.
    """
    if name not in CORRUPTIONS:
        hint = did_you_mean(name, CORRUPTIONS, f"choose one of {', '.join(CORRUPTIONS)}.")
        raise LeanBayesError(f"There is no corruption {name!r}: {hint}")
    if severity not in SEVERITIES:
        raise LeanBayesError(f"There is no severity {severity!r}: choose 1 (mild) to 5 (strong).")
    if generator.device.type != "cpu":
        raise LeanBayesError(f"The generator is on {generator.device}: give one of the CPU, torch.Generator().")
    _check(images)
    severity = int(severity)
    if not len(images):
        return images.clone()
    scale = 255 if images.dtype == torch.uint8 else 1
    result = torch.empty(images.shape, dtype=images.dtype, device=images.device)
    size = max(_AT_ONCE // images[0].numel(), 1)
    for clean, dirty in zip(images.split(size), result.split(size), strict=True):
        values = CORRUPTIONS[name](clean.float().div(scale), severity, generator).clamp(0, 1).mul_(scale)
        dirty.copy_(values.round_() if scale == 255 else values)
    return result


def _check(images: Tensor) -> None:
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] not in (1, 3) or min(shape[2:]) < 8:
        raise LeanBayesError(
            f"Images of shape {shape} cannot be corrupted: give (n, 1 or 3, height, width) with sides of 8 or more."
        )
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise LeanBayesError(f"Images of {images.dtype} cannot be corrupted: give floats from 0 to 1, or uint8.")
    if len(images) and not (images.amin() >= 0 and images.amax() <= 1):  # nan is neither
        raise LeanBayesError(
            "Images to corrupt must lie in [0, 1] and have no nan: corrupt them before they are normalised."
        )
