"""Loading a data set by its name or its path."""

import difflib
from pathlib import Path

from leanbayes.data.base import ArrayDataset, Data, Task
from leanbayes.data.files import Root, data_root
from leanbayes.data.folders import load_folder
from leanbayes.data.images import IMAGE_SETS, load_images, read_split
from leanbayes.data.pictures import Size
from leanbayes.data.segmentation import load_segmentation
from leanbayes.data.tables import TABLE_ENDINGS, UCI_FILES, load_table, load_toy, load_uci
from leanbayes.errors import LeanBayesError

NAMES = tuple(sorted([*IMAGE_SETS, *UCI_FILES, "toy"]))


def load(
    name: str | Path,
    root: Root = None,
    *,
    validation_share: float = 0.1,
    seed: int = 0,
    resize: Size | None = None,
) -> Data:
    """Load one of `NAMES`, `uci:NAME`, `csv:PATH`, or a path to a table or to a folder of pictures.

    Files are looked for under `root`, or where the environment variable LEANBAYES_DATA says. `seed` chooses the share
    of the training examples that is for validation; test sets do not depend on it. `resize` (height, width) is for
    folders of pictures.
    """
    text = str(name)
    known = _known(text)
    kind, _, rest = text.partition(":")
    folder = None if known or kind in ("uci", "csv") else _existing(text, root)
    if folder is not None and folder.is_dir():
        return _load_directory(folder, resize, validation_share, seed)
    if resize is not None:
        raise LeanBayesError(f"resize is for folders of pictures, and {text} is none: leave it out.")
    if known in IMAGE_SETS:
        return load_images(known, root, validation_share, seed)
    if known == "toy":
        return load_toy(validation_share, seed)
    if known or kind == "uci":
        return load_uci(known or _known(rest) or rest, root, validation_share, seed)
    return load_table(_table(rest if kind == "csv" else text, root, kind == "csv"), validation_share, seed)


def task_of(name: str | Path, root: Root = None) -> Task:
    """Tell what kind of task a name or a path is, without loading it."""
    text = str(name)
    known = _known(text)
    if known in IMAGE_SETS:
        return "classification"
    folder = None if known or text.startswith(("uci:", "csv:")) else _existing(text, root)
    if folder is None or not folder.is_dir():
        return "regression"
    return "segmentation" if _has_label_maps(folder) else "classification"


def read_images(name: str, split: str, root: Root = None) -> ArrayDataset:
    """Read one split, `train` or `test`, of a set of small images, as a test of other data needs it."""
    known = _known(name)
    if known not in IMAGE_SETS:
        raise LeanBayesError(f"{name!r} is no set of small images: choose one of {', '.join(IMAGE_SETS)}.")
    return read_split(known, split, root)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _known(name: str) -> str:
    """Return the name in `NAMES` that is meant, whatever its case and hyphens; else the empty text."""
    return next((known for known in NAMES if _plain(known) == _plain(name)), "")


def _existing(name: str, root: Root) -> Path | None:
    """Return the file or folder of this path, from here or from the root."""
    folder = data_root(root)
    paths = [Path(name).expanduser(), *([folder / name] if folder else [])]
    return next((path for path in paths if path.exists()), None)


def _table(name: str, root: Root, any_ending: bool) -> Path:
    path = _existing(name, root)
    if path is not None and path.is_file() and (any_ending or name.lower().endswith(TABLE_ENDINGS)):
        return path
    if path is not None:
        raise LeanBayesError(f"{path} is not taken for a table: give a file that is called .csv, or write csv:FILE.")
    if any_ending or "/" in name or "\\" in name or name.lower().endswith(TABLE_ENDINGS):
        raise LeanBayesError(f"There is no file or folder {name}: check the path.")
    close = difflib.get_close_matches(_plain(name), {_plain(known): known for known in NAMES}, n=1)
    hint = f" Did you mean {_known(close[0])}?" if close else ""
    raise LeanBayesError(
        f"There is no data set {name!r}.{hint} The names are {', '.join(NAMES)}; uci:NAME, csv:FILE, or the path to a "
        "table or to a folder of pictures will do as well."
    )


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
        f"{path} has none of the known layouts: train/CLASS/ with pictures, leftImg8bit/ with gtFine/ (Cityscapes), or "
        "train/ with trainannot/ (CamVid)."
    )
