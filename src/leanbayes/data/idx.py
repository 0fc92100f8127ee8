"""Readers of idx files: MNIST and Fashion-MNIST."""

import math
import struct
from pathlib import Path

from leanbayes.data.reading import Array, Root, check_images, damaged, data_root, find_file, opened, read_exactly

FASHION_CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def read_mnist(split: str, root: Root) -> tuple[Array, Array]:
    """Read a split of MNIST."""
    own = () if _is_fashion(root) else (".",)
    return _read_pair("mnist", split, root, ("MNIST/raw", "MNIST", "mnist", *own))


def read_fashion_mnist(split: str, root: Root) -> tuple[Array, Array]:
    """Read a split of Fashion-MNIST; its files have the same names as those of MNIST, so they need their own folder."""
    own = (".",) if _is_fashion(root) else ()
    return _read_pair("fashion-mnist", split, root, ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", *own))


def _is_fashion(root: Root) -> bool:
    folder = data_root(root)
    return folder is not None and any("fashion" in part.lower() for part in folder.absolute().parts[-2:])


def _read_pair(name: str, split: str, root: Root, folders: tuple[str, ...]) -> tuple[Array, Array]:
    prefix = "train" if split == "train" else "t10k"
    paths = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        files = [f"{prefix}-{kind}{end}" for end in (".gz", "")]
        paths.append(find_file(name, root, (f"{folder}/{file}" for folder in folders for file in files)))
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    check_images(paths[1], images, labels, 10)
    return images[:, None], labels


def read_idx(path: Path, dimensions: int) -> Array:
    """Read an idx file of bytes: two zeros, the type 8, the number of dimensions, the sizes and the values.

    Memory is allocated for the size in the header, after it was compared with the size of the file.
    """
    with opened(path) as (file, most):
        header = file.read(4 + 4 * dimensions)
        if header[:4] != bytes([0, 0, 8, dimensions]) or len(header) < 4 + 4 * dimensions:
            raise damaged(
                path, f"an idx file of {dimensions} dimensions starts with 0, 0, 8, {dimensions} and its sizes"
            )
        sizes = struct.unpack(f">{dimensions}I", header[4:])
        announced = math.prod(sizes)
        if announced > most - len(header):
            raise damaged(path, f"its header announces {announced} bytes, but at most {most - len(header)} follow")
        values, longer = read_exactly(file, announced)
    if longer or len(values) != announced:
        follow = f"more than {announced}" if longer else len(values)
        raise damaged(path, f"its header announces {announced} bytes, but {follow} follow")
    return values.reshape(sizes)
