"""Noise per value: Gaussian, shot and impulse noise, and white noise at a given signal-to-noise ratio."""

import math

import torch
from torch import Tensor

from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.shift.fields import white
from leanbayes.evaluation.shift.severity import Scale

_STD = Scale((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38))
_PHOTONS = Scale((500, 250, 100, 75, 50), (60, 25, 12, 5, 3))
_SHARE = Scale((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27))


def gaussian_noise(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise: x + N(0, std²)."""
    return white(images.shape, generator, images.device).mul_(_STD.at(severity, images)).add_(images)


def shot_noise(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Add shot noise: Poisson(λ x) / λ, where λ photons give white."""
    photons = _PHOTONS.at(severity, images)
    counts = torch.poisson(images.cpu() * photons, generator=generator)  # on the CPU, so that all devices agree
    return counts.div_(photons).to(images.device)


def impulse_noise(images: Tensor, severity: int, generator: torch.Generator) -> Tensor:
    """Set a fraction of all values to 0 or 1 with equal probability."""
    share = _SHARE.at(severity, images)
    draw = torch.rand(images.shape, generator=generator, device="cpu").to(images.device)
    return torch.where(draw < share, (draw < share / 2).float(), images)


def add_noise(x: Tensor, snr_db: float, generator: torch.Generator) -> Tensor:
    """Add white Gaussian noise at a signal-to-noise ratio in decibels to each example of (n, ...), without clipping.

    The variance is mean(x²) / 10^(snr / 10), with the mean over each example; an example of zeros is not changed.
    """
    if not x.is_floating_point() or x.dim() < 1:
        raise LeanBayesError(
            f"Noise needs a float tensor (n, ...), not {x.dtype} of shape {tuple(x.shape)}: convert it."
        )
    if math.isnan(snr_db) or snr_db == -math.inf:
        raise LeanBayesError(f"snr_db={snr_db} must be a number of decibels, such as 10.")
    wide = torch.promote_types(x.dtype, torch.float32)
    power = x.to(wide).square().flatten(1).mean(1) if x.dim() > 1 else x.to(wide).square()
    std = (power * 10 ** (-snr_db / 10)).sqrt().view(-1, *[1] * (x.dim() - 1))
    noise = torch.randn(x.shape, generator=generator, dtype=wide, device="cpu").to(x.device)
    return (x + std * noise).to(x.dtype)
