"""The 15 standard corruptions of images at five severities (Hendrycks & Dietterich 2019)."""

from collections.abc import Callable

import torch
from torch import Tensor

from leanbayes.core.names import suggestion
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.shift.additive_noise import gaussian_noise, impulse_noise, shot_noise
from leanbayes.evaluation.shift.blur import defocus_blur, glass_blur, motion_blur, zoom_blur
from leanbayes.evaluation.shift.digital import brightness, contrast, pixelate
from leanbayes.evaluation.shift.geometry import elastic_transform
from leanbayes.evaluation.shift.jpeg import jpeg_compression
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
_AT_ONCE = 1 << 19  # values, so that they stay in the CPU cache and many images need little extra memory

CORRUPTIONS: dict[str, Corruption] = {function.__name__: function for function in _ALL}

# These move the content of a pixel further than they blur it, so that a map of labels no longer matches: a zoom blur
# moves content outwards, on average by half of its largest zoom. The other blurs are centered on each pixel.
GEOMETRIC = ("zoom_blur", "elastic_transform")


@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, generator: torch.Generator) -> Tensor:
    """Corrupt images (n, 1 or 3, height, width), floats from 0 to 1 or uint8, with one of `CORRUPTIONS`.

    The result has the shape, dtype and device of the images. All randomness comes from `generator`, which must be on
    the CPU, so the result does not depend on the device, except for rounding.
    """
    if name not in CORRUPTIONS:
        hint = suggestion(name, CORRUPTIONS, f"choose one of {', '.join(CORRUPTIONS)}.")
        raise LeanBayesError(f"There is no corruption {name!r}: {hint}")
    if severity not in SEVERITIES:
        raise LeanBayesError(f"There is no severity {severity!r}: choose 1 (mild) to 5 (strong).")
    if generator.device.type != "cpu":
        raise LeanBayesError(f"The generator is on {generator.device}: use a CPU generator, torch.Generator().")
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
            f"Images of shape {shape} cannot be corrupted: pass (n, 1 or 3, height, width) with sides of 8 or more."
        )
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise LeanBayesError(f"Images of {images.dtype} cannot be corrupted: pass floats from 0 to 1, or uint8.")
    if len(images) and not (images.amin() >= 0 and images.amax() <= 1):  # written so that nan is rejected too
        raise LeanBayesError("Images to corrupt must be in [0, 1] without nan: corrupt them before normalization.")
