"""Data sets in their original formats, any data set of one's own, and batches of them on a device."""

from leanbayes.data.base import ArrayDataset, Data
from leanbayes.data.batches import Batches
from leanbayes.data.corrupted import corruptions_on_disk, read_corrupted
from leanbayes.data.pictures import read_image
from leanbayes.data.registry import NAMES, load, read_images, task_of
from leanbayes.data.streaming import fingerprint
from leanbayes.data.tables import TABLE_ENDINGS, read_table
from leanbayes.data.transforms import Augment, Normalise
from leanbayes.data.wrapping import from_datasets

__all__ = [
    "NAMES",
    "TABLE_ENDINGS",
    "ArrayDataset",
    "Augment",
    "Batches",
    "Data",
    "Normalise",
    "corruptions_on_disk",
    "fingerprint",
    "from_datasets",
    "load",
    "read_corrupted",
    "read_image",
    "read_images",
    "read_table",
    "task_of",
]
