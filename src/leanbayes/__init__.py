"""leanbayes: efficient, scalable Bayesian neural networks for PyTorch."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from leanbayes.bayesian import BayesianModel
from leanbayes.compression.file import CompactFile, compress
from leanbayes.conversion import bayesianize
from leanbayes.errors import (
    FileFormatError,
    LeanBayesError,
    MissingPackageError,
    NotFiniteError,
    RuleMismatchWarning,
    UnsupportedOperation,
)
from leanbayes.export import export_onnx, export_program
from leanbayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from leanbayes.method import Method, Stage, Training
from leanbayes.methods import PBN, SSVI, VDP, Deterministic, Ensemble, MCDropout, MeanField, RigL, WeightSharing
from leanbayes.objective import elbo
from leanbayes.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from leanbayes.priors import Normal, ScaleMixture
from leanbayes.rules import Moments, moment_rule
from leanbayes.saving import load
from leanbayes.sensitivities import Sensitivity, sensitivity

if TYPE_CHECKING:
    from leanbayes.training.fit import fit as fit

__version__ = "0.1.0"

__all__ = [
    "PBN",
    "SSVI",
    "VDP",
    "BayesianModel",
    "Bernoulli",
    "BinaryPrediction",
    "Categorical",
    "ClassPrediction",
    "CompactFile",
    "Deterministic",
    "Ensemble",
    "FileFormatError",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LeanBayesError",
    "MCDropout",
    "MeanField",
    "Method",
    "Moments",
    "Normal",
    "NotFiniteError",
    "Prediction",
    "RegressionPrediction",
    "RigL",
    "RuleMismatchWarning",
    "ScaleMixture",
    "Sensitivity",
    "Stage",
    "Training",
    "UnsupportedOperation",
    "WeightSharing",
    "bayesianize",
    "compress",
    "elbo",
    "export_onnx",
    "export_program",
    "fit",
    "load",
    "moment_rule",
    "sensitivity",
]
if find_spec("accelerate") is None:
    __all__.remove("fit")  # so that `import *` finds all of them


def __getattr__(name: str) -> Any:
    """Import `fit` when it is first asked for: it needs accelerate, and the rest does not."""
    if name != "fit":
        raise AttributeError(f"module 'leanbayes' has no attribute {name!r}")
    try:
        from leanbayes.training import fit
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"lb.fit needs {error.name}: pip install 'leanbayes[train]'.") from None
    return fit
