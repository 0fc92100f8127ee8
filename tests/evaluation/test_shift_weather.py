"""Weather and its random fields have their known statistics."""

import math

import numpy as np
import pytest
import torch
from shift_cases import photographs, seeded
from torch import Tensor

from leanbayes.evaluation.shift import CORRUPTIONS
from leanbayes.evaluation.shift.fields import fractal, smooth, streaks
from leanbayes.evaluation.shift.weather import crystals

CPU = torch.device("cpu")


@pytest.mark.parametrize("decay", [1.4, 2.0, 3.0])
def test_a_cloud_has_a_spectrum_that_falls_with_a_power(decay: float) -> None:
    clouds = fractal((200, 64, 64), decay, seeded(), CPU).double()
    assert torch.allclose(clouds.amin((1, 2)), torch.zeros(200, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(clouds.amax((1, 2)), torch.ones(200, dtype=torch.float64), atol=1e-6)
    power = np.log(np.abs(np.fft.fft2(clouds.numpy())) ** 2).mean(0)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(64), np.fft.fftfreq(64)))
    use = (frequency > 0) & (frequency < 0.15)  # above this, float32 has no digits left for the smoothest field
    slope = np.polyfit(np.log(frequency[use]), power[use], 1)[0]
    assert slope == pytest.approx(-2 * (1 + 2 * math.log2(decay)), rel=0.03)


@pytest.mark.parametrize("sigma", [1.0, 2.5])
def test_a_smooth_field_has_its_correlation(sigma: float) -> None:
    field = smooth((300, 40, 48), sigma, seeded(), CPU).double()
    assert field.square().mean() == pytest.approx(1, rel=1e-3)
    for lag in (1, 3):
        expected = math.exp(-(lag**2) / (4 * sigma**2))
        for axis in (1, 2):
            assert (field * field.roll(lag, axis)).mean() == pytest.approx(expected, abs=0.02)


def direction(field: Tensor) -> float:
    """The angle of the lines of a field in degrees, from its gradients."""
    down, right = (field.double() - field.double().roll(1, axis) for axis in (-2, -1))
    across = 0.5 * torch.atan2(2 * (down * right).sum(), (right**2 - down**2).sum())
    return float(across.rad2deg() + 90) % 180


@pytest.mark.parametrize("degrees", [0, 30, 90, 135])
def test_streaks_run_along_their_angle(degrees: int) -> None:
    angle = torch.full((20, 1, 1), math.radians(degrees))
    found = direction(streaks(angle, (20, 64, 64), 8, 1.5, seeded(), CPU))
    assert abs((found - degrees + 90) % 180 - 90) < 4


@pytest.mark.parametrize("shape", [(60, 8, 8), (60, 32, 32), (4, 224, 224)], ids=str)
def test_ice_has_dark_gaps_and_bright_needles(shape: tuple[int, ...]) -> None:
    ice = crystals(shape, seeded(), CPU)
    assert ice.min() >= 0
    assert ice.max() <= 1
    assert 0.2 < ice.mean() < 0.55
    assert (ice < 0.1).double().mean() > 0.1
    assert (ice > 0.8).double().mean() > 0.05


@pytest.mark.parametrize(("side", "severity", "kept"), [(32, 1, 1.0), (32, 5, 0.75), (224, 3, 0.7)])
def test_frost_adds_bluish_ice_to_the_darkened_image(side: int, severity: int, kept: float) -> None:
    dark, images = torch.zeros(2, 3, side, side), photographs(side, side, 2)
    ice = CORRUPTIONS["frost"](dark, severity, seeded())
    red, green, blue = ice.unbind(1)
    assert (red <= green).all()
    assert (green <= blue).all()
    assert blue.max() > 1.1 * red.max() > 0.1
    assert torch.allclose(CORRUPTIONS["frost"](images, severity, seeded()), kept * images + ice, atol=1e-6)
    gray = CORRUPTIONS["frost"](dark[:, :1], severity, seeded())
    assert torch.allclose(gray[:, 0] * 0.86, red, atol=1e-6)


@pytest.mark.parametrize(("side", "severity", "density"), [(32, 1, 0.2), (32, 5, 1.5), (224, 1, 1.5), (224, 2, 2.0)])
def test_fog_dims_the_scene_by_its_density(side: int, severity: int, density: float) -> None:
    bright = torch.tensor([0.2, 0.8, 1.0]).view(-1, 1, 1, 1)
    result = CORRUPTIONS["fog"](bright.expand(3, 3, side, side), severity, seeded())
    thin, thick = result.amin((1, 2, 3)), result.amax((1, 2, 3))
    bright = bright.flatten()
    assert torch.allclose(thin, bright**2 / (bright + density), atol=1e-5)  # where there is no cloud
    assert torch.allclose(thick, bright, atol=1e-5)  # where it is densest
    assert torch.equal(result[:, 0], result[:, 2])  # gray


def test_snow_only_brightens_and_falls_down() -> None:
    images = photographs(64, 64, 20)
    for severity in (1, 5):
        assert (CORRUPTIONS["snow"](images, severity, seeded()) >= images - 1e-6).all()
    plain = torch.full((20, 3, 64, 64), 0.4)
    result = CORRUPTIONS["snow"](plain, 4, seeded())
    assert torch.allclose(result, result.flip(-2, -1), atol=1e-5)  # the flakes, and their copy rotated by 180 degrees
    assert torch.equal(result[:, 0], result[:, 1])  # white
    along, across = (result.diff(dim=axis).square().mean() for axis in (-2, -1))
    assert across > 2 * along
    assert result.std((1, 2, 3)).min() > 0.01


@pytest.mark.parametrize(("side", "severity", "visible"), [(32, 1, 0.95), (32, 5, 0.8), (224, 2, 0.7)])
def test_snow_whitens_the_scene_between_flakes(side: int, severity: int, visible: float) -> None:
    color = torch.tensor([0.1, 0.2, 0.6]).view(1, 3, 1, 1)
    result = CORRUPTIONS["snow"](color.expand(40, 3, side, side), severity, seeded())
    pale = 1.5 * (0.299 * 0.1 + 0.587 * 0.2 + 0.114 * 0.6) + 0.5
    expected = visible * color + (1 - visible) * pale  # pale is brighter than every channel
    flakes = result - expected
    assert flakes.min() > -1e-5
    assert torch.allclose(flakes, flakes[:, :1].expand_as(flakes), atol=1e-5)
