"""Likelihoods p(y | network output): how a loss is computed, and what a prediction is."""

from leanbayes.likelihoods.base import Likelihood, NegativeLogLikelihood
from leanbayes.likelihoods.bernoulli import Bernoulli
from leanbayes.likelihoods.categorical import Categorical
from leanbayes.likelihoods.causal_lm import CausalLM, SequencePrediction, TokenPrediction
from leanbayes.likelihoods.predictive import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from leanbayes.likelihoods.regression import Gaussian, HeteroscedasticGaussian

__all__ = [
    "Bernoulli",
    "BinaryPrediction",
    "Categorical",
    "CausalLM",
    "ClassPrediction",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "NegativeLogLikelihood",
    "Prediction",
    "RegressionPrediction",
    "SequencePrediction",
    "TokenPrediction",
]
