"""Load data sets by name or path, and look up what is known about them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanbayes.core.arguments import checked
from leanbayes.core.names import find, lookup, suggestion
from leanbayes.data import folders, segmentation, tabular
from leanbayes.data.base import ArrayDataset, Data, Task
from leanbayes.data.folders import load_folder
from leanbayes.data.image_files import Size
from leanbayes.data.images import COLOR_IMAGES, IMAGE_SETS, load_images, read_split
from leanbayes.data.reading import Root, data_root
from leanbayes.data.segmentation import load_segmentation
from leanbayes.data.tabular import TABLE_ENDINGS, UCI_FILES, load_gap, load_table, load_toy, load_uci
from leanbayes.errors import LeanBayesError
from leanbayes.model.defaults import defaults, defaults_of
from leanbayes.model.method import Method

_MADE = {"toy": load_toy, "gap": load_gap}
NAMES = tuple(sorted([*IMAGE_SETS, *UCI_FILES, *_MADE]))


@checked()
def load(
    name: str | Path,
    root: Root = None,
    *,
    validation_share: float = 0.1,
    seed: int = 0,
    resize: Size | None = None,
) -> Data:
    """Load a data set by name or path.

    Files are read in their published formats; nothing is downloaded.

    Args:
        name: one of `NAMES` (case, hyphens and underscores do not matter), `uci:NAME`, `csv:PATH`, or the path of a
            table or of a folder of images.
        root: folder of all data sets. None means the environment variable LEANBAYES_DATA.
        validation_share: share of the training examples that is held out for validation.
        seed: seed of that split. Test sets do not depend on it.
        resize: height and width of the images of a folder. None means the default of its kind.

    Returns:
        The three splits, with the task and the preprocessing.

    Raises:
        LeanBayesError: The name is unknown, a file is missing, or a setting is invalid.
        FileFormatError: A file is damaged.

    Example:
        >>> from leanbayes.data import load
        >>> load("toy")
        Data('toy', 'regression', train=810, validation=90, test=100, input_shape=(1,), outputs=1)
    """
    text = str(name)
    known = find(text, NAMES)
    kind, _, rest = text.partition(":")
    folder = None if known or kind in ("uci", "csv") else _existing(text, root)
    if folder is not None and folder.is_dir():
        return _load_directory(folder, resize, validation_share, seed)
    if resize is not None:
        raise LeanBayesError(f"resize is for folders of images, but {text} is not one: leave it out.")
    if known in IMAGE_SETS:
        return load_images(known, root, validation_share, seed)
    if known in _MADE:
        return _MADE[known](validation_share, seed)
    if known or kind == "uci":
        return load_uci(known or find(rest, NAMES) or rest, root, validation_share, seed)
    return load_table(_table(rest if kind == "csv" else text, root, kind == "csv"), validation_share, seed)


@checked()
def task_of(name: str | Path, root: Root = None) -> Task:
    """Return the kind of task of a data set without loading it.

    Args:
        name: name or path of a data set, as for `load`.
        root: folder of all data sets. None means the environment variable LEANBAYES_DATA.

    Returns:
        "classification", "segmentation" or "regression".

    Example:
        >>> from leanbayes.data import task_of
        >>> task_of("cifar10"), task_of("uci:yacht")
        ('classification', 'regression')
    """
    text = str(name)
    known = find(text, NAMES)
    if known in IMAGE_SETS:
        return "classification"
    folder = None if known or text.startswith(("uci:", "csv:")) else _existing(text, root)
    if folder is None or not folder.is_dir():
        return "regression"
    return "segmentation" if _has_label_maps(folder) else "classification"


@checked()
def preset(name: str | Path, root: Root = None, method: Method | None = None) -> dict[str, Any]:
    """Return the training settings of a data set that apply unless a flag or a config file changes them.

    Small images have their own network, epochs and learning rate, and other data sets those of their kind of task. The
    temperature is that of `lb.fit`: the default of the method for the kind of task.

    Args:
        name: name or path of a data set, as for `load`.
        root: folder of all data sets. None means the environment variable LEANBAYES_DATA.
        method: the method, whose engine is not auto. ivon has its own optimizer and learning rate. None means one with
            the engine backprop.

    Returns:
        Values of `model` and of some settings of `Recipe`, by name.

    Example:
        >>> from leanbayes.data import preset
        >>> preset("toy")["model"]
        'mlp'
    """
    settings = dict(_preset(name, root))
    classes = task_of(name, root) != "regression"
    known = defaults("backprop", classes) if method is None else defaults_of(method, classes)
    settings["temperature"] = known.temperature
    if method is not None and method.engine == "ivon":
        settings.pop("optimizer", None)
        settings["lr"] = known.lr
    return settings


@checked()
def has_color_classes(name: str | Path, root: Root = None) -> bool:
    """Return whether the task of a data set is to classify color images, without loading it.

    Args:
        name: name or path of a data set, as for `load`.
        root: folder of all data sets. None means the environment variable LEANBAYES_DATA.

    Example:
        >>> from leanbayes.data import has_color_classes
        >>> has_color_classes("cifar10")
        True
    """
    known = find(name, NAMES)
    if known in IMAGE_SETS:
        return IMAGE_SETS[known].preset is COLOR_IMAGES
    return task_of(name, root) == "classification"  # the images of a folder are read as RGB


def _preset(name: str | Path, root: Root) -> Mapping[str, Any]:
    known = find(name, NAMES)
    if known in IMAGE_SETS:
        return IMAGE_SETS[known].preset
    kinds = {"regression": tabular.PRESET, "segmentation": segmentation.PRESET, "classification": folders.PRESET}
    return kinds[task_of(name, root)]


@checked()
def ood_partners(name: str) -> tuple[str, ...]:
    """Return the data sets that an evaluation uses as out-of-distribution data.

    Args:
        name: name of a loaded data set, `Data.name`.

    Returns:
        Names of data sets for `read_images`. Data sets that are not small images have none.

    Example:
        >>> from leanbayes.data import ood_partners
        >>> ood_partners("mnist")
        ('fashion-mnist',)
    """
    return IMAGE_SETS[name].ood if name in IMAGE_SETS else ()


@checked()
def read_images(name: str, split: str, root: Root = None) -> ArrayDataset:
    """Read one split of a set of small images, for example as out-of-distribution data.

    Args:
        name: name of a set of small images, such as "svhn".
        split: "train" or "test".
        root: folder of all data sets. None means the environment variable LEANBAYES_DATA.

    Returns:
        The images as uint8, and their labels.

    Raises:
        LeanBayesError: The name or the split is unknown, or a file is missing.
        FileFormatError: A file is damaged.

    Example:
        >>> from leanbayes.data import read_images
        >>> read_images("digits", "test")
        ArrayDataset(599 examples, x: uint8 (1, 8, 8), y: int64 ())
    """
    return read_split(lookup("set of small images", name, IMAGE_SETS), split, root)


def _existing(name: str, root: Root) -> Path | None:
    """Return the path of an existing file or folder, relative to the working directory or to the root."""
    folder = data_root(root)
    paths = [Path(name).expanduser(), *([folder / name] if folder else [])]
    return next((path for path in paths if os.path.exists(path)), None)


def _table(name: str, root: Root, any_ending: bool) -> Path:
    path = _existing(name, root)
    if path is not None and path.is_file() and (any_ending or name.lower().endswith(TABLE_ENDINGS)):
        return path
    if path is not None:
        raise LeanBayesError(f"{path} does not look like a table: pass a .csv file, or write csv:FILE.")
    if any_ending or "/" in name or "\\" in name or name.lower().endswith(TABLE_ENDINGS):
        raise LeanBayesError(f"There is no file or folder {name}: check the path.")
    listed = f"use {', '.join(NAMES)}, uci:NAME, csv:FILE, or the path of a table or of a folder of images."
    raise LeanBayesError(f"There is no data set {name!r}: {suggestion(name, NAMES, listed)}")


def _has_label_maps(path: Path) -> bool:
    return (path / "leftImg8bit").is_dir() or (path / "trainannot").is_dir()


def _load_directory(path: Path, resize: Size | None, validation_share: float, seed: int) -> Data:
    if resize is not None and (len(resize) != 2 or min(resize) < 1):
        raise LeanBayesError(f"resize={resize} must be a height and a width in pixels.")
    if _has_label_maps(path):
        return load_segmentation(path, resize, validation_share, seed)
    if (path / "train").is_dir():
        return load_folder(path, resize, validation_share, seed)
    raise LeanBayesError(
        f"{path} must have the layout train/CLASS/ with images, leftImg8bit/ with gtFine/ (Cityscapes), or train/ with "
        "trainannot/ (CamVid)."
    )
