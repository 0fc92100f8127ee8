"""TrivialAugment on batches: each operation against Pillow, and random choices that depend on seed and epoch only."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from data_cases import expect
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset
from training_cases import assert_equal_models, stopped_at

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.data import ArrayDataset, Augment, Batches, Data, Normalize, from_datasets, load
from leanbayes.data.trivial import OPERATIONS, STRONGEST, Operations, augmented, make_operations, moved
from leanbayes.training import read_record

SHAPES = [(3, 32, 32), (1, 28, 28), (3, 8, 8), (3, 40, 57), (1, 2, 3)]
UNSIGNED = ("identity", "posterize", "solarize", "autocontrast", "equalize")


def photos(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return smooth random images of bytes, each with its own range of values; the last two have one and two values."""
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = shape
    x = F.interpolate(torch.rand(count, channels, 5, 5, generator=generator), (height, width), mode="bicubic")
    x = x + 0.1 * torch.randn(x.shape, generator=generator)
    low, high = 120 * torch.rand(2, count, 1, 1, 1, generator=generator)
    x = (low + x * (255 - low - high)).clamp(0, 255).to(torch.uint8)
    x[-1] = 77
    x[-2] = torch.where(x[-2] > x[-2].float().mean(), 200, 90)
    return x


def one_operation(name: str, strength: int, sign: int, count: int) -> Operations:
    numbers = (OPERATIONS.index(name), strength, sign)
    return make_operations(*(torch.full((count,), number) for number in numbers))


# -- operations -------------------------------------------------------------------------------------------------------


