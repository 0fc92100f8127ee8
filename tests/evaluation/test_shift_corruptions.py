"""Properties of all 15 corruptions: shape, range, order of severities, and source of randomness."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from shift_cases import digits, photographs, rms, seeded
from torch import Tensor
from training_cases import expect

from leanbayes.evaluation.shift import CORRUPTIONS, GEOMETRIC, SEVERITIES, corrupt, corruptions
from leanbayes.evaluation.shift.severity import Scale

PLAIN = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}  # deterministic ones
SHAPES = [(2, 1, 8, 8), (2, 1, 28, 28), (3, 3, 32, 32), (2, 3, 9, 31), (1, 3, 224, 224), (1, 3, 240, 320)]


def test_the_names_are_those_of_the_benchmark_in_its_order() -> None:
    assert " ".join(CORRUPTIONS) == (
        "gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog "
        "brightness contrast elastic_transform pixelate jpeg_compression"
    )
    assert set(GEOMETRIC) == {"zoom_blur", "elastic_transform"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_all_sizes_stay_in_range_and_the_input_is_not_changed(name: str, shape: tuple[int, ...]) -> None:
    images = torch.rand(shape, generator=seeded(5))
    images[0, :, :4], images[0, :, 4:8] = 0, 1
    for severity in (1, 5):
        before = images.clone()
        result = corrupt(images, name, severity, seeded())
        assert torch.equal(images, before)
        assert result.shape == images.shape
        assert result.dtype == images.dtype
        assert result.min() >= 0  # so it has no nan
        assert result.max() <= 1
        assert rms(result - images) > 1e-3


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_dtypes_are_kept_and_agree(name: str) -> None:
    images = photographs(32, 32, 4).mul(255).round()
    expected = corrupt(images / 255, name, 3, seeded())
    as_bytes = corrupt(images.byte(), name, 3, seeded())
    assert as_bytes.dtype == torch.uint8
    assert torch.equal(as_bytes, expected.mul(255).round().byte())
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        rounded = (images / 255).to(dtype)
        result = corrupt(rounded, name, 3, seeded())
        assert result.dtype == dtype
        assert result.min() >= 0
        assert result.max() <= 1
        assert torch.equal(result, corrupt(rounded.float(), name, 3, seeded()).to(dtype))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_black_white_and_empty_batches_give_no_nan(name: str) -> None:
    for value in (0.0, 1e-42, 1.0):
        result = corrupt(torch.full((2, 3, 16, 16), value), name, 5, seeded())
        assert result.min() >= 0
        assert result.max() <= 1
    assert corrupt(torch.rand(0, 3, 16, 16), name, 5, seeded()).shape == (0, 3, 16, 16)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_layout_in_memory_does_not_matter(name: str) -> None:
    images = photographs(32, 32, 4)
    expected = corrupt(images, name, 4, seeded())
    last = images.contiguous(memory_format=torch.channels_last)
    assert torch.allclose(corrupt(last, name, 4, seeded()), expected, atol=1e-5)
    one = images[:1].expand(4, -1, -1, -1)
    assert torch.allclose(corrupt(one, name, 4, seeded()), corrupt(one.clone(), name, 4, seeded()), atol=1e-5)


CASES: dict[str, Callable[[], Tensor]] = {
    "digits 8": lambda: digits(200),
    "gray 28": lambda: photographs(28, 28, 48, 1),
    "color 32": lambda: photographs(32, 32, 48),
    "color 96": lambda: photographs(96, 96, 12),
    "color 224": lambda: photographs(224, 224, 2),
    "color 240 x 320": lambda: photographs(240, 320, 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_severity_is_worse_than_the_one_before(name: str, case: str) -> None:
    images = CASES[case]()
    errors = [rms(corrupt(images, name, severity, seeded(1)) - images) for severity in SEVERITIES]
    assert all(after > before for before, after in pairwise(errors)), errors
    assert errors[0] < 0.26
    assert errors[-1] < 0.42  # the content is still visible


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_all_randomness_comes_from_the_generator(name: str) -> None:
    images = photographs(32, 32, 4)
    state, numpy_state = torch.random.get_rng_state(), str(np.random.get_state())
    generator = seeded(3)
    first, second = (corrupt(images, name, 3, generator) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert str(np.random.get_state()) == numpy_state
    assert torch.equal(first, corrupt(images, name, 3, seeded(3)))
    assert torch.equal(first, second) == (name in PLAIN)
    same = images[:1].repeat(2, 1, 1, 1)
    one, other = corrupt(same, name, 3, seeded())
    assert torch.equal(one, other) == (name in PLAIN)  # each image has separate randomness


def test_many_images_are_processed_in_chunks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    images, generator = photographs(32, 32, 5), seeded()
    expected = torch.cat([corrupt(part, "motion_blur", 3, generator) for part in images.split(2)])
    monkeypatch.setattr(corruptions, "_AT_ONCE", 2 * images[0].numel() + 1)
    assert torch.equal(corrupt(images, "motion_blur", 3, seeded()), expected)


def test_invalid_images_and_settings_raise_errors() -> None:
    images = torch.rand(2, 3, 8, 8)
    expect(lambda: corrupt(images, "gausian_noise", 1, seeded()), "'gausian_noise'", "did you mean gaussian_noise")
    expect(lambda: corrupt(images, "rain!", 1, seeded()), "'rain!'", "fog", "jpeg_compression")
    expect(lambda: corrupt(images, "fog", 0, seeded()), "severity 0", "1 (mild) to 5")
    expect(lambda: corrupt(images, "fog", 2.5, seeded()), "2.5")  # type: ignore[arg-type]
    expect(lambda: corrupt(images[0], "fog", 1, seeded()), "(3, 8, 8)", "(n, 1 or 3, height, width)")
    expect(lambda: corrupt(images[:, :2], "fog", 1, seeded()), "(2, 2, 8, 8)")
    expect(lambda: corrupt(images[..., :7], "fog", 1, seeded()), "(2, 3, 8, 7)", "8 or more")
    expect(lambda: corrupt(images.long(), "fog", 1, seeded()), "torch.int64", "uint8")
    for bad in (images * 2, images - 1, images.clone().index_fill_(0, torch.tensor([1]), torch.nan)):
        expect(partial(corrupt, bad, "fog", 1, seeded()), "[0, 1]", "nan", "normalization")


def test_values_are_as_published_at_32_and_224_pixels_and_smooth_between_and_beyond() -> None:
    scale = Scale((1, 2, 3, 4, 5), (4, 8, 12, 16, 20))

    def images(height: int, width: int) -> Tensor:
        return torch.empty(1, 1, height, width)

    for severity in SEVERITIES:
        assert scale.at(severity, images(32, 40)) == pytest.approx(severity)
        assert scale.at(severity, images(300, 224)) == pytest.approx(4 * severity)
        assert scale.at(severity, images(64, 64)) == pytest.approx(severity * 4 ** (np.log(2) / np.log(7)))
        assert scale.at(severity, images(8, 8)) == pytest.approx(severity)
        assert scale.at(severity, images(448, 448)) == pytest.approx(4 * severity)
        assert scale.pixels(severity, images(448, 448)) == pytest.approx(8 * severity)
        assert scale.pixels(severity, images(8, 8)) == pytest.approx(severity / 2)
        assert scale.pixels(severity, images(8, 8), shrink=False) == pytest.approx(severity)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_gpu_gives_the_same_images(name: str) -> None:
    images = photographs(32, 32, 8)
    result = corrupt(images.cuda(), name, 3, seeded())
    assert result.device.type == "cuda"
    assert rms(result.cpu() - corrupt(images, name, 3, seeded())) < 2e-3
