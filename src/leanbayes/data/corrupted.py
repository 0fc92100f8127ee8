"""CIFAR-10-C and CIFAR-100-C as published: corrupted test images at five severities (Hendrycks & Dietterich 2019).

A file has the test images at severity 1, then at severity 2, and so on; labels.npy goes with all files of its folder.
"""

from pathlib import Path

import numpy as np

from leanbayes.data.base import ArrayDataset
from leanbayes.data.files import Array, Root, check_images, damaged, data_root, find
from leanbayes.errors import LeanBayesError, did_you_mean

_FOLDERS = {"cifar10": ("CIFAR-10-C", 10), "cifar100": ("CIFAR-100-C", 100)}  # and how many classes
_LEVELS = 5
_PUBLISHED = """gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur snow frost fog
brightness contrast elastic_transform pixelate jpeg_compression speckle_noise gaussian_blur spatter saturate""".split()


def read_corrupted(name: str, corruption: str, severity: int, root: Root = None) -> ArrayDataset:
    """Read the test images of cifar10 or cifar100 under one corruption at a severity from 1 to 5.

    Files are looked for as CIFAR-10-C/gaussian_noise.npy under `root`, or where LEANBAYES_DATA says; only the images of
    that severity are read.
    """
    folder, classes = _folder(name)
    if severity not in range(1, _LEVELS + 1):
        raise LeanBayesError(f"There is no severity {severity!r}: choose 1 (mild) to 5 (strong).")
    there = corruptions_on_disk(name, root)
    known = [*there, *(other for other in _PUBLISHED if other not in there)]
    if corruption not in known:
        hint = did_you_mean(corruption, known, f"choose one of {', '.join(known)}.")
        raise LeanBayesError(f"There is no corruption {corruption!r}: {hint}")
    path, label_path = (find(folder, root, [f"{folder}/{file}.npy"]) for file in (corruption, "labels"))
    images, labels = _open(path), _open(label_path)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3):
        raise damaged(path, f"{images.dtype} of shape {images.shape} should be bytes of shape (images, 32, 32, 3)")
    if not len(images) or len(images) % _LEVELS:
        raise damaged(path, f"{len(images)} images are not as many at each of {_LEVELS} severities")
    check_images(label_path, images, labels, classes)
    count = len(images) // _LEVELS
    part = slice((severity - 1) * count, severity * count)
    return ArrayDataset(np.array(images[part].transpose(0, 3, 1, 2), order="C"), np.array(labels[part], np.int64))


def corruptions_on_disk(name: str, root: Root = None) -> list[str]:
    """List the corruptions of cifar10 or cifar100 whose files are there, in the published order, then any others."""
    folder, _ = _folder(name)
    base = data_root(root)
    there = {path.stem for path in (base / folder).glob("*.npy")} - {"labels"} if base else set()
    return [name for name in _PUBLISHED if name in there] + sorted(there.difference(_PUBLISHED))


def _folder(name: str) -> tuple[str, int]:
    plain = name.lower().replace("-", "").replace("_", "")
    if plain not in _FOLDERS:
        hint = did_you_mean(plain, _FOLDERS, f"choose {' or '.join(_FOLDERS)}.")
        raise LeanBayesError(f"There are no files of corrupted {name!r}: {hint}")
    return _FOLDERS[plain]


def _open(path: Path) -> Array:
    """Open an array without reading all of it, and never a pickle."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged file makes the parser fail in every way
        raise damaged(path, error) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise damaged(path, "it is an archive of arrays")
    return array
