"""Weather: snow, frost and fog."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.evaluation.shift.blur import smear
from leanbayes.evaluation.shift.fields import fractal, smooth, streaks, uniform, white
from leanbayes.evaluation.shift.severity import Scale

# As published, except for the mean of severity 5 at 32 pixels: 0.3 gives no more snow than severity 4 on 8 × 8 digits.
_SNOW_MEAN = Scale((0.1, 0.1, 0.15, 0.25, 0.35), (0.1, 0.2, 0.55, 0.55, 0.55))
_SNOW_STD = Scale((0.2, 0.2, 0.3, 0.3, 0.3), (0.3, 0.3, 0.3, 0.3, 0.3))
_FLAKE = Scale((1, 1, 1.75, 2.25, 1.25), (3, 2, 4, 4.5, 2.5))
_SNOW_THRESHOLD = Scale((0.6, 0.5, 0.55, 0.6, 0.65), (0.5, 0.5, 0.9, 0.85, 0.85))
_FALL = Scale((3, 4, 4, 6, 12), (4, 4, 8, 8, 12))
_VISIBLE = Scale((0.95, 0.9, 0.9, 0.85, 0.8), (0.8, 0.7, 0.7, 0.65, 0.55))

# Published for photographs of ice. Severities 4 and 5 have more ice here, to make up for the darker scene.
_FROST_IMAGE = Scale((1, 1, 0.9, 0.85, 0.75), (1, 0.8, 0.7, 0.65, 0.6))
_FROST = Scale((0.2, 0.3, 0.4, 0.46, 0.54), (0.4, 0.6, 0.7, 0.75, 0.82))

# At 224 pixels the published values are 2.5 for severities 3 and 4, and 3 for severity 5.
_FOG = Scale((0.2, 0.5, 0.75, 1.0, 1.5), (1.5, 2, 2.4, 2.8, 3.2))
_FOG_DECAY = Scale((3, 3, 2.5, 2, 1.75), (2, 2, 1.7, 1.5, 1.4))


def snow(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Whiten the scene, and add falling flakes and their copy rotated by 180 degrees."""
    count, _, height, width = images.shape
    zoom = _FLAKE.pixels(severity, images, shrink=False)
    small = (count, 1, *(math.ceil(size / zoom) + 1 for size in (height, width)))
    noise = white(small, generator, images.device).mul_(_SNOW_STD.at(severity, images))
    flakes = F.interpolate(noise.add_(_SNOW_MEAN.at(severity, images)), scale_factor=zoom, mode="bilinear")
    flakes = flakes[..., :height, :width].clamp(0, 1)
    flakes = flakes * (flakes >= _SNOW_THRESHOLD.at(severity, images))
    angles = uniform((count,), math.pi / 4, 3 * math.pi / 4, generator, images.device)
    fallen = smear(flakes, angles, _FALL.pixels(severity, images))
    visible = _VISIBLE.at(severity, images)
    white_scene = torch.maximum(images, gray(images) * 1.5 + 0.5)
    return visible * images + (1 - visible) * white_scene + fallen + fallen.flip(-2, -1)


def gray(images: Tensor) -> Tensor:
    """Return the brightness (n, 1, H, W) of images, 0.299 R + 0.587 G + 0.114 B."""
    if images.shape[1] == 1:
        return images
    return (images * images.new_tensor([0.299, 0.587, 0.114]).view(-1, 1, 1)).sum(1, keepdim=True)


def frost(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Cover with ice crystals: a x + b ice. The published version uses photographs; here the ice is generated."""
    ice = crystals((len(images), *images.shape[-2:]), generator, images.device)[:, None]
    if images.shape[1] == 3:
        ice = ice * ice.new_tensor([0.86, 0.97, 1.06]).view(-1, 1, 1)
    return _FROST_IMAGE.at(severity, images) * images + _FROST.at(severity, images) * ice


def crystals(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Generate ice (n, height, width) from 0 to 1: patches of needles in three directions, 60 degrees apart."""
    size = min(shape[-2:])
    first = uniform((shape[0], 1, 1), 0, math.pi, generator, device)
    ice = torch.zeros(shape, device=device)
    for number in range(3):
        needles = streaks(first + number * math.pi / 3, shape, size / 14, size / 220 + 0.25, generator, device)
        ice = torch.maximum(ice, needles + 0.9 * smooth(shape, size / 14, generator, device))
    return (0.45 * ice * (0.35 + fractal(shape, 1.4, generator, device))).clamp(0, 1)


def fog(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Add a plasma cloud: (x + c cloud) m / (m + c), with the maximum m of the image."""
    clouds = fractal((len(images), *images.shape[-2:]), _FOG_DECAY.at(severity, images), generator, images.device)
    density = _FOG.at(severity, images)
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + density * clouds[:, None]) * (brightest / (brightest + density))
