"""leanbayes: efficient, scalable Bayesian neural networks for PyTorch."""

import types as _types
import typing as _typing
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec

from leanbayes.core.version import __version__
from leanbayes.deploy.calibration import calibrate
from leanbayes.deploy.compact.compact_file import CompactFile
from leanbayes.deploy.compact.compress import compress
from leanbayes.deploy.export import export_onnx, export_program
from leanbayes.deploy.hub import HubMixin, from_pretrained, push_to_hub
from leanbayes.deploy.loading import load
from leanbayes.deploy.model_file import save
from leanbayes.engines.ivon import IVON
from leanbayes.errors import (
    FileFormatError,
    LeanBayesError,
    MissingPackageError,
    NotFiniteError,
    RuleMismatchWarning,
    UnsupportedOperation,
)
from leanbayes.errors import missing_package as _missing_package
from leanbayes.likelihoods import (
    Bernoulli,
    BinaryPrediction,
    Categorical,
    CausalLM,
    ClassPrediction,
    Gaussian,
    HeteroscedasticGaussian,
    Prediction,
    RegressionPrediction,
    SequencePrediction,
    TokenPrediction,
)
from leanbayes.methods import (
    ABNN,
    AEB,
    LPBNN,
    MBNN,
    MIMO,
    PBN,
    SBP,
    SNGP,
    SSVI,
    SWA,
    SWAG,
    VBLL,
    VDP,
    BatchEnsemble,
    CyclicalSGMCMC,
    Deterministic,
    Ensemble,
    Laplace,
    MCDropout,
    MeanField,
    PackedEnsemble,
    RankOne,
    RigL,
    SparseVD,
    StdSearch,
    VariationalDropout,
    WeightSharing,
)
from leanbayes.methods.baselines.laplace import choose_prior
from leanbayes.methods.pbn.restriction import restrict
from leanbayes.methods.pbn.sensitivity import Sensitivity, sensitivity
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.conversion import bayesianize
from leanbayes.model.delta_method import delta_method
from leanbayes.model.generation import Generation, generate
from leanbayes.model.method import Method, Stage, Training
from leanbayes.model.objective import elbo_loss
from leanbayes.posteriors import Posterior
from leanbayes.priors import Normal, ScaleMixture
from leanbayes.rules import Moments, Rule, moment_rule

if _typing.TYPE_CHECKING:
    from leanbayes.evaluation import decide as decide
    from leanbayes.evaluation import plot as plot
    from leanbayes.evaluation.scores import evaluate as evaluate
    from leanbayes.model.fsdp import fully_shard as fully_shard
    from leanbayes.training import sklearn as sklearn
    from leanbayes.training.fit import fit as fit
    from leanbayes.training.recipe import Recipe as Recipe

__all__ = [
    "ABNN",
    "AEB",
    "IVON",
    "LPBNN",
    "MBNN",
    "MIMO",
    "PBN",
    "SBP",
    "SNGP",
    "SSVI",
    "SWA",
    "SWAG",
    "VBLL",
    "VDP",
    "BatchEnsemble",
    "BayesianModel",
    "Bernoulli",
    "BinaryPrediction",
    "Categorical",
    "CausalLM",
    "ClassPrediction",
    "CompactFile",
    "CyclicalSGMCMC",
    "Deterministic",
    "Ensemble",
    "FileFormatError",
    "Gaussian",
    "Generation",
    "HeteroscedasticGaussian",
    "HubMixin",
    "Laplace",
    "LeanBayesError",
    "MCDropout",
    "MeanField",
    "Method",
    "MissingPackageError",
    "Moments",
    "Normal",
    "NotFiniteError",
    "PackedEnsemble",
    "Posterior",
    "Prediction",
    "RankOne",
    "Recipe",
    "RegressionPrediction",
    "RigL",
    "Rule",
    "RuleMismatchWarning",
    "ScaleMixture",
    "Sensitivity",
    "SequencePrediction",
    "SparseVD",
    "Stage",
    "StdSearch",
    "TokenPrediction",
    "Training",
    "UnsupportedOperation",
    "VariationalDropout",
    "WeightSharing",
    "__version__",
    "bayesianize",
    "calibrate",
    "choose_prior",
    "compress",
    "decide",
    "delta_method",
    "elbo_loss",
    "evaluate",
    "export_onnx",
    "export_program",
    "fit",
    "from_pretrained",
    "fully_shard",
    "generate",
    "load",
    "moment_rule",
    "plot",
    "push_to_hub",
    "restrict",
    "save",
    "sensitivity",
    "sklearn",
]
_LAZY = {
    "Recipe": "leanbayes.training",
    "decide": "leanbayes.evaluation",
    "evaluate": "leanbayes.evaluation",
    "fit": "leanbayes.training",
    "fully_shard": "leanbayes.model.fsdp",
    "plot": "leanbayes.evaluation",
    "sklearn": "leanbayes.training.sklearn",
}
_EXTRAS = {"accelerate": "train", "sklearn": "sklearn"}
# So that `import *` works:
if _find_spec("accelerate") is None:
    __all__ = [name for name in __all__ if not _LAZY.get(name, "").startswith("leanbayes.training")]
if _find_spec("sklearn") is None:
    __all__ = [name for name in __all__ if name != "sklearn"]


def __getattr__(name: str) -> _typing.Any:
    """Import what the core does not need when it is first used: `fit` needs accelerate, `sklearn` scikit-learn too."""
    if name not in _LAZY:
        raise AttributeError(f"module 'leanbayes' has no attribute {name!r}")
    try:
        module = _import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise _missing_package(f"lb.{name} needs {error.name}", _EXTRAS.get(package, "train")) from None
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    """List the public names, those that are imported when first used too, and the packages that are imported."""
    public = {name: value for name, value in globals().items() if not name.startswith("_")}
    packages = [name for name, value in public.items() if isinstance(value, _types.ModuleType)]
    return sorted({*__all__, *packages, *(name for name in globals() if name.startswith("__"))})
