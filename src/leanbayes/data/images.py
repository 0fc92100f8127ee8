"""Sets of small images that fit in memory, and what is usual for each of them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from leanbayes.data.base import ArrayDataset, Data, held_out
from leanbayes.data.cifar import CIFAR10_CLASSES, cifar100_classes, read_cifar10, read_cifar100
from leanbayes.data.files import Array, Root, check_images, damaged, find, needed
from leanbayes.data.idx import FASHION_CLASSES, read_fashion_mnist, read_mnist
from leanbayes.data.letters import LETTERS, read_letters
from leanbayes.data.transforms import Augment, Normalise
from leanbayes.errors import LeanBayesError

SPLITS = ("train", "test")
_DIGITS = tuple("0123456789")


def read_svhn(split: str, root: Root) -> tuple[Array, Array]:
    """Read a split of SVHN's cropped digits, where the label 10 stands for the digit 0."""
    path = find("svhn", root, [f"{folder}{split}_32x32.mat" for folder in ("", "svhn/", "SVHN/")])
    loadmat = needed("scipy.io", "scipy").loadmat
    try:
        content = loadmat(path)
        x, y = content["X"], content["y"].reshape(-1).astype(np.int64)
    except Exception as error:  # a damaged file makes the parser fail in every way
        raise damaged(path, error) from None
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise damaged(path, "X should be an array of bytes of shape (32, 32, 3, images)")
    x, y = np.ascontiguousarray(x.transpose(3, 2, 0, 1)), np.where(y == 10, 0, y)
    check_images(path, x, y, 10)
    return x, y


def read_digits(split: str, root: Root) -> tuple[Array, Array]:
    """Take a split of scikit-learn's handwritten digits; one third is for testing, the same in every run."""
    digits = needed("sklearn.datasets", "scikit-learn").load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    cut = needed("sklearn.model_selection", "scikit-learn").train_test_split
    parts = cut(images, digits.target, test_size=1 / 3, stratify=digits.target, random_state=0)
    return (parts[0], parts[2]) if split == "train" else (parts[1], parts[3])


@dataclass(frozen=True)
class ImageSet:
    """How a set of small images is read, and what is usual for it."""

    read: Callable[[str, Root], tuple[Array, Array]]
    classes: tuple[str, ...] | Callable[[Root], tuple[str, ...]]
    normalise: Normalise
    augment: Augment | None = None
    outputs: int = 10


IMAGE_SETS = {
    "digits": ImageSet(read_digits, _DIGITS, Normalise((0.3054,), (0.3758,))),
    "letters": ImageSet(read_letters, LETTERS, Normalise((0.3054,), (0.3758,)), outputs=len(LETTERS)),  # as the digits
    "mnist": ImageSet(read_mnist, _DIGITS, Normalise((0.1307,), (0.3081,))),
    "fashion-mnist": ImageSet(read_fashion_mnist, FASHION_CLASSES, Normalise((0.2860,), (0.3530,))),
    "cifar10": ImageSet(
        read_cifar10, CIFAR10_CLASSES, Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), Augment(4)
    ),
    "cifar100": ImageSet(
        read_cifar100, cifar100_classes, Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), Augment(4), 100
    ),
    "svhn": ImageSet(
        read_svhn, _DIGITS, Normalise((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)), Augment(4, flip=False)
    ),
}


def read_split(name: str, split: str, root: Root) -> ArrayDataset:
    """Read one split, `train` or `test`, of a set of small images."""
    if split not in SPLITS:
        raise LeanBayesError(f"There is no split {split!r}: choose train or test.")
    return ArrayDataset(*IMAGE_SETS[name].read(split, root))


def load_images(name: str, root: Root, validation_share: float, seed: int) -> Data:
    """Load a set of small images; a share of its training images is for validation."""
    known = IMAGE_SETS[name]
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
        outputs=known.outputs,
        classes=known.classes(root) if callable(known.classes) else known.classes,
        normalise=known.normalise,
        augment=known.augment,
    )
