"""Evaluation of predictions and of their uncertainty: metrics, shift, out-of-distribution data, and cost."""

from leanbayes.evaluation import decide as decide
from leanbayes.evaluation import plot as plot
from leanbayes.evaluation.cost import costs_of
from leanbayes.evaluation.full_evaluation import EvaluationSettings, evaluate_fully
from leanbayes.evaluation.layer_accuracy import accuracy_table, moment_accuracy
from leanbayes.evaluation.metrics import METRICS, Metric, Sum, Whole, mean
from leanbayes.evaluation.scores import Scores, evaluate

__all__ = [
    "METRICS",
    "EvaluationSettings",
    "Metric",
    "Scores",
    "Sum",
    "Whole",
    "accuracy_table",
    "costs_of",
    "evaluate",
    "evaluate_fully",
    "mean",
    "moment_accuracy",
]
