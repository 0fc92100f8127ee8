"""Photographs, digits and generators for tests of shifts."""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def photographs(height: int, width: int, count: int, channels: int = 3) -> Tensor:
    """Random parts of scikit-learn's two photographs, scaled to a size."""
    dice = np.random.default_rng(0)
    parts = []
    for number in range(count):
        photograph = torch.from_numpy(load_sample_images().images[number % 2].copy()).permute(2, 0, 1) / 255
        side = int(dice.integers(200, 420))
        top, left = dice.integers(0, 427 - side), dice.integers(0, 640 - side)
        part = photograph[None, :, top : top + side, left : left + side]
        parts.append(F.interpolate(part, (height, width), mode="bilinear", antialias=True))
    images = torch.cat(parts).clamp(0, 1)
    return images if channels == 3 else images.mean(1, keepdim=True)


@functools.cache
def digits(count: int) -> Tensor:
    return torch.from_numpy(load_digits().images[:count] / 16).float()[:, None]


def rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())
