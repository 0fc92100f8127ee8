"""How good a model's predictions are, and how far its uncertainty can be trusted."""

from leanbayes.evaluation.assessment import Look, assess
from leanbayes.evaluation.cost import costs_of
from leanbayes.evaluation.metrics import METRICS, Metric, Sum, Whole, mean
from leanbayes.evaluation.moments import accuracy_table, moment_accuracy
from leanbayes.evaluation.scores import Scores, evaluate

__all__ = [
    "METRICS",
    "Look",
    "Metric",
    "Scores",
    "Sum",
    "Whole",
    "accuracy_table",
    "assess",
    "costs_of",
    "evaluate",
    "mean",
    "moment_accuracy",
]
