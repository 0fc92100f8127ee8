"""Sets of small images that fit in memory: one record per data set, with its reader and its usual settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from leanbayes.data.base import ArrayDataset, Data, held_out
from leanbayes.data.cifar import CIFAR10_CLASSES, cifar100_classes, read_cifar10, read_cifar100
from leanbayes.data.idx import FASHION_CLASSES, read_fashion_mnist, read_mnist
from leanbayes.data.letters import LETTERS, read_letters
from leanbayes.data.matlab import read_matlab
from leanbayes.data.reading import Array, Root, check_images, damaged, find_file, needed
from leanbayes.data.transforms import Augment, Normalize
from leanbayes.errors import LeanBayesError

SPLITS = ("train", "test")
_DIGITS = tuple("0123456789")


def read_svhn(split: str, root: Root) -> tuple[Array, Array]:
    """Read a split of SVHN's cropped digits; the files label the digit 0 with 10."""
    path = find_file("svhn", root, [f"{folder}{split}_32x32.mat" for folder in ("", "svhn/", "SVHN/")])
    content = read_matlab(path, ("X", "y"))
    x, y = content["X"], content["y"].reshape(-1).astype(np.int64)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise damaged(path, "X should be an array of bytes of shape (32, 32, 3, images)")
    x, y = np.ascontiguousarray(x.transpose(3, 2, 0, 1)), np.where(y == 10, 0, y)
    check_images(path, x, y, 10)
    return x, y


def read_digits(split: str, root: Root) -> tuple[Array, Array]:
    """Return a split of scikit-learn's handwritten digits; a fixed third is the test set."""
    digits = needed("sklearn.datasets", "scikit-learn").load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    split_arrays = needed("sklearn.model_selection", "scikit-learn").train_test_split
    parts = split_arrays(images, digits.target, test_size=1 / 3, stratify=digits.target, random_state=0)
    return (parts[0], parts[2]) if split == "train" else (parts[1], parts[3])


@dataclass(frozen=True)
class ImageSet:
    """All that is specific to one set of small images.

    Attributes:
        read: reader of one split, `train` or `test`.
        classes: names of the classes, or a function that reads them.
        normalize: mean and std of the training images.
        preset: settings of a training run that neither a flag nor a config file gives.
        augment: augmentation of the training images.
        outputs: number of classes.
        ood: data sets that an evaluation uses as out-of-distribution data.
    """

    read: Callable[[str, Root], tuple[Array, Array]]
    classes: tuple[str, ...] | Callable[[Root], tuple[str, ...]]
    normalize: Normalize
    preset: Mapping[str, Any]
    augment: Augment | None = None
    outputs: int = 10
    ood: tuple[str, ...] = ()


_TINY_IMAGES = {"model": "small-cnn", "epochs": 40, "batch_size": 64, "lr": 2e-3}
_GRAY_IMAGES = {"model": "lenet-5", "epochs": 20}
COLOR_IMAGES = {
    "model": "resnet-18",
    "epochs": 80,
    "batch_size": 256,
    "optimizer": "sgd",
    "lr": 0.1,
    "weight_decay": 5e-4,
}

IMAGE_SETS = {
    "digits": ImageSet(
        read=read_digits,
        classes=_DIGITS,
        normalize=Normalize((0.3054,), (0.3758,)),
        preset=_TINY_IMAGES,
        ood=("letters",),
    ),
    "letters": ImageSet(
        read=read_letters,
        classes=LETTERS,
        normalize=Normalize((0.3054,), (0.3758,)),  # as for the digits
        preset=_TINY_IMAGES,
        outputs=len(LETTERS),
    ),
    "mnist": ImageSet(
        read=read_mnist,
        classes=_DIGITS,
        normalize=Normalize((0.1307,), (0.3081,)),
        preset=_GRAY_IMAGES,
        ood=("fashion-mnist",),
    ),
    "fashion-mnist": ImageSet(
        read=read_fashion_mnist,
        classes=FASHION_CLASSES,
        normalize=Normalize((0.2860,), (0.3530,)),
        preset=_GRAY_IMAGES,
        ood=("mnist",),
    ),
    "cifar10": ImageSet(
        read=read_cifar10,
        classes=CIFAR10_CLASSES,
        normalize=Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        preset=COLOR_IMAGES,
        augment=Augment(4),
        ood=("svhn", "cifar100"),
    ),
    "cifar100": ImageSet(
        read=read_cifar100,
        classes=cifar100_classes,
        normalize=Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        preset=COLOR_IMAGES,
        augment=Augment(4),
        outputs=100,
        ood=("svhn", "cifar10"),
    ),
    "svhn": ImageSet(
        read=read_svhn,
        classes=_DIGITS,
        normalize=Normalize((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        preset=COLOR_IMAGES,
        augment=Augment(4, flip=False),
        ood=("cifar10", "cifar100"),
    ),
}


def read_split(name: str, split: str, root: Root) -> ArrayDataset:
    """Read one split, `train` or `test`, of a set of small images."""
    if split not in SPLITS:
        raise LeanBayesError(f"There is no split {split!r}: use train or test.")
    return ArrayDataset(*IMAGE_SETS[name].read(split, root))


def load_images(name: str, root: Root, validation_share: float, seed: int) -> Data:
    """Load a set of small images; a share of its training images is held out for validation."""
    record = IMAGE_SETS[name]
    whole, test = read_split(name, "train", root), read_split(name, "test", root)
    train, validation = (
        ArrayDataset(whole.x[rows], whole.y[rows]) for rows in held_out(len(whole), validation_share, seed)
    )
    return Data(
        name=name,
        task="classification",
        train=train,
        validation=validation,
        test=test,
        input_shape=tuple(whole.x.shape[1:]),
        outputs=record.outputs,
        classes=record.classes(root) if callable(record.classes) else record.classes,
        normalize=record.normalize,
        augment=record.augment,
    )
