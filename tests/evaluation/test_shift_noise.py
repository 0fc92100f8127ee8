"""Noise has its nominal statistics."""

import math
from functools import partial

import pytest
import torch
from shift_cases import seeded
from training_cases import expect

from leanbayes.evaluation.shift import CORRUPTIONS, add_noise

PUBLISHED: dict[str, dict[int, tuple[float, ...]]] = {  # at 32 and at 224 pixels
    "gaussian_noise": {32: (0.04, 0.06, 0.08, 0.09, 0.10), 224: (0.08, 0.12, 0.18, 0.26, 0.38)},
    "shot_noise": {32: (500, 250, 100, 75, 50), 224: (60, 25, 12, 5, 3)},
    "impulse_noise": {32: (0.01, 0.02, 0.03, 0.05, 0.07), 224: (0.03, 0.06, 0.09, 0.17, 0.27)},
}
SIZES = [(side, severity) for side in (32, 224) for severity in range(1, 6)]


def constant(side: int, value: float) -> torch.Tensor:
    return torch.full((3 * (224 // side) ** 2, 1, side, side), value)  # 150,000 values


@pytest.mark.parametrize(("side", "severity"), SIZES)
def test_gaussian_noise_has_its_standard_deviation(side: int, severity: int) -> None:
    noise = CORRUPTIONS["gaussian_noise"](constant(side, 0.5), severity, seeded()) - 0.5
    std = PUBLISHED["gaussian_noise"][side][severity - 1]
    assert noise.std() == pytest.approx(std, rel=0.01)
    assert abs(noise.mean()) < 4 * std / math.sqrt(noise.numel())
    assert (noise / std).pow(4).mean() == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize(("side", "severity"), SIZES)
def test_shot_noise_counts_photons(side: int, severity: int) -> None:
    photons = PUBLISHED["shot_noise"][side][severity - 1]
    for value in (0.1, 0.7):
        counts = CORRUPTIONS["shot_noise"](constant(side, value), severity, seeded()) * photons
        assert torch.allclose(counts, counts.round(), atol=1e-3)
        assert counts.mean() == pytest.approx(photons * value, rel=0.01)
        assert counts.var() == pytest.approx(photons * value, rel=0.02)


@pytest.mark.parametrize(("side", "severity"), SIZES)
def test_impulse_noise_sets_its_share_to_black_and_white(side: int, severity: int) -> None:
    result = CORRUPTIONS["impulse_noise"](constant(side, 0.5), severity, seeded())
    share = PUBLISHED["impulse_noise"][side][severity - 1]
    assert (result == 0).double().mean() == pytest.approx(share / 2, rel=0.1)
    assert (result == 1).double().mean() == pytest.approx(share / 2, rel=0.1)
    assert ((result == 0) | (result == 1) | (result == 0.5)).all()


def test_channels_have_separate_noise() -> None:
    for name in PUBLISHED:
        noise = CORRUPTIONS[name](torch.full((1, 3, 128, 128), 0.5), 5, seeded()).sub(0.5).view(3, -1)
        assert (torch.corrcoef(noise) - torch.eye(3)).abs().max() < 0.04


@pytest.mark.parametrize("decibels", [-6, -3, 1, 5, 10, 20, 40])
@pytest.mark.parametrize("shape", [(4, 50_000), (4, 3, 130, 130)], ids=str)
def test_noise_is_relative_to_the_power_of_each_example(decibels: float, shape: tuple[int, ...]) -> None:
    size = torch.tensor([0.01, 1.0, 30.0, 0.0]).view(-1, *[1] * (len(shape) - 1))
    x = (torch.randn(shape, generator=seeded(1)) + 2) * size
    result = add_noise(x, decibels, seeded())
    noise = (result - x).flatten(1).double()
    power = x.flatten(1).double().square().mean(1)
    measured = 10 * torch.log10(power[:3] / noise[:3].square().mean(1))
    assert torch.allclose(measured, torch.tensor(float(decibels), dtype=torch.float64), atol=0.1)
    assert torch.equal(result[3], x[3])  # no power, no noise
    assert result[2].max() > 30  # not clipped
    assert abs(torch.corrcoef(noise[:2])[0, 1]) < 0.02


def test_noise_keeps_the_dtype_and_comes_from_the_generator() -> None:
    x = torch.rand(5, 7, generator=seeded(2))
    state = torch.random.get_rng_state()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert add_noise(x.to(dtype), 10, seeded()).dtype == dtype
    assert torch.equal(add_noise(x, 10, seeded(3)), add_noise(x, 10, seeded(3)))
    assert not torch.equal(add_noise(x, 10, seeded(3)), add_noise(x, 10, seeded(4)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(add_noise(x, math.inf, seeded()), x)
    assert add_noise(x[:, 0], -3, seeded()).shape == (5,)
    assert add_noise(x[:0], -3, seeded()).shape == (0, 7)


def test_invalid_inputs_and_ratios_raise_errors() -> None:
    expect(lambda: add_noise(torch.ones(3, 2, dtype=torch.uint8), 10, seeded()), "torch.uint8", "convert")
    expect(lambda: add_noise(torch.tensor(1.0), 10, seeded()), "()")
    for bad in (math.nan, -math.inf):
        expect(partial(add_noise, torch.ones(3, 2), bad, seeded()), f"snr_db={bad}", "decibels")
