"""Folders of images and of label maps, and single images for a prediction."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import Array, expect, random_bytes, write_folder, write_image
from PIL import Image

import leanbayes as lb
from leanbayes.data import Augment, detail_lost, load, read_image

# -- folders of images -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("splits", "sizes"),
    [
        (("train",), (6, 2, None)),
        (("train", "val"), (6, 2, 8)),
        (("train", "test"), (6, 2, 8)),
        (("train", "val", "test"), (8, 8, 8)),
    ],
)
def test_a_lone_val_is_the_test_split(tmp_path: Path, splits: tuple[str, ...], sizes: tuple[int | None, ...]) -> None:
    write_folder(tmp_path, splits)
    data = load(tmp_path, validation_share=0.25, resize=(8, 8))
    parts: list[Any] = [data.train, data.validation, data.test]
    assert tuple(None if part is None else len(part) for part in parts) == sizes
    assert data.classes == ("cat", "dog")
    assert (data.outputs, data.input_shape, data.augment) == (2, (3, 8, 8), Augment(1))


def test_images_are_read_and_cropped_to_their_center(tmp_path: Path) -> None:
    values = random_bytes(8, 8, 3)
    for number in range(3):
        for name in ("a", "b"):
            write_image(tmp_path / "train" / name / f"{number}.PNG", values)
            write_image(tmp_path / "test" / name / "deep" / f"{number}.bmp", values)
    (tmp_path / "train" / "a" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    same: Any = load(tmp_path, resize=(8, 8))
    for part, count in ((same.train, 5), (same.validation, 1), (same.test, 6)):
        assert len(part) == count
        x, y = part[0]
        assert np.array_equal(x, values.transpose(2, 0, 1))
        assert y.dtype == torch.long
    assert [int(y) for _, y in same.test] == [0, 0, 0, 1, 1, 1]
    wide = np.repeat(np.arange(40, dtype=np.uint8)[None, :, None], 20, 0).repeat(3, 2)
    write_image(tmp_path / "test" / "a" / "deep" / "0.bmp", wide)
    cropped: Any = load(str(tmp_path), resize=(20, 20)).test
    assert np.array_equal(cropped[0][0][0, 0], np.arange(10, 30))
    whole: Any = load(str(tmp_path))
    assert whole.train[0][0].shape == (3, 224, 224)
    assert whole.augment == Augment(28)


def test_gray_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "a" / "0.png", random_bytes(8, 8))
    write_image(tmp_path / "train" / "a" / "1.png", random_bytes(8, 8, 4))
    write_image(tmp_path / "train" / "a" / "2.jpg", random_bytes(64, 64, 3))
    write_image(tmp_path / "train" / "a" / "3.webp", random_bytes(9, 12, 3))
    data: Any = load(tmp_path, resize=(8, 8))
    assert {tuple(x.shape) for x, _ in [*data.train, *data.validation]} == {(3, 8, 8)}


def test_invalid_folders_of_images_raise_one_sentence(tmp_path: Path) -> None:
    expect(lambda: load(tmp_path), tmp_path, "train/CLASS/", "leftImg8bit", "trainannot")
    (tmp_path / "train").mkdir()
    expect(lambda: load(tmp_path), "train/CLASS/")
    (tmp_path / "train" / "cat").mkdir()
    expect(lambda: load(tmp_path), "no images", tmp_path / "train")
    write_folder(tmp_path, ("train",))
    (tmp_path / "test").mkdir()
    write_image(tmp_path / "test" / "0.png", random_bytes(8, 8, 3))
    assert load(tmp_path).test is None  # unlabeled
    write_folder(tmp_path, ("val",), ("cat",))
    assert load(tmp_path).classes == ("cat", "dog")  # a split may lack a rare class
    write_folder(tmp_path, ("val",), ("cat", "cow"))
    expect(lambda: load(tmp_path), tmp_path / "val", "cow")
    expect(lambda: load(tmp_path, resize=(0, 8)), "resize=(0, 8)")
    expect(lambda: load("digits", resize=(8, 8)), "resize", "digits")


def test_damaged_images_are_named_when_they_are_read(tmp_path: Path) -> None:
    write_folder(tmp_path, ("train", "val"))
    data: Any = load(tmp_path, resize=(8, 8))
    for name in ("0.png", "1.png"):
        path = tmp_path / "val" / "cat" / name
        path.write_bytes(path.read_bytes()[:60] if name == "0.png" else b"not an image")
    expect(lambda: data.test[0], tmp_path / "val" / "cat" / "0.png", kind=lb.FileFormatError)
    expect(lambda: data.test[1], tmp_path / "val" / "cat" / "1.png", kind=lb.FileFormatError)
    (tmp_path / "val" / "cat" / "2.png").unlink()
    expect(lambda: data.test[2], tmp_path / "val" / "cat" / "2.png", "missing")


# -- segmentation ------------------------------------------------------------------------------------------------------


def write_cityscapes(root: Path, split: str, labels: Array, kind: str = "labelIds") -> Array:
    values = random_bytes(*labels.shape, 3)
    for number in range(4):
        name = f"ulm_{number:06}_000019"
        write_image(root / "leftImg8bit" / split / "ulm" / f"{name}_leftImg8bit.png", values)
        write_image(root / "gtFine" / split / "ulm" / f"{name}_gtFine_{kind}.png", labels)
    return values


def test_cityscapes_ids_become_the_nineteen_classes(tmp_path: Path) -> None:
    ids = np.arange(34, dtype=np.uint8).reshape(2, 17)
    values = write_cityscapes(tmp_path, "train", ids)
    train_ids = np.array([[*range(16), 255], [16, 17, 18, *[255] * 14]], np.uint8)
    write_cityscapes(tmp_path, "val", train_ids, "labelTrainIds")
    write_cityscapes(tmp_path, "test", np.zeros((2, 17), np.uint8))  # void, as in the published files
    data: Any = load(tmp_path, validation_share=0.25, resize=(2, 17))
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 4)
    assert (data.task, data.outputs, data.ignore_index, data.augment) == ("segmentation", 19, 255, Augment(0))
    assert data.likelihood().settings["ignore_index"] == 255
    x, y = data.train[0]
    assert np.array_equal(x, values.transpose(2, 0, 1))
    expected = np.full(34, 255)
    expected[[7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]] = range(19)
    assert np.array_equal(y.reshape(-1), expected)
    assert np.array_equal(data.test[0][1], train_ids)
    assert data.classes[13] == "car"
    assert load(tmp_path).input_shape == (3, 256, 512)


def test_a_labeled_test_split_is_used(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_cityscapes(tmp_path, split, np.full((4, 8), 7, np.uint8))
    data: Any = load(tmp_path, resize=(2, 4))
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 4, 4)
    x, y = data.test[0]
    assert x.shape == (3, 2, 4)
    assert y.shape == (2, 4)
    assert (y == 0).all()


def write_camvid(root: Path, split: str, labels: Array, ending: str = "png") -> Array:
    values = random_bytes(*labels.shape, 3)
    for number in range(4):
        write_image(root / split / f"{number}.{ending}", values)
        write_image(root / f"{split}annot" / f"{number}.png", labels)
    return values


def test_camvid_is_read_and_void_is_ignored(tmp_path: Path) -> None:
    labels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    values = write_camvid(tmp_path, "train", labels)
    write_camvid(tmp_path, "val", labels, "webp")
    write_camvid(tmp_path, "test", labels)
    data: Any = load(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 4, 4)
    assert (data.input_shape, data.outputs, len(data.classes)) == ((3, 3, 4), 11, 11)
    x, y = data.train[0]
    assert np.array_equal(x, values.transpose(2, 0, 1))
    assert np.array_equal(y, np.where(labels == 11, 255, labels))
    large: Any = load(tmp_path, resize=(6, 8))
    assert np.array_equal(large.train[0][1], np.where(labels == 11, 255, labels).repeat(2, 0).repeat(2, 1))


def test_invalid_label_maps_are_named(tmp_path: Path) -> None:
    labels = np.zeros((3, 4), np.uint8)
    write_camvid(tmp_path, "train", labels)
    path = tmp_path / "trainannot" / "2.png"
    data: Any = load(tmp_path, validation_share=0.01, seed=1)
    part, index = next((p, i) for p in (data.train, data.validation) for i in range(len(p)) if p.indices[i] == 2)
    for values, words, kind in [
        (labels + 12, "range", lb.FileFormatError),
        (random_bytes(3, 4, 3), "one byte", lb.FileFormatError),
        (labels[:2], "(2, 4)", lb.LeanBayesError),
    ]:
        write_image(path, values)
        expect(lambda: part[index], path, words, kind=kind)
    path.write_bytes(b"")
    expect(lambda: part[index], path, kind=lb.FileFormatError)
    write_image(path, labels)
    write_image(tmp_path / "train" / "2.png", random_bytes(5, 4, 3))
    expect(lambda: part[index], tmp_path / "train" / "2.png", "(5, 4)", "resize=")
    path.unlink()
    expect(lambda: load(tmp_path), tmp_path / "train" / "2.png", path)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("stretch", [False, True])
def test_images_are_read_in_the_shape_of_a_network(channels: int, stretch: bool, tmp_path: Path) -> None:
    values = np.zeros((8, 16, 3), dtype=np.uint8)
    values[:, :4] = values[:, 12:] = 255  # white edges, which are cropped unless the image is stretched
    Image.fromarray(values).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", (channels, 4, 4), stretch=stretch)
    assert image.shape == (channels, 4, 4)
    assert image.dtype == torch.uint8
    assert (image.max() > 200) == stretch
    expect(lambda: read_image(tmp_path / "b.png", (channels, 4, 4)), "no image", "b.png")
    expect(lambda: read_image(tmp_path / "a.png", (2, 4, 4)), "2 channels")


def test_16_bit_images_and_exif_orientation_are_supported(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)).save(tmp_path / "deep.png")
    assert 120 < read_image(tmp_path / "deep.png", (1, 8, 8)).float().mean() < 135
    photo = Image.fromarray(np.concatenate([np.zeros((4, 8)), np.full((4, 8), 255)]).astype(np.uint8))
    exif = photo.getexif()
    exif[0x0112] = 3  # upside down
    photo.save(tmp_path / "photo.png", exif=exif)
    assert read_image(tmp_path / "photo.png", (1, 8, 8))[0, 0, 0] == 255
    assert read_image(tmp_path / "photo.png", (1, 8, 8), stretch=True)[0, 0, 0] == 0  # as stored, like its label map


def test_the_detail_that_shrinking_loses(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    columns = np.indices((64, 64))[1]
    stripes = np.where(columns % 2, 200, 100).astype(np.uint8)  # averages to gray
    ramp = (columns * 4).astype(np.uint8)  # linear, so that nothing but its ends changes
    for values, least, most in ((stripes, 0.99, 1.01), (ramp, 0, 0.01), (np.full((64, 64), 7, np.uint8), 0, 0)):
        Image.fromarray(values).save(path)
        assert least <= detail_lost(path, (1, 8, 8)) <= most
        assert detail_lost(path, (1, 64, 64)) == detail_lost(path, (1, 100, 80)) == 0
    # An image that is wider than the network covers its height; stretched, it keeps the height and loses the stripes.
    Image.fromarray(stripes[:8]).save(path)
    assert detail_lost(path, (1, 8, 8)) == 0
    assert detail_lost(path, (1, 8, 8), stretch=True) == pytest.approx(1, abs=0.01)
    # The mean of 8×8 pixels of white noise has 1/64 of its variance; a bilinear filter is a little wider.
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    assert 1 - 1 / 64 < detail_lost(path, (3, 32, 32)) < 1
