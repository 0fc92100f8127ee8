"""How good a model's predictions are, and how far its uncertainty can be trusted."""

from leanbayes.evaluation.scores import Scores, evaluate

__all__ = ["Scores", "evaluate"]
