"""Pictures in one folder a class, as ImageNet has them: PATH/train/CLASS/*.jpg, with val/ and test/ alike."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from leanbayes.data.base import Data, arrange
from leanbayes.data.pictures import IMAGENET_NORMALISE, Size, as_image, covering, list_pictures
from leanbayes.data.transforms import Augment
from leanbayes.errors import LeanBayesError


class PictureFolder(Dataset[tuple[Tensor, Tensor]]):
    """Pictures of PATH/CLASS/, read when asked for, as uint8 images of one size; `targets` holds the labels."""

    def __init__(self, path: Path, classes: tuple[str, ...], size: Size) -> None:
        self.classes, self.size = classes, size
        self.files: list[str] = []
        self.targets: list[int] = []
        for label, name in enumerate(classes):
            files = list_pictures(path / name)
            self.files += files
            self.targets += [label] * len(files)
        if not self.files:
            raise LeanBayesError(f"There are no pictures in the folders of {path}: put them into {path}/CLASS/.")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return as_image(covering(self.files[index], self.size)), torch.tensor(self.targets[index])


def _class_names(path: Path) -> tuple[str, ...]:
    return tuple(sorted(folder.name for folder in path.iterdir() if folder.is_dir() and folder.name[0] != "."))


def load_folder(path: Path, size: Size | None, validation_share: float, seed: int) -> Data:
    """Load a folder of pictures; `test/` without class folders is taken for unlabelled, and left out."""
    size = size or (224, 224)
    classes = _class_names(path / "train")
    if not classes:
        raise LeanBayesError(f"{path}/train has no folders of classes: put the pictures into {path}/train/CLASS/.")
    splits: dict[str, PictureFolder] = {}
    for split in ("train", "val", "test"):
        folder = path / split
        if not folder.is_dir() or (split == "test" and not _class_names(folder)):
            continue
        unknown = sorted(set(_class_names(folder)) - set(classes))
        if unknown:
            raise LeanBayesError(
                f"{folder} has classes that {path}/train has not ({', '.join(unknown[:5])}): give both the same."
            )
        splits[split] = PictureFolder(folder, classes, size)
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
        normalise=IMAGENET_NORMALISE,
        augment=Augment(crop=min(size) // 8),
    )
