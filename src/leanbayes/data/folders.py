"""Folders of images with one subfolder per class, like ImageNet: PATH/train/CLASS/*.jpg, and so for val/ and test/."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanbayes.data.base import Data, arrange
from leanbayes.data.image_files import IMAGENET_NORMALIZE, WORKERS, Size, as_image, covering, list_image_files
from leanbayes.data.transforms import Augment
from leanbayes.errors import LeanBayesError

PRESET: Mapping[str, Any] = {
    "model": "resnet-18",
    "epochs": 90,
    "batch_size": 256,
    "optimizer": "sgd",
    "lr": 0.1,
    "workers": WORKERS,
}


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images of PATH/CLASS/, read when they are indexed, as uint8 of one size; `targets` holds the labels."""

    def __init__(self, path: Path, classes: tuple[str, ...], size: Size) -> None:
        self.classes, self.size = classes, size
        self.files: list[str] = []
        self.targets: list[int] = []
        for label, name in enumerate(classes):
            files = list_image_files(path / name)
            self.files += files
            self.targets += [label] * len(files)
        if not self.files:
            raise LeanBayesError(f"There are no images in the subfolders of {path}: put them into {path}/CLASS/.")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return as_image(covering(self.files[index], self.size)), torch.tensor(self.targets[index])


def _class_names(path: Path) -> tuple[str, ...]:
    return tuple(sorted(folder.name for folder in path.iterdir() if folder.is_dir() and folder.name[0] != "."))


def load_folder(path: Path, size: Size | None, validation_share: float, seed: int) -> Data:
    """Load a folder of images; a `test/` folder without class folders is unlabeled and left out."""
    size = size or (224, 224)
    classes = _class_names(path / "train")
    if not classes:
        raise LeanBayesError(f"{path}/train has no class folders: put the images into {path}/train/CLASS/.")
    splits: dict[str, ImageFolder] = {}
    for split in ("train", "val", "test"):
        folder = path / split
        if not folder.is_dir() or (split == "test" and not _class_names(folder)):
            continue
        unknown = sorted(set(_class_names(folder)) - set(classes))
        if unknown:
            raise LeanBayesError(
                f"{folder} has classes that {path}/train does not have ({', '.join(unknown[:5])}): use the same ones."
            )
        splits[split] = ImageFolder(folder, classes, size)
    train, validation, test = arrange(splits["train"], splits.get("val"), splits.get("test"), validation_share, seed)
    return Data(
        name=path.resolve().name,
        task="classification",
        train=train,
        validation=validation,
        test=test,
        input_shape=(3, *size),
        outputs=len(classes),
        classes=classes,
        normalize=IMAGENET_NORMALIZE,
        augment=Augment(crop=min(size) // 8),
    )
