"""Data sets in their published formats, wrappers for your own data sets, and batches on a device."""

from leanbayes.data.base import ArrayDataset, Data
from leanbayes.data.batches import Batches
from leanbayes.data.corrupted import corruptions_on_disk, read_corrupted
from leanbayes.data.image_files import detail_lost, read_image
from leanbayes.data.registry import NAMES, has_color_classes, load, ood_partners, preset, read_images, task_of
from leanbayes.data.streaming import fingerprint
from leanbayes.data.tabular import TABLE_ENDINGS, read_table
from leanbayes.data.transforms import Augment, Normalize
from leanbayes.data.wrapping import from_datasets

__all__ = [
    "NAMES",
    "TABLE_ENDINGS",
    "ArrayDataset",
    "Augment",
    "Batches",
    "Data",
    "Normalize",
    "corruptions_on_disk",
    "detail_lost",
    "fingerprint",
    "from_datasets",
    "has_color_classes",
    "load",
    "ood_partners",
    "preset",
    "read_corrupted",
    "read_image",
    "read_images",
    "read_table",
    "task_of",
]
