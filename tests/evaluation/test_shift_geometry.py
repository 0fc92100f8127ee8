"""Rotation and deformation agree with scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from shift_cases import photographs, seeded
from training_cases import expect

from leanbayes.evaluation.shift import CORRUPTIONS, rotate
from leanbayes.evaluation.shift.geometry import warp


@pytest.mark.parametrize("degrees", [0, 15, -37.5, 90, 180, 300])
@pytest.mark.parametrize("shape", [(28, 28), (21, 40)], ids=str)
def test_rotation_is_that_of_scipy(degrees: float, shape: tuple[int, int]) -> None:
    images = photographs(*shape, 3).double()
    result = rotate(images, degrees)
    expected = ndimage.rotate(images.numpy(), degrees, axes=(3, 2), reshape=False, order=1, mode="grid-constant")
    assert result.dtype == torch.float64
    assert np.allclose(result, expected, atol=1e-9)


def test_quarter_turns_are_exact_and_counterclockwise() -> None:
    images = photographs(16, 16, 2)
    assert torch.allclose(rotate(images, 90), images.rot90(1, (2, 3)), atol=1e-5)
    assert torch.allclose(rotate(images, -90.0), images.rot90(-1, (2, 3)), atol=1e-5)
    assert torch.allclose(rotate(images, 0), images, atol=1e-6)


def test_each_image_can_have_its_own_angle() -> None:
    images = photographs(20, 20, 3)
    turned = rotate(images, torch.tensor([10, 200, -45]))
    for image, angle, found in zip(images, (10, 200, -45), turned, strict=True):
        assert torch.allclose(found, rotate(image[None], angle)[0], atol=1e-6)


def test_rotation_keeps_the_dtype() -> None:
    images = photographs(20, 20, 2).mul(255).round()
    exact = rotate(images, 33)
    as_bytes = rotate(images.byte(), 33)
    assert as_bytes.dtype == torch.uint8
    assert torch.equal(as_bytes, exact.round().byte())
    assert rotate(images.half() / 255, 33).dtype == torch.float16
    assert rotate(images[:0], 33).shape == (0, 3, 20, 20)
    assert rotate(torch.ones(1, 5, 20, 20), 45)[0, :, 0, 0].abs().max() == 0  # black from outside, for all channels


def test_invalid_images_and_angles_raise_errors() -> None:
    images = torch.rand(2, 1, 8, 8)
    expect(lambda: rotate(images[0], 10), "(1, 8, 8)", "(n, C, H, W)")
    expect(lambda: rotate(images.long(), 10), "torch.int64")
    expect(lambda: rotate(images, torch.zeros(3)), "degrees", "2 images")
    expect(lambda: rotate(images, math.nan), "degrees", "finite")


def test_zero_displacement_is_the_identity_and_an_integer_one_a_shift() -> None:
    images = photographs(24, 33, 2)
    still = torch.zeros(2, 24, 33)
    assert torch.allclose(warp(images, still, still), images, atol=1e-5)
    moved = warp(images, still + 3, still - 2)
    assert torch.allclose(moved[:, :, :-3, 2:], images[:, :, 3:, :-2], atol=1e-5)


def test_displacements_interpolate_between_pixels_and_mirror_edges() -> None:
    images = photographs(24, 33, 2)
    down, right = (3 * torch.randn(2, 24, 33, generator=seeded(seed)) for seed in (1, 2))
    result = warp(images, down, right)
    rows, columns = np.mgrid[:24, :33]
    for number in range(2):
        places = np.stack([rows + down[number].numpy(), columns + right[number].numpy()])
        for channel in range(3):
            expected = ndimage.map_coordinates(images[number, channel].numpy(), places, order=1, mode="mirror")
            assert np.allclose(result[number, channel], expected, atol=1e-4)


AMOUNTS = [(32, 1, 0.030, 0.004), (32, 5, 0.062, 0.017), (224, 5, 0.028, 0.0087)]


@pytest.mark.parametrize(("side", "severity", "affine", "local"), AMOUNTS)
def test_elastic_displacements_have_their_size(side: int, severity: int, affine: float, local: float) -> None:
    """A ramp of gray shows where each pixel was sampled."""
    ramp = torch.linspace(0, 1, side).expand(300 if side == 32 else 60, 1, side, side)
    inner = slice(side // 4, -(side // 4))  # where no edge is mirrored
    for images in (ramp, ramp.mT):
        moved = (CORRUPTIONS["elastic_transform"](images, severity, seeded()) - images)[..., inner, inner] * (side - 1)
        axis = (np.arange(side) - (side - 1) / 2)[inner] / (side / 3)
        y, x = np.meshgrid(axis, axis, indexing="ij")
        # The weight of each of the three points at a place: 1 at its own, 0 at the other two.
        shares = np.stack([(1 + x) / 2, (y - x) / 2, (1 - y) / 2])
        variance = (affine * side) ** 2 / 3 * (shares**2).sum(0).mean() + (local * side) ** 2
        assert moved.double().square().mean() == pytest.approx(variance, rel=0.15)
