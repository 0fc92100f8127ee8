"""Images with a label per pixel, in the folder layouts of Cityscapes and CamVid."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanbayes.data.base import Data, arrange
from leanbayes.data.image_files import (
    IMAGENET_NORMALIZE,
    WORKERS,
    Size,
    as_image,
    list_image_files,
    stretched,
    stretched_labels,
)
from leanbayes.data.reading import Array, damaged
from leanbayes.data.transforms import Augment
from leanbayes.errors import LeanBayesError

PRESET: Mapping[str, Any] = {
    "model": "unet",
    "epochs": 60,
    "batch_size": 8,
    "lr": 3e-3,
    "workers": WORKERS,
}
VOID = 255  # label of pixels that do not count
_INVALID = 254
_CAMVID_VOID = 11

CAMVID_CLASSES = tuple("sky building pole road pavement tree sign fence car pedestrian bicyclist".split())
CITYSCAPES_CLASSES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # of the 19 classes


def _label_table(labels: Mapping[int, int], otherwise: int) -> Array:
    table = np.full(256, otherwise, np.uint8)
    table[VOID] = VOID
    for stored, label in labels.items():
        table[stored] = label
    return table


_CAMVID = _label_table({**{i: i for i in range(11)}, _CAMVID_VOID: VOID}, _INVALID)
_TRAIN_IDS = _label_table({i: i for i in range(19)}, _INVALID)
_LABEL_IDS = _label_table({stored: label for label, stored in enumerate(_CITYSCAPES_IDS)}, VOID)


class Pair(NamedTuple):
    """The files of an image and of its label map, and the class of each stored label."""

    image: str
    labels: str
    table: Array


class LabeledImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and label maps, read when they are indexed, as uint8 and int64; ignored pixels have the label VOID."""

    def __init__(self, pairs: list[Pair], size: Size | None) -> None:
        self.pairs = pairs
        self.resize = size
        self.size: Size = size or stretched(pairs[0].image, None).shape[:2]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, path, table = self.pairs[index]
        values = stretched(image, self.resize)
        labels = table[stretched_labels(path, self.resize)]
        if (labels == _INVALID).any():
            raise damaged(Path(path), "it has labels out of range")
        for file, shape in ((image, values.shape[:2]), (path, labels.shape)):
            if shape != self.size:
                raise LeanBayesError(f"{file} has the size {shape}, but others have {self.size}: pass resize=.")
        return as_image(values), torch.from_numpy(labels).long()


def _cityscapes_pairs(path: Path, split: str) -> list[Pair]:
    pairs = []
    for image in list_image_files(path / "leftImg8bit" / split):
        if not image.endswith("_leftImg8bit.png"):
            continue
        city, name = Path(image).parent.name, Path(image).name.removesuffix("_leftImg8bit.png")
        stem = path / "gtFine" / split / city / f"{name}_gtFine"
        train_ids, label_ids = Path(f"{stem}_labelTrainIds.png"), Path(f"{stem}_labelIds.png")
        chosen = (train_ids, _TRAIN_IDS) if train_ids.exists() else (label_ids, _LABEL_IDS)
        pairs.append(Pair(image, str(chosen[0]), chosen[1]))
    return pairs


def _camvid_pairs(path: Path, split: str) -> list[Pair]:
    folder = path / f"{split}annot"
    return [Pair(name, str(folder / f"{Path(name).stem}.png"), _CAMVID) for name in list_image_files(path / split)]


def load_segmentation(path: Path, size: Size | None, validation_share: float, seed: int) -> Data:
    """Load a folder with the layout of Cityscapes (leftImg8bit/) or of CamVid (trainannot/)."""
    cityscapes = (path / "leftImg8bit").is_dir()
    size = size or ((256, 512) if cityscapes else None)
    classes = CITYSCAPES_CLASSES if cityscapes else CAMVID_CLASSES
    splits = {}
    for split in ("train", "val", "test"):
        pairs = (_cityscapes_pairs if cityscapes else _camvid_pairs)(path, split)
        if split == "test" and not _any_labels(pairs):
            continue
        for pair in pairs:
            if not Path(pair.labels).is_file():
                raise LeanBayesError(f"{pair.image} has no labels: add the label map {pair.labels}.")
        if pairs:
            splits[split] = LabeledImages(pairs, size)
    if "train" not in splits:
        raise LeanBayesError(f"There are no training images in {path}: put them there, or pass another path.")
    whole = splits["train"]
    train, validation, test = arrange(whole, splits.get("val"), splits.get("test"), validation_share, seed)
    return Data(
        name=path.resolve().name,
        task="segmentation",
        train=train,
        validation=validation,
        test=test,
        input_shape=(3, *whole.size),
        outputs=len(classes),
        classes=classes,
        normalize=IMAGENET_NORMALIZE,
        augment=Augment(crop=0),
        ignore_index=VOID,
    )


def _any_labels(pairs: list[Pair]) -> bool:
    """Return whether one of the first existing label maps has a pixel that is not void."""
    existing = [pair for pair in pairs if Path(pair.labels).is_file()][:10]
    return any((pair.table[stretched_labels(pair.labels, None)] != VOID).any() for pair in existing)
