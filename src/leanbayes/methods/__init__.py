"""Methods: one file or folder per paper, with its settings and what it adds to a plain training loop."""

from leanbayes.methods.baselines.abnn import ABNN
from leanbayes.methods.baselines.aeb import AEB
from leanbayes.methods.baselines.batch_ensemble import BatchEnsemble
from leanbayes.methods.baselines.cyclical_sgmcmc import CyclicalSGMCMC
from leanbayes.methods.baselines.deterministic import Deterministic
from leanbayes.methods.baselines.ensemble import Ensemble
from leanbayes.methods.baselines.laplace import Laplace
from leanbayes.methods.baselines.lp_bnn import LPBNN
from leanbayes.methods.baselines.mbnn import MBNN
from leanbayes.methods.baselines.mc_dropout import MCDropout
from leanbayes.methods.baselines.mimo import MIMO
from leanbayes.methods.baselines.packed_ensemble import PackedEnsemble
from leanbayes.methods.baselines.rank_one import RankOne
from leanbayes.methods.baselines.rigl import RigL
from leanbayes.methods.baselines.sbp import SBP
from leanbayes.methods.baselines.sngp import SNGP
from leanbayes.methods.baselines.sparse_vd import SparseVD
from leanbayes.methods.baselines.std_search import StdSearch
from leanbayes.methods.baselines.swa import SWA
from leanbayes.methods.baselines.swag import SWAG
from leanbayes.methods.baselines.variational_dropout import VariationalDropout
from leanbayes.methods.baselines.vbll import VBLL
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.pbn.pbn import PBN
from leanbayes.methods.registry import describe_method, get_method, parse_method
from leanbayes.methods.ssvi.ssvi import SSVI
from leanbayes.methods.vdp import VDP
from leanbayes.methods.weight_sharing.weight_sharing import WeightSharing
from leanbayes.model.method import METHODS

__all__ = [
    "ABNN",
    "AEB",
    "BASELINES",
    "LPBNN",
    "MBNN",
    "METHODS",
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
    "CyclicalSGMCMC",
    "Deterministic",
    "Ensemble",
    "Laplace",
    "MCDropout",
    "MeanField",
    "PackedEnsemble",
    "RankOne",
    "RigL",
    "SparseVD",
    "StdSearch",
    "VariationalDropout",
    "WeightSharing",
    "describe_method",
    "get_method",
    "parse_method",
]

# Lists show the methods of this library first, then the plain network, then the other baselines by name.
BASELINES = sorted(
    (name for name, method in METHODS.items() if ".baselines." in type(method).__module__),
    key=lambda name: (name != "deterministic", name),
)
for _name in BASELINES:
    METHODS[_name] = METHODS.pop(_name)