def by_pillow(image: Image.Image, name: str, strength: int, sign: int) -> Image.Image:
    """Apply an operation of the wide space as the paper defines it."""
    part, (width, height) = strength / 30, image.size

    def affine(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix)

    shear, factor = 0.99 * part * sign, 1 + 0.99 * part * sign
    operations: dict[str, Callable[[], Image.Image]] = {
        "identity": lambda: image,
        "shear-x": lambda: affine(1, shear, 0, 0, 1, 0),
        "shear-y": lambda: affine(1, 0, 0, shear, 1, 0),
        "translate-x": lambda: affine(1, 0, sign * (strength * min(32, width) // 30), 0, 1, 0),
        "translate-y": lambda: affine(1, 0, 0, 0, 1, sign * (strength * min(32, height) // 30)),
        "rotate": lambda: image.rotate(135 * part * sign),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "color": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
        "posterize": lambda: ImageOps.posterize(image, 8 - round(6 * part)),
        "solarize": lambda: ImageOps.solarize(image, 255 - 255 * strength / 30),  # type: ignore[arg-type]
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
    }
    return operations[name]()


def as_pillow(x: Tensor) -> Image.Image:
    return Image.fromarray(x[0].numpy() if len(x) == 1 else x.permute(1, 2, 0).numpy())


def as_tensor(image: Image.Image) -> Tensor:
    values = torch.from_numpy(np.array(image))
    return values[None] if values.dim() == 2 else values.permute(2, 0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_that_of_pillow(name: str, shape: tuple[int, ...]) -> None:
    """All values are equal, except that autocontrast may differ by one level: Pillow truncates inexact floats there."""
    x = photos(6, shape)
    for strength in range(STRONGEST + 1) if name not in ("identity", "autocontrast", "equalize") else (0, STRONGEST):
        for sign in (1, -1):
            found = augmented(x, one_operation(name, strength, sign, len(x)))
            assert found.dtype == torch.uint8
            expected = torch.stack([as_tensor(by_pillow(as_pillow(image), name, strength, sign)) for image in x])
            different = (found.int() - expected.int()).abs()
            if name == "autocontrast":
                assert different.max() <= 1
            else:
                assert torch.equal(found, expected), (strength, sign, int(different.max()))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_strength_but_the_weakest_changes_images(name: str) -> None:
    x = photos(4, (3, 32, 32))[:2]
    for strength in (0, 10, STRONGEST):
        for sign in (1, -1):
            found = augmented(x, one_operation(name, strength, sign, 2))
            unchanged = name == "identity" or (strength == 0 and name not in ("solarize", "autocontrast", "equalize"))
            if name == "solarize" and strength == 0:
                assert torch.equal(found, torch.where(x == 255, 0, x))
            else:
                assert torch.equal(found, x) == unchanged, (strength, sign)
    signs = (one_operation(name, 20, sign, 2) for sign in (1, -1))
    first, second = (augmented(x, operations) for operations in signs)
    assert torch.equal(first, second) == (name in UNSIGNED)


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_a_mixed_batch_has_the_result_of_each_image_alone(channels: int) -> None:
    count = 2 * len(OPERATIONS)
    x = photos(count, (channels, 12, 9))
    number = torch.arange(count) % len(OPERATIONS)
    operations = make_operations(number, torch.arange(count) + 2, torch.where(number % 2 == 0, 1, -1))
    found = augmented(x, operations)
    assert found.shape == x.shape
    for i in range(count):
        assert torch.equal(augmented(x[i : i + 1], operations.part(slice(i, i + 1)))[0], found[i])
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(augmented(last, operations), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_images_have_the_results_of_bytes(dtype: torch.dtype) -> None:
    x = photos(28, (3, 16, 16))
    number = torch.arange(28) % len(OPERATIONS)
    operations = make_operations(number, torch.full((28,), 20), torch.ones(28, dtype=torch.long))
    found = augmented(x.to(dtype) / 255, operations)
    assert found.dtype == dtype
    assert found.min() >= 0
    assert found.max() <= 1
    torch.testing.assert_close(found, augmented(x, operations).to(dtype) / 255, atol=1e-6, rtol=0)


def test_label_maps_move_with_their_images() -> None:
    """If an image shows its labels, then it still does after geometric operations."""
    count = 6 * (STRONGEST + 1)
    maps = torch.randint(1, 200, (count, 20, 26), generator=torch.Generator().manual_seed(0))
    operations = make_operations(torch.arange(count) % 6, torch.arange(count) // 6, torch.ones(count, dtype=torch.long))
    images, labels = augmented(maps[:, None].to(torch.uint8), operations), moved(maps, operations, -7)
    assert torch.equal(images[:, 0].long(), torch.where(labels == -7, 0, labels))
    assert 0.05 < (labels == -7).float().mean() < 0.5


class Waiting(TorchDispatchMode):
    """Raises an error for operators that wait for a GPU: values for Python, shapes that depend on data, and copies."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "_to_copy", "lift_fresh", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        assert name not in self.NAMES or (name == "_to_copy" and kwargs.get("device") is None), name
        indices = args[1] if name in ("index", "index_put_") else ()
        assert not any(index is not None and index.dtype == torch.bool for index in indices)
        return func(*args, **kwargs)


@pytest.mark.parametrize("floats", [False, True])
def test_nothing_waits_for_the_device(floats: bool) -> None:
    x = photos(28, (3, 16, 16))
    x = x / 255 if floats else x
    operations = Augment(trivial=True).draw(28, torch.Generator().manual_seed(0)).operations
    assert operations is not None
    with Waiting():
        augmented(x, operations)


# -- batches ----------------------------------------------------------------------------------------------------------


class Streamed(Dataset[Any]):
    """Examples that are read one by one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def same(first: Iterator[Any], second: Iterator[Any]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


IMAGES = ArrayDataset(photos(40, (3, 12, 12)), torch.arange(40))
TRIVIAL = Augment(crop=2, trivial=True)


def test_operations_strengths_and_signs_are_uniform() -> None:
    count = 100_000
    operations = Augment(trivial=True).draw(count, torch.Generator().manual_seed(0)).operations
    assert operations is not None
    shares = operations.number.bincount() / count
    assert shares.tolist() == pytest.approx([1 / 14] * 14, abs=0.004)
    found = operations.factor[operations.number == OPERATIONS.index("contrast")]
    values, counts = found.unique(return_counts=True)
    assert values.tolist() == pytest.approx(np.linspace(0.01, 1.99, 61), abs=1e-6)
    expected = torch.full((61,), 1 / 62)
    expected[30] = 2 / 62  # of both signs
    assert (counts / len(found)).tolist() == pytest.approx(expected.tolist(), abs=0.006)


def test_augmentation_depends_on_seed_and_epoch_only() -> None:
    def epoch(number: int, seed: int = 0, start: int = 0, dataset: Any = IMAGES, **settings: Any) -> Any:
        return Batches(dataset, 8, seed=seed, augment=TRIVIAL, **settings).epoch(number, start)

    whole = list(epoch(3))
    same(iter(whole), epoch(3))
    same(iter(whole[2:]), epoch(3, start=2))
    same(iter(whole), epoch(3, dataset=Streamed(IMAGES)))
    same(iter(whole), epoch(3, dataset=Streamed(IMAGES), workers=1))
    halves = [list(epoch(3, parts=2, mine=[rank])) for rank in (0, 1)]
    same(iter(whole), (tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(*halves, strict=True)))
    for other in (epoch(4), epoch(3, seed=1)):
        by_label = {int(y): x for xs, ys in other for x, y in zip(xs, ys, strict=True)}
        pairs = [(x, by_label[int(y)]) for xs, ys in whole for x, y in zip(xs, ys, strict=True)]
        assert sum(torch.equal(*pair) for pair in pairs) < 5


def test_order_and_crops_are_those_of_the_standard_augmentation() -> None:
    plain, trivial = (Augment(2, trivial=on).draw(50, torch.Generator().manual_seed(1)) for on in (False, True))
    assert plain.operations is None
    assert all(torch.equal(one, other) for one, other in zip(plain[:3], trivial[:3], strict=True))
    first, second = (Batches(IMAGES, 8, augment=augment).epoch(1) for augment in (Augment(2), TRIVIAL))
    assert [y.tolist() for _, y in first] == [y.tolist() for _, y in second]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("floats", [False, True])
def test_type_shape_and_range_of_values_stay(channels: int, floats: bool) -> None:
    x = photos(40, (channels, 12, 12))
    dataset = ArrayDataset(x / 255 if floats else x, torch.arange(40))
    for channels_last in (False, True):
        for batch, _ in Batches(dataset, 20, augment=TRIVIAL, channels_last=channels_last).epoch():
            assert batch.shape == (20, channels, 12, 12)
            assert batch.dtype == dataset.x.dtype
            assert batch.min() >= 0
            assert batch.max() <= (1 if floats else 255)
            assert batch.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    normalize = Normalize([0.5] * channels, [0.25] * channels)
    settings: dict[str, Any] = {"augment": TRIVIAL, "shuffle": False}
    (plain, _), *_ = Batches(dataset, 40, **settings).epoch()
    (normalized, _), *_ = Batches(dataset, 40, normalize=normalize, **settings).epoch()
    torch.testing.assert_close(normalized, normalize(plain))


def test_label_maps_have_padding_from_crops_and_operations() -> None:
    maps = torch.randint(1, 200, (40, 12, 12), generator=torch.Generator().manual_seed(0))
    dataset = ArrayDataset(maps[:, None].to(torch.uint8), maps)
    batches = Batches(dataset, 40, augment=Augment(crop=1, trivial=True), ignore_index=-7)
    (x, y), *_ = batches.epoch()
    visible = (x[:, 0] == 0) == (y == -7)
    assert visible.flatten(1).all(1).float().mean() > 0.5  # brightness and others change values
    assert (y == -7).any()
    floats = TensorDataset(torch.rand(4, 3, 8, 8), torch.rand(4, 1, 8, 8))
    expect(lambda: Batches(floats, 4, augment=Augment(crop=0, trivial=True)), "Float label maps")


@pytest.mark.parametrize("streamed", [False, True])
def test_inputs_that_are_not_images_raise_one_sentence(streamed: bool) -> None:
    def first(x: Tensor) -> Any:
        dataset: Any = TensorDataset(x, torch.arange(8))
        return next(Batches(Streamed(dataset) if streamed else dataset, 4, augment=TRIVIAL).epoch())

    expect(lambda: first(torch.rand(8, 6)), "images", "(6,)")
    expect(lambda: first(torch.randn(8, 1, 4, 4)), "floats from -", "Normalize")
    expect(lambda: first(torch.full((8, 1, 4, 4), float("nan"))), "floats from nan")
    expect(lambda: first(torch.zeros(8, 1, 4, 4, dtype=torch.int32)), "int32")
    assert first(torch.rand(8, 1, 4, 4))[0].shape == (4, 1, 4, 4)
    dicts: Any = [({"x": torch.zeros(3)}, 0)] * 4
    expect(lambda: next(Batches(dicts, 4, augment=TRIVIAL).epoch()), "not tensors")


# -- training ---------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "epochs": 2, "batch_size": 16, "temperature": 0.01, "device": "cpu", "progress": False, "checkpoint_steps": 2,
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def digits(**settings: Any) -> Data:
    """Return a few digits, by default without an augmentation."""
    data: Any = load("digits")
    return from_datasets(TensorDataset(*data.train[:100]), TensorDataset(*data.validation[:20]), **settings)


def test_a_recipe_chooses_the_augmentation() -> None:
    plain, cropped = digits(), digits(augment=Augment(crop=1, flip=False))
    assert plain.augmentation("trivial") == Augment(crop=0, flip=False, trivial=True)
    assert cropped.augmentation("trivial") == Augment(crop=1, flip=False, trivial=True)
    assert cropped.augmentation("standard") == cropped.augmentation() == cropped.augment
    assert plain.augmentation("standard") is None
    assert cropped.augmentation("none") is None
    assert lb.Recipe().augment == "standard"
    assert lb.Recipe().changed({"augment": None}).augment == "none"  # as YAML may read it


def test_tables_and_texts_raise_one_sentence(tmp_path: Path) -> None:
    def train(dataset: Any) -> None:
        lb.fit(nn.Linear(6, 3), lb.Deterministic(), dataset, augment="trivial", out=tmp_path / "out", **SETTINGS)

    expect(lambda: train(TensorDataset(torch.rand(40, 6), torch.arange(40) % 3)), "augment='trivial'", "(6,)")
    expect(lambda: train([({"x": torch.zeros(6)}, 0)] * 40), "augment='trivial'", "not tensors")
    assert not (tmp_path / "out" / "run.json").exists()


def test_runs_from_before_the_setting_are_resumed(tmp_path: Path) -> None:
    def train() -> lb.BayesianModel:
        return lb.fit(network(), lb.MeanField(), digits(), out=tmp_path, **SETTINGS)

    with stopped_at(7):
        train()
    path = tmp_path / "run.json"
    values = json.loads(path.read_text())
    del values["config"]["recipe"]["augment"]
    path.write_text(json.dumps(values))
    assert read_record(tmp_path)["config"]["recipe"]["augment"] == "standard"
    train()
    assert read_record(tmp_path)["status"] == "finished"


def test_the_command_line_has_it(tmp_path: Path) -> None:
    words = "fit deterministic --data digits --model mlp --epochs 1 --device cpu --augment"
    for choice in ("trivial", "none"):
        assert main([*words.split(), choice, "--out", str(tmp_path / choice)]) == 0
        assert read_record(tmp_path / choice)["config"]["recipe"]["augment"] == choice


def test_fit_trains_with_it_and_resumes(tmp_path: Path) -> None:
    data = digits()

    def train(out: str, **settings: Any) -> lb.BayesianModel:
        return lb.fit(network(), lb.MeanField(), data, out=tmp_path / out, **{**SETTINGS, **settings})

    whole = train("whole", augment="trivial")
    assert read_record(tmp_path / "whole")["config"]["recipe"]["augment"] == "trivial"
    with stopped_at(7):
        train("stopped", augment="trivial")
    expect(lambda: train("stopped"), "recipe.augment='trivial'", "'standard'")
    assert_equal_models(train("stopped", augment="trivial"), whole)
    standard, none = train("standard"), train("none", augment="none")
    assert_equal_models(standard, none)  # these data have no augmentation
    assert not torch.equal(whole.posterior.mean(), standard.posterior.mean())
