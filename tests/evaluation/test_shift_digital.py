"""Brightness, contrast and pixelation agree with closed forms, and JPEG with Pillow."""

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image
from shift_cases import digits, photographs, rms, seeded
from torch import Tensor

from leanbayes.evaluation.shift import CORRUPTIONS, corrupt
from leanbayes.evaluation.shift.jpeg import compress


@pytest.mark.parametrize(("side", "added"), [(32, (0.05, 0.1, 0.15, 0.2, 0.3)), (224, (0.1, 0.2, 0.3, 0.4, 0.5))])
def test_brightness_adds_to_the_value_of_hsv(side: int, added: tuple[float, ...]) -> None:
    colors = torch.rand(300, 3, generator=seeded(1))
    colors[:4] = torch.tensor([[0.0, 0, 0], [1, 1, 1], [0, 0, 0.3], [0.9, 0.9, 0.2]])
    images = torch.zeros(1, 3, side, side)
    images.view(3, -1)[:, :300] = colors.T
    for severity, amount in enumerate(added, 1):
        found = corrupt(images, "brightness", severity, seeded()).view(3, -1)[:, :300].T
        hsv = [colorsys.rgb_to_hsv(*color) for color in colors.tolist()]
        expected = [colorsys.hsv_to_rgb(h, s, min(v + amount, 1)) for h, s, v in hsv]
        assert np.allclose(found, expected, atol=1e-5)


def test_brightness_of_gray_images_is_a_sum() -> None:
    images = digits(10)
    assert torch.allclose(corrupt(images, "brightness", 4, seeded()), (images + 0.2).clamp(max=1), atol=1e-6)


@pytest.mark.parametrize(("side", "kept"), [(32, (0.75, 0.5, 0.4, 0.3, 0.15)), (224, (0.4, 0.3, 0.2, 0.1, 0.05))])
def test_contrast_shrinks_to_the_mean_of_each_channel(side: int, kept: tuple[float, ...]) -> None:
    images = photographs(side, side, 2)
    means = images.double().numpy().mean((2, 3), keepdims=True)
    for severity, share in enumerate(kept, 1):
        expected = means + share * (images.double().numpy() - means)
        assert np.allclose(corrupt(images, "contrast", severity, seeded()), expected, atol=1e-5)


@pytest.mark.parametrize(("severity", "cell"), [(2, 2), (5, 4)])
def test_pixelate_is_the_mean_of_boxes(severity: int, cell: int) -> None:
    images = photographs(224, 224, 2)
    means = images.double().numpy().reshape(2, 3, 224 // cell, cell, 224 // cell, cell).mean((3, 5))
    expected = means.repeat(cell, 2).repeat(cell, 3)
    assert np.allclose(corrupt(images, "pixelate", severity, seeded()), expected, atol=1e-5)
    twice = photographs(448, 448, 1)  # cells grow with the image
    means = twice.double().numpy().reshape(1, 3, 224 // cell, 2 * cell, 224 // cell, 2 * cell).mean((3, 5))
    expected = means.repeat(2 * cell, 2).repeat(2 * cell, 3)
    assert np.allclose(corrupt(twice, "pixelate", severity, seeded()), expected, atol=1e-5)


@pytest.mark.parametrize(("severity", "count"), [(1, 30), (2, 28), (3, 27), (4, 24), (5, 20)])
def test_cells_of_fractional_size_are_weighted_means_of_pixels(severity: int, count: int) -> None:
    images = photographs(32, 32, 3).double().numpy()
    fine = images.repeat(count, 2).repeat(count, 3)  # a cell has 32 × 32 of these parts
    means = fine.reshape(3, 3, count, 32, count, 32).mean((3, 5))
    nearest = ((np.arange(32) + 0.5) * count / 32).astype(int)
    expected = means[:, :, nearest][..., nearest]
    assert np.allclose(corrupt(torch.from_numpy(images), "pixelate", severity, seeded()), expected, atol=1e-5)


def test_digits_are_mixed_with_their_coarse_version() -> None:
    images = digits(20)
    coarse = (
        images.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5)).repeat_interleave(2, 2).repeat_interleave(2, 3)
    )
    for severity, share in enumerate((0.1, 0.2, 0.3, 0.5, 0.7), 1):
        expected = images + share * (coarse - images)
        assert torch.allclose(corrupt(images, "pixelate", severity, seeded()), expected, atol=1e-5)


def pillow(images: Tensor, quality: int) -> Tensor:
    results = []
    for image in (images * 255).round().byte():
        file = io.BytesIO()
        pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(file, "JPEG", quality=quality)
        results.append(torch.from_numpy(np.array(Image.open(file))).view(*image.shape[1:], -1).permute(2, 0, 1))
    return torch.stack(results) / 255


def decibels(one: Tensor, other: Tensor) -> float:
    """Peak signal-to-noise ratio."""
    return -20 * float(np.log10(rms(one - other)))


IMAGES = {
    "color": lambda: photographs(32, 32, 24),
    "gray": lambda: photographs(28, 28, 24, 1),
    "odd": lambda: photographs(101, 77, 4),
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("quality", [7, 15, 25, 40, 50, 65, 80, 95])
def test_jpeg_is_that_of_pillow(kind: str, quality: int) -> None:
    """The two differ only by rounding: 40 dB or more, while the loss itself is at most 37 (at quality 95: 44)."""
    images = (IMAGES[kind]() * 255).round() / 255
    theirs, ours = pillow(images, quality), compress(images, quality)
    assert decibels(theirs, ours) > 40
    assert decibels(theirs, images) < (44 if quality == 95 else 38)
    assert decibels(ours, images) == pytest.approx(decibels(theirs, images), abs=0.25)


@pytest.mark.parametrize(("side", "qualities"), [(32, (80, 65, 58, 50, 40)), (224, (25, 18, 15, 10, 7))])
def test_severities_are_the_published_qualities(side: int, qualities: tuple[int, ...]) -> None:
    images = (photographs(side, side, 2) * 255).round() / 255
    for severity, quality in enumerate(qualities, 1):
        result = CORRUPTIONS["jpeg_compression"](images, severity, seeded())
        near = [decibels(result, pillow(images, quality + step)) for step in (-3, 0, 3)]
        assert near[1] > 40
        assert near[1] == max(near)


def test_jpeg_of_the_best_quality_loses_almost_nothing() -> None:
    images = (photographs(32, 32, 8, 1) * 255).round() / 255
    assert decibels(compress(images, 100), images) > 50
    flat = torch.full((1, 3, 16, 16), 0.5)
    assert rms(compress(flat, 10) - flat) < 0.03
