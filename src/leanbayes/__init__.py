"""leanbayes: efficient, scalable Bayesian neural networks for PyTorch."""

from leanbayes.bayesian import BayesianModel, bayesianize
from leanbayes.errors import FileFormatError, LeanBayesError, RuleMismatchWarning, UnsupportedOperation
from leanbayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from leanbayes.methods import Deterministic, Ensemble, MCDropout, MeanField
from leanbayes.objective import elbo
from leanbayes.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from leanbayes.priors import Normal, ScaleMixture
from leanbayes.saving import load

__version__ = "0.1.0"

__all__ = [
    "BayesianModel",
    "Bernoulli",
    "BinaryPrediction",
    "Categorical",
    "ClassPrediction",
    "Deterministic",
    "Ensemble",
    "FileFormatError",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LeanBayesError",
    "MCDropout",
    "MeanField",
    "Normal",
    "Prediction",
    "RegressionPrediction",
    "RuleMismatchWarning",
    "ScaleMixture",
    "UnsupportedOperation",
    "bayesianize",
    "elbo",
    "load",
]
