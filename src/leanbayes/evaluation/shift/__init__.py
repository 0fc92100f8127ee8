"""Distribution shift of test data: corrupted images, rotation, noise, and label shift."""

from leanbayes.evaluation.shift.additive_noise import add_noise
from leanbayes.evaluation.shift.corruptions import CORRUPTIONS, GEOMETRIC, corrupt
from leanbayes.evaluation.shift.geometry import rotate
from leanbayes.evaluation.shift.label_shift import label_shift
from leanbayes.evaluation.shift.severity import SEVERITIES

__all__ = ["CORRUPTIONS", "GEOMETRIC", "SEVERITIES", "add_noise", "corrupt", "label_shift", "rotate"]
