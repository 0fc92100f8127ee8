"""The figures that every method has, from the results of `evaluate_fully` for each of its runs.

For several seeds, a line is the mean over them and its band reaches from the minimum to the maximum; bins of
reliability and entropy are summed. A figure that some run of a method lacks is left out.
"""

from leanbayes.report.figures.inside import of_method, segmentation, training
from leanbayes.report.figures.pruning_curve import pruning
from leanbayes.report.figures.reliability import calibration
from leanbayes.report.figures.shift_figures import shifts
from leanbayes.report.figures.uncertainty import entropies, ood_detection, selective

__all__ = [
    "calibration",
    "entropies",
    "of_method",
    "ood_detection",
    "pruning",
    "segmentation",
    "selective",
    "shifts",
    "training",
]
