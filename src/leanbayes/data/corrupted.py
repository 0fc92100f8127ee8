"""Readers of CIFAR-10-C and CIFAR-100-C: corrupted test images at five severities (Hendrycks & Dietterich 2019).

A file has all test images at severity 1, then at severity 2, and so on. The labels of all files are in labels.npy.
"""

from pathlib import Path

import numpy as np

from leanbayes.core.arguments import checked
from leanbayes.core.names import find, lookup, suggestion
from leanbayes.data.base import ArrayDataset
from leanbayes.data.reading import Array, Root, check_images, damaged, data_root, find_file
from leanbayes.errors import LeanBayesError

_FOLDERS = {"cifar10": ("CIFAR-10-C", 10), "cifar100": ("CIFAR-100-C", 100)}  # and the number of classes
_LEVELS = 5
_PUBLISHED = """gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog
brightness contrast elastic_transform pixelate jpeg_compression speckle_noise gaussian_blur spatter saturate""".split()


@checked("severity")
def read_corrupted(name: str, corruption: str, severity: int, root: Root = None) -> ArrayDataset:
    """Read the test images of CIFAR-10-C or CIFAR-100-C for one corruption and severity.

    The files, such as CIFAR-10-C/gaussian_noise.npy, are those of Hendrycks and Dietterich (2019). Only the images of
    the given severity are read.

    Args:
        name: "cifar10" or "cifar100".
        corruption: name of the corruption, which is that of its file.
        severity: 1 (mild) to 5 (strong).
        root: folder of all data sets. None means the environment variable LEANBAYES_DATA.

    Returns:
        The corrupted test images and their labels.

    Raises:
        LeanBayesError: The name, the corruption or the severity is unknown, or a file is missing.
        FileFormatError: A file is damaged.

    Example:
        >>> from leanbayes.data import read_corrupted
        >>> read_corrupted("cifar10", "fog", severity=3)  # doctest: +SKIP
        ArrayDataset(10000 examples, x: uint8 (3, 32, 32), y: int64 ())
    """
    folder, classes = _folder(name)
    if severity not in range(1, _LEVELS + 1):
        raise LeanBayesError(f"There is no severity {severity!r}: use 1 (mild) to 5 (strong).")
    found = corruptions_on_disk(name, root)
    known = [*found, *(other for other in _PUBLISHED if other not in found)]
    if corruption not in known:
        corruption = lookup("corruption", corruption, known)
    path, label_path = (find_file(folder, root, [f"{folder}/{file}.npy"]) for file in (corruption, "labels"))
    images, labels = _open(path), _open(label_path)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3):
        raise damaged(path, f"{images.dtype} of shape {images.shape} should be bytes of shape (images, 32, 32, 3)")
    if not len(images) or len(images) % _LEVELS:
        raise damaged(path, f"{len(images)} images cannot be split into {_LEVELS} severities")
    check_images(label_path, images, labels, classes)
    count = len(images) // _LEVELS
    part = slice((severity - 1) * count, severity * count)
    return ArrayDataset(np.array(images[part].transpose(0, 3, 1, 2), order="C"), np.array(labels[part], np.int64))


@checked()
def corruptions_on_disk(name: str, root: Root = None) -> list[str]:
    """List the corruptions of CIFAR-10-C or CIFAR-100-C whose files exist.

    Args:
        name: "cifar10" or "cifar100".
        root: folder of all data sets. None means the environment variable LEANBAYES_DATA.

    Returns:
        Names for `read_corrupted`: published corruptions in the order of the paper, then any others.

    Raises:
        LeanBayesError: There are no such files for this data set.

    Example:
        >>> from leanbayes.data import corruptions_on_disk
        >>> corruptions_on_disk("cifar10")  # doctest: +SKIP
        ['gaussian_noise', 'fog', 'jpeg_compression']
    """
    folder, _ = _folder(name)
    base = data_root(root)
    found = {path.stem for path in (base / folder).glob("*.npy")} - {"labels"} if base else set()
    return [name for name in _PUBLISHED if name in found] + sorted(found.difference(_PUBLISHED))


def _folder(name: str) -> tuple[str, int]:
    known = find(name, _FOLDERS)
    if known is None:
        hint = suggestion(name, _FOLDERS, f"use {' or '.join(_FOLDERS)}.")
        raise LeanBayesError(f"There are no corrupted images of {name!r}: {hint}")
    return _FOLDERS[known]


def _open(path: Path) -> Array:
    """Open an array without reading all of it; refuse pickles."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged file can make the parser raise anything
        raise damaged(path, error) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise damaged(path, "it is an archive of arrays")
    return array
