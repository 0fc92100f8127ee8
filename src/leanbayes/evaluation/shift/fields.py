"""Random fields: smooth noise for clouds, crystals and displacements.

All noise is drawn on the CPU, so that it is the same on every device. Fields are generated in the Fourier domain and
are periodic.
"""

import math

import torch
from torch import Tensor

Shape = tuple[int, ...]


def white(shape: Shape, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw standard normal values."""
    return torch.randn(shape, generator=generator, device="cpu").to(device)


def uniform(shape: Shape, low: float, high: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw uniform values between two bounds."""
    return torch.rand(shape, generator=generator, device="cpu").mul_(high - low).add_(low).to(device)


def fractal(shape: Shape, decay: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw plasma clouds of shape (n, height, width), each from 0 to 1.

    The amplitude falls by decay² at half the distance, as in the midpoint displacement of Hendrycks & Dietterich:
    the spectrum is |f|^-(1 + H) with the Hurst exponent H = 2 log₂ decay.
    """
    rows, columns = _frequencies(shape, device)
    frequency = torch.hypot(rows, columns)
    frequency[0, 0] = torch.inf  # no mean
    return _unit_range(_filtered(white(shape, generator, device), frequency ** -(1 + 2 * math.log2(decay))))


def smooth(shape: Shape, sigma: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw fields with mean square 1: white noise, filtered by a Gaussian of sigma pixels."""
    along = torch.zeros((1, 1, 1), device=device)
    return streaks(along.expand(*shape[:-2], 1, 1), shape, sigma, sigma, generator, device)


def streaks(
    angle: Tensor, shape: Shape, length: float, thickness: float, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Draw fields with mean square 1: noise, filtered by a Gaussian elongated along angles (n, 1, 1)."""
    rows, columns = _frequencies(shape, device)
    along = columns * angle.cos() + rows * angle.sin()
    across = rows * angle.cos() - columns * angle.sin()
    amplitude = torch.exp(-2 * math.pi**2 * ((length * along) ** 2 + (thickness * across) ** 2))
    field = _filtered(white(shape, generator, device), amplitude)
    return field / field.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(1e-12)


def _frequencies(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the vertical and horizontal frequencies of a real Fourier transform, in cycles per pixel."""
    height, width = shape[-2:]
    return torch.fft.fftfreq(height, device=device)[:, None], torch.fft.rfftfreq(width, device=device)[None]


def _filtered(noise: Tensor, amplitude: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=noise.shape[-2:])


def _unit_range(field: Tensor) -> Tensor:
    low, high = field.amin((-2, -1), keepdim=True), field.amax((-2, -1), keepdim=True)
    return (field - low) / (high - low)
