"""Readers of the Python batches of CIFAR-10 and CIFAR-100."""

import numpy as np

from leanbayes.data.reading import Array, Root, check_images, damaged, data_root, find_file
from leanbayes.data.unpickling import read_arrays

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_cifar10(split: str, root: Root) -> tuple[Array, Array]:
    """Read a split of CIFAR-10."""
    names = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    parts = [_read_batch("cifar10", f"cifar-10-batches-py/{name}", root, "labels", 10) for name in names]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def read_cifar100(split: str, root: Root) -> tuple[Array, Array]:
    """Read a split of CIFAR-100 with its 100 fine labels."""
    return _read_batch("cifar100", f"cifar-100-python/{split}", root, "fine_labels", 100)


def cifar100_classes(root: Root) -> tuple[str, ...]:
    """Return the names of the 100 classes, or () if their file is missing."""
    path = (data_root(root) or find_file("cifar100", root, ["cifar-100-python"])) / "cifar-100-python" / "meta"
    if not path.is_file():
        return ()
    names = read_arrays(path).get("fine_label_names")
    texts = isinstance(names, list) and all(isinstance(name, (str, bytes)) for name in names)
    if not isinstance(names, list) or not texts or len(names) != 100:
        raise damaged(path, "it should have 100 fine_label_names")
    return tuple(name.decode("latin1") if isinstance(name, bytes) else name for name in names)


def _read_batch(name: str, file: str, root: Root, labels: str, classes: int) -> tuple[Array, Array]:
    path = find_file(name, root, [file])
    content = read_arrays(path)
    x, y = content.get("data"), content.get(labels)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072:
        raise damaged(path, "its data should be an array of bytes of shape (images, 3072)")
    if not isinstance(y, (list, np.ndarray)):
        raise damaged(path, f"it has no list of {labels}")
    if isinstance(y, list) and not all(type(label) is int for label in y):  # NumPy would copy nested lists and texts
        raise damaged(path, f"labels should be integers from 0 to {classes - 1}")
    numbers = np.asarray(y)
    check_images(path, x, numbers, classes)
    return x.reshape(-1, 3, 32, 32), numbers
