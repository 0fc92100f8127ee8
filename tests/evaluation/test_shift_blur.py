"""Blurs agree with scipy, and the swaps of glass blur with a sequential loop."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from shift_cases import digits, photographs, seeded

from leanbayes.evaluation.shift import CORRUPTIONS
from leanbayes.evaluation.shift.blur import disk, gaussian, shuffled, smear


def test_the_disk_is_the_published_one_at_32_pixels() -> None:
    assert np.allclose(disk(1.5, 0.1)[2:-2, 2:-2], np.full((3, 3), 1 / 9), atol=1e-6)
    plus = disk(1.0, 0.2)
    middle = len(plus) // 2
    assert torch.allclose(plus[middle, middle - 1 : middle + 2], torch.full((3,), 0.2), atol=1e-5)
    assert plus[middle - 1, middle - 1] < 1e-5
    taps = np.exp(-0.5 * (np.arange(-1, 2) / 0.4) ** 2)
    small, middle = disk(0.3, 0.4), len(disk(0.3, 0.4)) // 2
    inner = small[middle - 1 : middle + 2, middle - 1 : middle + 2]
    assert np.allclose(inner, np.outer(taps, taps) / taps.sum() ** 2, atol=1e-3)


@pytest.mark.parametrize("radius", [3.0, 6.5, 10.0])
def test_a_large_disk_is_round_and_has_its_radius(radius: float) -> None:
    kernel = disk(radius, 0.5).double()
    axis = torch.arange(len(kernel)) - len(kernel) // 2
    assert kernel.sum() == pytest.approx(1)
    assert torch.allclose(kernel, kernel.T)
    assert torch.allclose(kernel, kernel.flip(0))
    variance = (kernel.sum(0) * axis**2).sum()
    assert variance == pytest.approx(radius**2 / 4 + 0.25, rel=0.12)  # of a disk, and of the Gaussian


@pytest.mark.parametrize(
    ("side", "severity", "radius", "softness"), [(32, 5, 1.5, 0.1), (224, 3, 6, 0.5), (8, 3, 0.5, 0.6)]
)
def test_defocus_is_a_convolution(side: int, severity: int, radius: float, softness: float) -> None:
    images = photographs(side, side, 2)
    result = CORRUPTIONS["defocus_blur"](images, severity, seeded())
    kernel = disk(radius, softness).double().numpy()
    expected = ndimage.convolve(images.double().numpy(), kernel[None, None], mode="mirror")
    assert np.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("sigma", [0.2, 0.7, 1.5, 3.3])
def test_gaussian_taps_are_those_of_scipy(sigma: float) -> None:
    taps = gaussian(sigma)
    peak = np.zeros(2 * len(taps) + 1)
    peak[len(taps)] = 1
    expected = ndimage.gaussian_filter1d(peak, sigma, radius=len(taps) // 2)
    assert np.allclose(np.convolve(peak, taps, "same"), expected, atol=1e-6)
    assert len(taps) // 2 >= 4 * sigma


def one_by_one(height: int, width: int, reach: float, generator: torch.Generator) -> list[int]:
    """One round of swaps for one image in plain Python, in the order of `shuffled`."""
    span = math.ceil(reach)
    draws = torch.rand(2, 1, height, width, generator=generator) * (2 * reach + 1) - reach - 0.5
    source = list(range(height * width))
    stride = 2 * span + 1
    for top in range(stride):
        for left in range(stride):
            for row in range(top, height, stride):
                for column in range(left, width, stride):
                    down, right = (max(-span, min(span, round(float(draws[k, 0, row, column])))) for k in (0, 1))
                    other = min(max(row + down, 0), height - 1) * width + min(max(column + right, 0), width - 1)
                    here = row * width + column
                    source[here], source[other] = source[other], source[here]
    return source


@pytest.mark.parametrize("reach", [0.2, 1.0, 1.5, 4.0])
def test_parallel_swaps_are_sequential_swaps(reach: float) -> None:
    for height, width in ((8, 8), (13, 30)):
        for seed in range(3):
            expected = one_by_one(height, width, reach, seeded(seed))
            assert shuffled(1, height, width, reach, 1, seeded(seed))[0].tolist() == expected
            assert expected != sorted(expected)


def test_swaps_lose_no_pixel_and_stay_near() -> None:
    source = shuffled(50, 20, 20, 1, 2, seeded())
    assert torch.equal(source.sort(1).values, torch.arange(400).expand(50, -1))
    down = source.div(20, rounding_mode="floor") - torch.arange(20).repeat_interleave(20)
    assert 0.5 < down.double().square().mean().sqrt() < 3
    few = shuffled(200, 20, 20, 0.01, 1, seeded())
    moved = (few != torch.arange(400)).double().mean()
    assert moved == pytest.approx(2 * (1 - (0.5 / 0.51) ** 2), rel=0.1)  # each swap moves two


def test_glass_keeps_the_mean_and_breaks_lines() -> None:
    images = torch.zeros(20, 1, 64, 64)
    images[..., 32:] = 1
    result = CORRUPTIONS["glass_blur"](images, 5, seeded())
    assert result.mean() == pytest.approx(0.5, abs=0.01)
    assert torch.allclose(result[..., :20], torch.zeros(()))  # far from the edge nothing changes
    assert result[..., 32].std() > 0.1  # the edge is frayed


def streak(angle: float, sigma: float, taps: int) -> np.ndarray:
    """The kernel of a motion blur: half a Gaussian about its mean, each tap split among the four nearest pixels."""
    distance = np.arange(taps) * 3 * sigma / (taps - 1)
    weights = np.exp(-(distance**2) / (2 * sigma**2))
    weights /= weights.sum()
    reach = math.ceil(3 * sigma) + 2
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for t, weight in zip(distance - weights @ distance, weights, strict=True):
        y, x = reach + t * math.sin(angle), reach + t * math.cos(angle)
        row, column = math.floor(y), math.floor(x)
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            kernel[row + i, column + j] += weight * abs(1 - i - (y - row)) * abs(1 - j - (x - column))
    return kernel


@pytest.mark.parametrize(("sigma", "taps"), [(0.5, 7), (2.0, 7), (5.0, 16)])
def test_motion_blur_is_a_convolution_with_a_streak(sigma: float, taps: int) -> None:
    images, angles = photographs(32, 40, 3), torch.tensor([0.0, -0.6, 2.0])
    result = smear(images, angles, sigma)
    for image, angle, found in zip(images.double().numpy(), angles.tolist(), result, strict=True):
        expected = ndimage.correlate(image, streak(angle, sigma, taps)[None], mode="nearest")
        assert np.allclose(found, expected, atol=1e-5)


def test_motion_blurs_along_the_horizontal_more_and_moves_nothing() -> None:
    images = torch.zeros(400, 1, 33, 33)
    images[:, :, 16, 16] = 1
    result = CORRUPTIONS["motion_blur"](images, 5, seeded()).mean((0, 1)).double()
    axis = torch.arange(33) - 16.0
    rows, columns = result.sum(1), result.sum(0)
    assert abs((rows * axis).sum()) < 0.02
    assert abs((columns * axis).sum()) < 0.02
    assert (columns * axis**2).sum() > 2 * (rows * axis**2).sum()
    # Along the streak a half Gaussian has the variance σ² (1 - 2/π); E sin² = 1/2 - 1/π, E cos² = 1/2 + 1/π.
    variance = (columns * axis**2).sum() + (rows * axis**2).sum()
    assert variance == pytest.approx(2.5**2 * (1 - 2 / math.pi) + 0.3, rel=0.15)  # bilinear sampling adds up to 1/2


@pytest.mark.parametrize(("side", "severity", "furthest"), [(32, 1, 1.05), (32, 5, 1.25), (224, 5, 1.30)])
def test_zoom_blur_is_the_mean_of_enlarged_images(side: int, severity: int, furthest: float) -> None:
    images = photographs(side, side, 2)
    result = CORRUPTIONS["zoom_blur"](images, severity, seeded())
    center = (side - 1) / 2
    expected = np.mean(
        [
            ndimage.affine_transform(
                images.double().numpy(),
                [1, 1, 1 / zoom, 1 / zoom],
                [0, 0, center - center / zoom, center - center / zoom],
                order=1,
            )
            for zoom in np.linspace(1, furthest, 11)
        ],
        axis=0,
    )
    assert np.allclose(result, expected, atol=1e-4)


def test_blurs_of_digits_keep_most_of_their_ink() -> None:
    images = digits(100)
    for name in ("defocus_blur", "glass_blur", "motion_blur"):
        result = CORRUPTIONS[name](images, 5, seeded())
        assert result.mean() == pytest.approx(float(images.mean()), rel=0.15)
