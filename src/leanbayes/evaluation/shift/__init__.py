"""Data that differs from what a model was trained on: corrupted images, rotation, noise, other class proportions."""

from leanbayes.evaluation.shift.corruptions import CORRUPTIONS, GEOMETRIC, corrupt
from leanbayes.evaluation.shift.geometry import rotate
from leanbayes.evaluation.shift.labels import label_shift
from leanbayes.evaluation.shift.noise import add_noise
from leanbayes.evaluation.shift.severity import SEVERITIES

__all__ = ["CORRUPTIONS", "GEOMETRIC", "SEVERITIES", "add_noise", "corrupt", "label_shift", "rotate"]
