"""The figures that every method has, from what `assess` found in each of its runs.

Where a method was trained with several seeds, a line is the mean over them, and its band reaches from the least to the
most; bins of reliability and of entropy are added up. What not all runs of a method have is left out.
"""

from leanbayes.report.figures.calibration import calibration
from leanbayes.report.figures.doubt import detection, entropies, selective
from leanbayes.report.figures.inside import of_method, pruning, segmentation, training
from leanbayes.report.figures.shift import shifts

__all__ = [
    "calibration",
    "detection",
    "entropies",
    "of_method",
    "pruning",
    "segmentation",
    "selective",
    "shifts",
    "training",
]
