"""Decisions from predictions: when to answer, when to ask a person, and sets and intervals with a coverage."""

from leanbayes.likelihoods.decisions.abstention import Abstention
from leanbayes.likelihoods.decisions.conformal import ConformalIntervals, ConformalSets
from leanbayes.likelihoods.decisions.ood_gate import OODGate
from leanbayes.likelihoods.decisions.policy import Decision, Policy

__all__ = ["Abstention", "ConformalIntervals", "ConformalSets", "Decision", "OODGate", "Policy"]
